"""Token Recycling: the target's likeliest next tokens, kept for every token seen, woven into a fixed tree."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from specds.decode.arrays import with_room
from specds.decode.contracts import NO_RESOURCES, TOP, Drafter, Resources, Signal, Step
from specds.decode.draft import Draft, Origin, Source, empty
from specds.decode.registry import option
from specds.jit import compiled

# How often the target picks the r-th successor that was kept: 24 prompts, 578 tokens whose last one was known.
_BY_RANK = (0.36, 0.13, 0.06, 0.04, 0.02, 0.02, 0.015, 0.015)

_SOURCE = Source("recycling", retrieved=False)


class Recycling(Drafter):
    """For each token the successors that the target thought likeliest when the token was last forwarded (§3.2).

    Every row of a pass is used, rejected ones too. The tree is the same at each step (§3.3): the nodes of the
    largest product of chances by rank.
    """

    @dataclass(frozen=True, slots=True)
    class Options:
        """Options of Token Recycling."""

        nodes: int = option(64, "most nodes of the tree (the step's budget may be smaller)", least=1, tries=())
        depth: int = option(6, "deepest node", least=1)
        successors: int = option(TOP, f"successors kept for a token, at most {TOP}", least=1, tries=(2, 4))

    summary: ClassVar[str] = "the target's likeliest successors of each token, kept from earlier passes, as a tree"
    source: ClassVar[str] = "Token Recycling (Luo et al., 2024)"
    needs: frozenset[Signal] = frozenset({Signal.TREE_TOPK})

    def __init__(self, options: Options, resources: Resources = NO_RESOURCES) -> None:
        self._options = options
        self._successors = np.full((0, TOP), -1, np.int32)
        self._last = -1

    def start(self, prompt: Sequence[int]) -> None:
        """See `Drafter.start`."""
        self._successors = np.full((0, TOP), -1, np.int32)
        self._last = int(prompt[-1])

    def observe(self, step: Step) -> None:
        """Keep the successors of every token of the pass; the last forwarded of equal tokens wins."""
        rows = np.concatenate([[self._last], step.draft.tokens])
        top = step.signals[Signal.TREE_TOPK]
        self._last = step.tokens[-1]
        largest = max(int(rows.max()), self._last)
        self._successors = with_room(self._successors, len(self._successors), largest + 1, fill=-1)
        self._successors[rows] = top

    def propose(self, budget: int) -> Draft:
        """The fixed tree, filled in from the last token down; where nothing is known, nothing grows."""
        nodes = min(budget, self._options.nodes)
        if nodes < 1 or self._last < 0:
            return empty()
        parents, ranks, score = _template(nodes, self._options.depth, min(self._options.successors, TOP))
        tokens, above, kept = np.empty(nodes, np.int32), np.empty(nodes, np.int32), np.empty(nodes, np.int32)
        count = _fill(self._successors, self._last, parents, ranks, tokens, above, kept)
        return Draft(tokens[:count], above[:count], score[kept[:count]], origin=Origin.of(_SOURCE, count))


@cache
def _template(nodes: int, depth: int, width: int) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.float32]]:
    """Parents, ranks and scores of the `nodes` likeliest nodes of a tree in which every node has `width` children."""
    parents: list[int] = []
    ranks: list[int] = []
    # (-chance of the path, its ranks, parent): the smallest is the likeliest, ties go to the lower ranks.
    open_: list[tuple[float, tuple[int, ...], int]] = [(-_BY_RANK[0], (0,), -1)]
    while open_ and len(parents) < nodes:
        chance, path, parent = heapq.heappop(open_)
        node = len(parents)
        parents.append(parent)
        ranks.append(path[-1])
        if path[-1] + 1 < width:
            beside = chance / _BY_RANK[path[-1]] * _BY_RANK[path[-1] + 1]
            heapq.heappush(open_, (beside, (*path[:-1], path[-1] + 1), parent))
        if len(path) < depth:
            heapq.heappush(open_, (chance * _BY_RANK[0], (*path, 0), node))
    score = np.array([_BY_RANK[rank] for rank in ranks], np.float32)
    return np.array(parents, np.int32), np.array(ranks, np.int32), score


@compiled
def _fill(successors: Any, last: int, parents: Any, ranks: Any, tokens: Any, above: Any, kept: Any) -> int:
    """Tokens of the template's nodes that are known; returns how many. `kept` names them, `above` their parents."""
    place = np.full(len(parents), -1, np.int32)
    count = 0
    for node in range(len(parents)):
        parent = parents[node]
        if parent >= 0 and place[parent] < 0:
            continue
        token = last if parent < 0 else tokens[place[parent]]
        if token >= len(successors) or successors[token, ranks[node]] < 0:
            continue
        tokens[count] = successors[token, ranks[node]]
        above[count] = -1 if parent < 0 else place[parent]
        kept[count] = node
        place[node] = count
        count += 1
    return count
