"""Prompt lookup decoding: what followed the same n-gram earlier in the prompt or the answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from specds.decode.contracts import NO_RESOURCES, Drafter, Resources, Step
from specds.decode.draft import Draft, Origin, Source, chain, empty
from specds.decode.registry import option, ordered
from specds.decode.text.context import Context

_SOURCE = Source("pld", retrieved=True)


class PromptLookup(Drafter):
    """Match the last n tokens, n from the longest to the shortest, and copy what followed the earliest match."""

    @dataclass(frozen=True, slots=True)
    class Options:
        """Options of prompt lookup."""

        max_ngram: int = option(3, "longest n-gram matched", least=1, tries=(2, 4, 6))
        min_ngram: int = option(1, "shortest n-gram matched", least=1, tries=(2, 3))
        length: int = option(10, "most tokens copied", least=1)

        def __post_init__(self) -> None:
            ordered("min_ngram", self.min_ngram, "max_ngram", self.max_ngram)

    summary: ClassVar[str] = "copies what followed the same n-gram earlier in the prompt or the answer"
    source: ClassVar[str] = "Prompt lookup decoding (Saxena, 2023)"

    def __init__(self, options: Options, resources: Resources = NO_RESOURCES) -> None:
        self._options = options
        self._context = Context(())

    def start(self, prompt: Sequence[int]) -> None:
        """See `Drafter.start`."""
        self._context = Context(prompt)

    def observe(self, step: Step) -> None:
        """See `Drafter.observe`."""
        self._context.extend(step.tokens)

    def propose(self, budget: int) -> Draft:
        """A chain of at most `length` tokens; a token's score is the share of all matches that agree so far."""
        tokens = self._context.tokens
        for size in range(self._options.max_ngram, self._options.min_ngram - 1, -1):
            follows = continuations(tokens, tokens[len(tokens) - size :]) if size < len(tokens) else tokens[:0]
            if len(follows):
                end = min(int(follows[0]) + min(self._options.length, budget), len(tokens))
                copied = tokens[follows[0] : end]
                origin = Origin.of(_SOURCE, len(copied), int(follows[0]))
                return chain(copied, _agreement(tokens, follows, copied), origin)
        return empty()


def continuations(tokens: NDArray[np.int64], ngram: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where occurrences of an n-gram are continued, ascending; those at the very end are not."""
    last = len(tokens) - len(ngram)
    if last <= 0:
        return np.empty(0, np.int64)
    hits = tokens[:last] == ngram[0]
    for offset in range(1, len(ngram)):
        hits &= tokens[offset : last + offset] == ngram[offset]
    return np.flatnonzero(hits) + len(ngram)


def _agreement(tokens: NDArray[np.int64], follows: NDArray[np.int64], copied: NDArray[np.int64]) -> list[float]:
    scores = []
    for depth, token in enumerate(copied):
        here = follows + depth
        agree = follows[tokens[np.minimum(here, len(tokens) - 1)] == token]
        scores.append(len(agree) / (len(follows) + 1))
        follows = agree
    return scores
