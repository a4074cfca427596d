"""How a token is picked from logits: temperature, top-k, top-p, and noise keyed by seed and position."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from specds import gumbel
from specds.errors import ModelError, UsageError

_GOLDEN, _FIRST, _SECOND = (int(constant.view(np.int64)) for constant in (gumbel.GOLDEN, gumbel.FIRST, gumbel.SECOND))


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling options, with the meanings and the order of application that transformers gives them.

    Attributes:
        temperature: divides the logits; 0 is greedy decoding.
        top_k: keep the k largest logits (ties with the k-th stay); 0 keeps all.
        top_p: of the tokens by falling probability keep the fewest that together reach top_p; 1 keeps all.
        seed: the same seed and the same prompt give the same text, whatever the drafter.

    Raises:
        UsageError: a value out of its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < float("inf"):
            raise UsageError(f"--temperature is {self.temperature}", "0 (greedy) or a positive number")
        if self.top_k < 0:
            raise UsageError(f"--top-k is {self.top_k}", "0 (off) or a positive number")
        if not 0.0 < self.top_p <= 1.0:
            raise UsageError(f"--top-p is {self.top_p}", "above 0 and at most 1 (off)")
        if self.seed < 0:
            raise UsageError(f"--seed is {self.seed}", "0 or a positive number")

    @property
    def greedy(self) -> bool:
        """Whether the target's most likely token is always taken."""
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True)
class Noise:
    """Gumbel noise for one request: a pure function of (key, absolute position, token id).

    Counter-based (SplitMix64), so that the noise at a position does not depend on how many positions were looked
    at before it: this is what makes a drafted text equal to the undrafted one at any temperature.
    """

    key: tuple[int, int]

    @classmethod
    def of(cls, seed: int, prompt: Sequence[int], sample: int = 0) -> Noise:
        """The noise of a request: keyed by the seed, the prompt's token ids, and which sample of the prompt it is.

        Keyed by content and not by row, so that splitting a file of prompts over jobs changes no answer.
        """
        digest = hashlib.sha256(f"{seed}:{sample}:".encode() + np.asarray(prompt, dtype="<i8").tobytes()).digest()
        return cls((int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:16], "little")))

    def at(self, position: int) -> np.uint64:
        """The state of a position's stream."""
        return np.uint64(gumbel.stream(np.uint64(self.key[0]), np.uint64(self.key[1]), np.uint64(position)))

    def gumbel(self, position: int, tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        """float64[len(tokens)]: independent standard Gumbel draws, one for each token id."""
        draws = np.empty(len(tokens))
        gumbel.gumbels(self.at(position), np.asarray(tokens, np.int64), draws)
        return draws


def pick(logits: torch.Tensor, sampling: Sampling, noise: Noise, position: int) -> int:
    """The target's token at one position: argmax over the kept tokens of logit / temperature + Gumbel noise.

    An exact draw from the softmax of the warped logits (the Gumbel-max trick).

    Args:
        logits: float[vocabulary].
        position: absolute position of the token to pick.
    """
    row = numbers(logits)
    if sampling.greedy:
        return int(row.argmax())
    if not sampling.top_k and sampling.top_p == 1.0:
        return int(gumbel.race(row, sampling.temperature, noise.at(position)))
    kept, scaled = _warp(row, sampling)
    return int(gumbel.race_among(scaled, kept, noise.at(position)))


def numbers(logits: torch.Tensor) -> NDArray[np.float32]:
    """A row of logits on the CPU in float32.

    Raises:
        ModelError: one of them is not a number; any token that came of that would be arbitrary.
    """
    row = unchecked(logits)
    highest(row)
    return row


def highest(row: NDArray[np.float32]) -> int:
    """The token with the largest logit, of equals the first.

    Raises:
        ModelError: one of the logits is not a number.
    """
    token = int(row.argmax())  # of the first NaN, if there is one
    return known(-1 if np.isnan(row[token]) else token)


def known(token: int) -> int:
    """A token that was picked.

    Raises:
        ModelError: there is none, -1: one of the logits was not a number.
    """
    if token < 0:
        raise ModelError("the model gives logits that are NaN", "its weights are damaged, or overflow its dtype")
    return token


def likeliest_rows(logits: torch.Tensor) -> list[int]:
    """The token with the largest logit of each row, with one transfer; -1 where one of them is not a number."""
    tokens = logits.argmax(dim=-1)  # of the first NaN, if there is one
    highest_logits = logits.gather(-1, tokens[:, None])[:, 0]
    return list(torch.where(highest_logits.isnan(), -1, tokens).tolist())


def unchecked(logits: torch.Tensor) -> NDArray[np.float32]:
    """The same of a row that a token was picked from already; not read as a whole."""
    row: NDArray[np.float32] = logits.detach().float().cpu().numpy()
    return row


def pick_rows(logits: torch.Tensor, sampling: Sampling, noise: Noise, positions: Sequence[int]) -> list[int]:
    """`pick` for every row at once, on the logits' own device, with one transfer at the end.

    The same draws; sums may round otherwise than on the CPU, as the logits themselves do.

    Args:
        logits: float[n, vocabulary].
        positions: n absolute positions.

    Returns:
        a token for each row; -1 where one of the logits is not a number.
    """
    if sampling.greedy:
        return likeliest_rows(logits)
    scaled = logits.detach().double() / sampling.temperature
    if 0 < sampling.top_k < scaled.shape[-1]:
        least = torch.topk(scaled, sampling.top_k, dim=-1).values[:, -1:]
        scaled = scaled.masked_fill(scaled < least, float("-inf"))
    if sampling.top_p < 1.0:
        ordered, order = torch.sort(scaled, dim=-1, stable=True)
        gone = torch.softmax(ordered.double(), dim=-1).cumsum(dim=-1) <= 1.0 - sampling.top_p
        gone[:, -1] = False
        scaled = scaled.masked_fill(torch.zeros_like(gone).scatter(1, order, gone), float("-inf"))
    states = np.array([noise.at(position) for position in positions], np.uint64).view(np.int64)
    counter = torch.arange(1, scaled.shape[-1] + 1, device=scaled.device) * _GOLDEN
    raw = _mix(torch.from_numpy(states).to(scaled.device)[:, None] + counter)
    uniform = (_shifted(raw, 12).double() + 0.5) * 2.0**-52
    # Warping may leave out what is not a number.
    sums = torch.where(logits.isnan().any(dim=-1, keepdim=True), torch.nan, scaled - torch.log(-torch.log(uniform)))
    return likeliest_rows(sums)


def _mix(state: torch.Tensor) -> torch.Tensor:
    """`gumbel.mix` on int64, whose products wrap around."""
    state = (state ^ _shifted(state, 30)) * _FIRST
    state = (state ^ _shifted(state, 27)) * _SECOND
    return state ^ _shifted(state, 31)


def _shifted(state: torch.Tensor, count: int) -> torch.Tensor:
    """Right shift without the sign."""
    return (state >> count) & ((1 << (64 - count)) - 1)


def warp(logits: torch.Tensor, sampling: Sampling) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The token ids that temperature, top-k and top-p leave, ascending, and their scaled logits.

    Args:
        logits: float[vocabulary].

    Raises:
        ModelError: one of the logits is not a number.
    """
    return _warp(numbers(logits), sampling)


def _warp(row: NDArray[np.float32], sampling: Sampling) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    scaled = row.astype(np.float64) / sampling.temperature  # in float32 a tiny temperature makes everything infinite
    kept = np.arange(len(scaled))
    if 0 < sampling.top_k < len(scaled):
        least = np.partition(scaled, -sampling.top_k)[-sampling.top_k]
        kept = np.flatnonzero(scaled >= least)
        scaled = scaled[kept]
    if sampling.top_p < 1.0:
        chosen = np.empty(len(scaled), np.int64)
        chosen = chosen[: gumbel.nucleus(scaled, sampling.top_p, chosen)]
        kept, scaled = kept[chosen], scaled[chosen]
    return kept, scaled
