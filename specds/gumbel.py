"""Compiled: noise keyed by position and token, and the token that wins with it (the Gumbel-max trick)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import int64, uint64

from specds.jit import compiled

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
FIRST = np.uint64(0xBF58476D1CE4E5B9)
SECOND = np.uint64(0x94D049BB133111EB)
_LOG2_E = 1.4426950408889634


@compiled
def mix(state: Any) -> Any:
    """SplitMix64's output function: a uint64 that depends on every bit of the state, a uint64."""
    state = (state ^ (state >> uint64(30))) * FIRST
    state = (state ^ (state >> uint64(27))) * SECOND
    return state ^ (state >> uint64(31))


@compiled
def stream(low: Any, high: Any, position: Any) -> Any:
    """The SplitMix64 state from which the bits of one position are drawn: one output for each token id."""
    return mix(uint64(low) ^ mix(uint64(high) + uint64(position) * GOLDEN))


@compiled
def bits(state: Any, token: Any) -> Any:
    """64 random bits for a token id: output number `token` of the stream."""
    return mix(state + (uint64(token) + uint64(1)) * GOLDEN)


@compiled
def gumbel_of(raw: Any) -> float:
    """A standard Gumbel draw, -log(-log u), from 64 bits; u has 52 of them, centred in their cell: never 0, never 1."""
    uniform = (float(raw >> uint64(12)) + 0.5) * 2.0**-52
    return -math.log(-math.log(uniform))


@compiled
def gumbels(state: Any, tokens: Any, out: Any) -> None:
    """out[i] = the draw of tokens[i]: float[k] of integers [k], with the stream of `state`, a uint64."""
    for index in range(len(tokens)):
        out[index] = gumbel_of(bits(state, tokens[index]))


@compiled
def race(logits: Any, temperature: float, state: Any) -> Any:
    """argmax over all tokens of logit / temperature + Gumbel draw, for logits float32[V]; the first of equals.

    Logarithms are taken only where they can matter: a draw above d needs 1 - u < e^-d, and the leading ones of u's
    bits bound 1 - u.
    """
    best, winner = -math.inf, int64(0)
    for token in range(len(logits)):
        score = float(logits[token]) / temperature
        raw = bits(state, token)
        distance = (best - score) * _LOG2_E
        if distance > 1.0:
            if distance > 64.0:
                continue
            # distance leading ones at least, less one for what the bound leaves open
            needed = uint64(int64(distance) - 1)
            if needed > uint64(0) and (raw >> (uint64(64) - needed)) != (uint64(1) << needed) - uint64(1):
                continue
        value = score + gumbel_of(raw)
        if value > best:
            best, winner = value, token
    return winner


@compiled
def race_among(scaled: Any, tokens: Any, state: Any) -> Any:
    """The same over some tokens, integers [k], with their logits [k] already divided by the temperature."""
    best, winner = -math.inf, int64(0)
    for index in range(len(tokens)):
        value = float(scaled[index]) + gumbel_of(bits(state, tokens[index]))
        if value > best:
            best, winner = value, tokens[index]
    return winner


@compiled
def nucleus(scaled: Any, top_p: float, kept: Any) -> int:
    """Which of some scaled logits, float[k], top-p keeps: their indices into `kept` [k], ascending; returns how many.

    Of the tokens by rising probability those go whose summed mass is at most 1 - top_p; the likeliest always stays.
    Tokens that even together with all others of their probability do not reach 1 - top_p need no sorting.
    """
    count = len(scaled)
    highest = scaled[0]
    for index in range(count):
        highest = max(highest, scaled[index])
    weights = np.empty(count, np.float64)
    total = 0.0
    for index in range(count):
        weights[index] = math.exp(float(scaled[index] - highest))
        total += weights[index]
    least = total * (1.0 - top_p) / count
    size = 0
    below = 0.0
    for index in range(count):
        if weights[index] > least:
            kept[size] = index
            size += 1
        else:
            below += weights[index]
    if size == 0:  # all alike, or nearly
        for index in range(count):
            kept[index] = index
        size, below = count, 0.0
    candidates = kept[:size].copy()
    order = np.argsort(weights[candidates], kind="mergesort")
    mass = below
    first = 0
    while first < size - 1:
        mass += weights[candidates[order[first]]]
        if mass > total * (1.0 - top_p):
            break
        first += 1
    chosen = np.sort(candidates[order[first:]])
    kept[: len(chosen)] = chosen
    return len(chosen)
