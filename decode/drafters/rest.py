"""REST: what followed the longest suffix of the context in a datastore, as a counted tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from specds.decode.contracts import NO_RESOURCES, Drafter, Resources, Step
from specds.decode.draft import Draft, Source, empty, tree
from specds.decode.registry import option, ordered
from specds.decode.text.context import Context

_SOURCE = Source("rest", retrieved=True)


class Rest(Drafter):
    """The longest suffix that the static index holds, and the most frequent continuations of all its occurrences."""

    @dataclass(frozen=True, slots=True)
    class Options:
        """Options of REST."""

        max_match: int = option(16, "longest suffix of the context looked up", least=1)
        min_match: int = option(2, "shortest suffix looked up", least=1, tries=(1, 3, 4))
        length: int = option(10, "most tokens of a continuation", least=1)
        nodes: int = option(64, "most nodes of the tree (the step's budget may be smaller)", least=1, tries=())

        def __post_init__(self) -> None:
            ordered("min_match", self.min_match, "max_match", self.max_match)

    summary: ClassVar[str] = "longest suffix of the context in a store's suffix index, counted continuations as a tree"
    source: ClassVar[str] = "REST (He et al., 2023)"
    indexes: ClassVar[tuple[str, ...]] = ("suffix",)
    store_required: ClassVar[bool] = True

    def __init__(self, options: Options, resources: Resources = NO_RESOURCES) -> None:
        self._options = options
        self._indexes = resources.suffix
        self._context = Context(())

    def start(self, prompt: Sequence[int]) -> None:
        """See `Drafter.start`."""
        self._context = Context(prompt)

    def observe(self, step: Step) -> None:
        """See `Drafter.observe`."""
        self._context.extend(step.tokens)

    def propose(self, budget: int) -> Draft:
        """The tree of the store with the longest match; of equal matches the one seen most often."""
        tail = self._context.tokens[-self._options.max_match :]
        best = None
        for index in self._indexes:
            match = index.match(tail, self._options.max_match, self._options.min_match)
            if match.occurrences and (best is None or (match.length, match.occurrences) > best[0]):
                best = (match.length, match.occurrences), index, match
        if best is None:
            return empty()
        _, index, match = best
        nodes = min(self._options.nodes, budget)
        tokens, parents, counts = index.continuations(match, self._options.length, nodes)
        return tree(tokens, parents, counts, match.occurrences, _SOURCE)
