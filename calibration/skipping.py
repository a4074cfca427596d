"""Which layers a model can leave out when it drafts for itself: greedy search by agreement and cost (SWIFT)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from specds.decode.contracts import Item, Target
from specds.decode.draft_model import SKIP
from specds.decode.pricing.curve import CostCurve
from specds.decode.prompt import hold
from specds.sampling import highest, unchecked

_MOST_GAMMA = 8


@dataclass(frozen=True, slots=True)
class Choice:
    """A set of layers left out.

    Attributes:
        skip: the layers, 0 the first.
        agreement: share of positions at which the next token is still the whole model's own.
        cost: time of a pass without them over that of a whole pass.
        gamma: how many tokens a step are best drafted.
        speed: expected tokens a second over plain decoding's, at that γ.
    """

    skip: frozenset[int]
    agreement: float
    cost: float
    gamma: int
    speed: float

    @property
    def name(self) -> str:
        """As `--draft-model` takes it."""
        return SKIP + ",".join(_ranges(sorted(self.skip)))


def choose_skip(
    target: Target,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    layers: int,
    curve: CostCurve,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Choice]:
    """Leave out one layer after the other, each time the one that costs least agreement; the best set first.

    The target decodes the prompts greedily, and beside each of its steps drafts one token without the layers of each
    candidate set, over the same cache, as it will when it drafts for itself. The search ends when the expected speed
    has fallen for three layers, or half of the layers are left out.

    Args:
        prompts: token ids; a handful is enough.
        tokens: how many are decoded after each.
        layers: of the model; the first and the last are always kept.
        curve: what passes cost.
    """
    inner = range(1, layers - 1)
    rounds = max(1, len(inner) // 2)
    choices: list[Choice] = []
    skip: frozenset[int] = frozenset()
    for number in range(rounds):
        candidates = [skip | {layer} for layer in inner if layer not in skip]
        if not candidates:
            break
        agreed, cost = _judge(target, prompts, tokens, candidates)
        best = int(np.argmax(agreed))
        skip = candidates[best]
        choices.append(Choice(skip, float(agreed[best]), cost, *_speed(float(agreed[best]), cost, curve)))
        progress(number + 1, rounds)
        falling = [choice.speed for choice in choices[-4:]]
        if len(falling) == 4 and falling == sorted(falling, reverse=True):
            break
    return sorted(choices, key=lambda choice: -choice.speed)


def _judge(
    target: Target, prompts: Sequence[Sequence[int]], tokens: int, candidates: Sequence[frozenset[int]]
) -> tuple[np.ndarray, float]:
    """The share of positions at which each candidate agrees, and the cost of a pass without so many layers."""
    agreed, positions = np.zeros(len(candidates)), 0
    short, whole = [], []
    for prompt in prompts:
        slot = hold(target, prompt[:-1], len(prompt) + tokens + 1)
        token = prompt[-1]
        for _ in range(tokens):
            guesses = []
            for candidate in candidates:
                began = time.perf_counter()
                guesses.append(_argmax(target.layer_skip(slot, token, 0, candidate)))
                short.append(time.perf_counter() - began)
            began = time.perf_counter()
            following = _argmax(target.forward([Item.chain(slot, [token])]).logits[0])
            whole.append(time.perf_counter() - began)
            target.commit(slot, [0])
            agreed += np.array(guesses) == following
            positions += 1
            token = following
        target.close(slot)
    return agreed / positions, float(np.median(short) / np.median(whole))


def _speed(agreement: float, cost: float, curve: CostCurve) -> tuple[int, float]:
    """The best γ, and tokens a step over its time in passes of one token (Leviathan et al., 2023, Theorem 3.8)."""
    times = curve.at(curve.contexts[0])

    def speed(gamma: int) -> float:
        tokens = sum(agreement**depth for depth in range(gamma + 1))
        return float(tokens / (times[gamma + 1] / times[1] + gamma * cost))

    best = max(range(1, min(_MOST_GAMMA, len(times) - 2) + 1), key=speed)
    return best, speed(best)


def _argmax(logits: object) -> int:
    return highest(unchecked(logits))  # type: ignore[arg-type]


def _ranges(layers: Sequence[int]) -> Iterator[str]:
    start = 0
    for place in range(1, len(layers) + 1):
        if place == len(layers) or layers[place] != layers[place - 1] + 1:
            low, high = layers[start], layers[place - 1]
            yield str(low) if low == high else f"{low}-{high}"
            start = place
