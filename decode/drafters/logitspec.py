"""LogitSpec: the runners-up for the last token as guesses of the one after it, each continued by retrieval."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from specds.decode.context import Context
from specds.decode.contracts import TOP, Signal, Step
from specds.decode.draft import Draft, empty, merge
from specds.decode.drafters.pld import continuations
from specds.decode.registry import option


class LogitSpec:
    """Retrieval for the next token, and for each guess of it that the last logits hold (LogitSpec, §3.2–3.3).

    What was likely in the last token's place is often what follows it.
    """

    @dataclass(frozen=True, slots=True)
    class Options:
        """Options of LogitSpec."""

        guesses: int = option(TOP, f"guesses taken from the last logits, at most {TOP}", least=0)
        max_ngram: int = option(3, "longest n-gram matched", least=1)
        length: int = option(10, "most tokens copied", least=1)

    summary: ClassVar[str] = "copies what followed the last n-gram, and what followed each runner-up of the last logits"
    source: ClassVar[str] = "LogitSpec (Liu et al., 2026)"
    index: ClassVar[str | None] = None
    store_required: ClassVar[bool] = False
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.TOPK})

    def __init__(self, options: Options, indexes: Sequence[object] = ()) -> None:
        self._options = options
        self._context = Context(())
        self._guesses = np.empty(0, np.int32)

    def start(self, prompt: Sequence[int]) -> None:
        """See `Drafter.start`."""
        self._context = Context(prompt)
        self._guesses = np.empty(0, np.int32)

    def observe(self, step: Step) -> None:
        """Keep the runners-up of the row that the last committed token was picked from."""
        self._context.extend(step.tokens)
        row = step.path[len(step.tokens) - 2] + 1 if len(step.tokens) > 1 else 0
        top = step.signals[Signal.TOPK][row]
        self._guesses = top[(top != step.tokens[-1]) & (top >= 0)][: self._options.guesses]

    def propose(self, budget: int) -> Draft:
        """One tree of the n-gram's continuation and of the guesses with theirs."""
        tokens, most = self._context.tokens, min(self._options.length, budget)
        if most < 1:
            return empty()
        paths: list[NDArray[np.int64]] = []
        weights: list[float] = []
        copied, size = self._copied(tokens, most)
        if len(copied):
            paths.append(copied)
            weights.append(float(size))
        for rank, guess in enumerate(self._guesses):
            after, known = self._copied(np.append(tokens[-self._options.max_ngram :], guess), most - 1, memory=tokens)
            # A guess that the text continues after the same token is likelier than one that it does not.
            paths.append(np.concatenate([[guess], after if known > 1 else after[:0]]))
            weights.append((1.0 if known > 1 else 0.3) / (rank + 1))
        return merge(paths, weights, budget)

    def _copied(
        self, tail: NDArray[np.int64], most: int, memory: NDArray[np.int64] | None = None
    ) -> tuple[NDArray[np.int64], int]:
        """What followed the longest n-gram at the end of `tail` in the memory, and how long the n-gram is."""
        memory = tail if memory is None else memory
        for size in range(min(self._options.max_ngram, len(tail)), 0, -1):
            follows = continuations(memory, tail[-size:])
            if len(follows):
                return memory[follows[0] : follows[0] + most], size
        return memory[:0], 0
