"""SAM-Decoding: what followed the longest suffix of the text, in the text itself or in a datastore."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from specds.datastore.suffix import Match, SuffixIndex
from specds.decode.contracts import NO_RESOURCES, Drafter, Resources, Signal, Step
from specds.decode.draft import Draft, Origin, Source, chain, empty, tree
from specds.decode.drafters.fallback import Fallback
from specds.decode.registry import option
from specds.decode.text.automaton import SuffixAutomaton
from specds.decode.text.context import Context

_TEXT, _STORE = Source("sam text", retrieved=True), Source("sam store", retrieved=True)


class Sam(Drafter):
    """The longest match of two: by the automaton over prompt and answer, and in the stores' suffix indexes.

    A match shorter than the threshold is left to the fallback (SAM-Decoding, §3.3).
    """

    @dataclass(frozen=True, slots=True)
    class Options:
        """Options of SAM-Decoding."""

        threshold: int = option(5, "matches shorter than this are left to the fallback", least=1)
        bias: int = option(5, "by how much a store's match must be longer than the text's own to be taken", least=0)
        length: int = option(40, "most tokens copied", least=1)
        growth: float = option(4.0, "tokens copied for each matched token", least=0.1)
        max_match: int = option(16, "longest suffix looked up in a store", least=1)
        fallback: str = option(
            "recycling", "the drafter that drafts where nothing matches; none: nobody", tries=("pld", "none")
        )

    summary: ClassVar[str] = "longest suffix of the text in the text itself (automaton) or in a store; else a fallback"
    source: ClassVar[str] = "SAM-Decoding (Hu et al., 2024)"
    indexes: ClassVar[tuple[str, ...]] = ("suffix",)

    def __init__(self, options: Options, resources: Resources = NO_RESOURCES) -> None:
        self._options = options
        self._indexes = resources.suffix
        self._fallback = Fallback(options.fallback, "sam")
        self.needs: frozenset[Signal] = self._fallback.needs
        self.layer = self._fallback.layer
        self._context = Context(())
        self._automaton = SuffixAutomaton()

    def start(self, prompt: Sequence[int]) -> None:
        """See `Drafter.start`."""
        self._context = Context(prompt)
        self._automaton = SuffixAutomaton()
        self._automaton.extend(np.asarray(prompt, np.int64))
        self._fallback.start(prompt)

    def observe(self, step: Step) -> None:
        """See `Drafter.observe`."""
        self._context.extend(step.tokens)
        self._automaton.extend(np.array(step.tokens, np.int64))
        self._fallback.observe(step)

    def propose(self, budget: int) -> Draft:
        """A chain copied from the text, or the counted tree of a store's match."""
        length, end = self._automaton.longest()
        store, match = self._longest_in_stores()
        if match is not None and match.length > length + self._options.bias:
            length = match.length
        else:
            store = None
        if length < self._options.threshold:
            return self._fallback.propose(budget)
        reach = min(self._options.length, 1 + int(length * self._options.growth))
        if store is not None and match is not None:
            tokens, parents, counts = store.continuations(match, min(reach, 64), min(budget, 64))
            return tree(tokens, parents, counts, match.occurrences, _STORE)
        copied = self._context.tokens[end : end + min(reach, budget)]
        # The longer the match, the surer the copy; each token further is as sure as the one before.
        score = [1.0 - 1.0 / (1.0 + length)] * len(copied)
        return chain(copied, score, Origin.of(_TEXT, len(copied), end)) if len(copied) else empty()

    def _longest_in_stores(self) -> tuple[SuffixIndex | None, Match | None]:
        best: tuple[SuffixIndex | None, Match | None] = (None, None)
        tail = self._context.tokens[-self._options.max_match :]
        for index in self._indexes:
            match = index.match(tail, self._options.max_match, 1)
            if match.occurrences and (best[1] is None or match.length > best[1].length):
                best = index, match
        return best
