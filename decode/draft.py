"""The draft: a tree of proposed tokens, and how drafters grow one."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specds.errors import CorruptStore


@dataclass(frozen=True, slots=True)
class Draft:
    """A tree of tokens in topological order, proposed to follow the last committed token.

    Attributes:
        tokens: int32[n].
        parents: int32[n]; parents[i] < i, or -1 for a child of the last committed token. Siblings are distinct tokens.
        score: float32[n], the estimated probability that the target picks this token once its parent is accepted.
        q: float32[n], a draft model's own probability of each token; None for deterministic proposals.
    """

    tokens: NDArray[np.int32]
    parents: NDArray[np.int32]
    score: NDArray[np.float32]
    q: NDArray[np.float32] | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def check_tokens(self, vocabulary: int) -> None:
        """Refuse tokens that the model does not have.

        Raises:
            CorruptStore: there is one; it can only come from a damaged datastore.
        """
        if len(self) and not 0 <= int(self.tokens.min()) <= int(self.tokens.max()) < vocabulary:
            raise CorruptStore(
                f"a draft holds token ids from {self.tokens.min()} to {self.tokens.max()}, "
                f"and the model has {vocabulary:,}",
                "`specds verify` finds the datastore that is damaged",
            )

    def depths(self) -> NDArray[np.int32]:
        """int32[n]: 1 for children of the last committed token, and so on down."""
        depths = np.ones(len(self), dtype=np.int32)
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                depths[node] = depths[parent] + 1
        return depths

    def ancestors(self) -> NDArray[np.bool_]:
        """bool[n, n]: row i marks the nodes on the path down to i, i itself included."""
        seen = np.eye(len(self), dtype=np.bool_)
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                seen[node] |= seen[parent]
        return seen

    def path_probability(self) -> NDArray[np.float64]:
        """float64[n]: the product of scores down to each node, the estimate that it will be accepted."""
        return along_paths(self.parents, self.score.astype(np.float64))

    def children(self) -> dict[tuple[int, int], int]:
        """(parent, token) → node; the parent of the first tokens is -1."""
        pairs = zip(self.parents, self.tokens, strict=True)
        return {(int(parent), int(token)): node for node, (parent, token) in enumerate(pairs)}

    def trim(self, budget: int, depth: int | None = None) -> Draft:
        """The `budget` nodes most likely to be accepted, none deeper than `depth`, as a draft.

        Equally likely nodes are kept in the order in which the drafter proposed them.
        """
        if not len(self):
            return self
        depths = self.depths()
        fits = depths <= depth if depth is not None else np.ones(len(self), dtype=np.bool_)
        if len(self) <= budget and fits.all():
            return self
        # A child is never likelier than its parent and never before it, so a stable order keeps trees whole.
        order = np.lexsort((np.arange(len(self)), -self.path_probability()))
        return self.keep(np.sort(order[fits[order]][: max(budget, 0)]))

    def keep(self, kept: NDArray[np.int64]) -> Draft:
        """Only some nodes, by ascending index; with each node its parent must be kept."""
        if len(kept) == len(self):
            return self
        renumber = np.full(len(self) + 1, -1, dtype=np.int32)
        renumber[kept] = np.arange(len(kept))
        return Draft(
            self.tokens[kept],
            renumber[self.parents[kept]],
            self.score[kept],
            None if self.q is None else self.q[kept],
        )


def along_paths(parents: NDArray[np.int32], chance: NDArray[np.float64]) -> NDArray[np.float64]:
    """float64[n]: the product of chances down to each node; `chance` is changed in place."""
    for node, parent in enumerate(parents):
        if parent >= 0:
            chance[node] *= chance[parent]
    return chance


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two texts begin with together."""
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return index
    return min(len(one), len(other))


def empty() -> Draft:
    """The draft of nothing: a step over it is ordinary decoding."""
    return Draft(np.empty(0, np.int32), np.empty(0, np.int32), np.empty(0, np.float32))


def chain(tokens: Sequence[int] | NDArray[np.integer], score: Sequence[float] | NDArray[np.float64]) -> Draft:
    """A draft without branches."""
    nodes = np.asarray(tokens, dtype=np.int32)
    return Draft(nodes, np.arange(-1, len(nodes) - 1, dtype=np.int32), np.asarray(score, dtype=np.float32))


def tree(
    tokens: NDArray[np.int32],
    parents: NDArray[np.int32],
    weights: NDArray[np.float64] | NDArray[np.int64],
    total: float,
) -> Draft:
    """A draft from a counted tree: a node's score is its share of its parent's weight, shrunk towards 0.

    With weight w under a parent of weight W the score is w / (W + 1): a continuation seen once out of once
    is no certainty, one seen 99 times out of 99 nearly is.

    Args:
        tokens, parents: int32[n] in topological order, as in `Draft`.
        weights: [n], how often, or how strongly, each node was seen; never more than the parent's.
        total: the weight of the root.
    """
    weights = np.asarray(weights, dtype=np.float64)
    above = np.where(parents >= 0, weights[parents] if len(weights) else weights, float(total))
    return Draft(
        tokens.astype(np.int32, copy=False),
        parents.astype(np.int32, copy=False),
        (weights / (above + 1.0)).astype(np.float32),
    )


def merge(paths: Sequence[NDArray[np.integer]], weights: Sequence[float], budget: int) -> Draft:
    """One tree from weighted token sequences that share prefixes.

    The `budget` nodes of the largest path probability are kept; ties go to the shallower node, then to the
    one proposed first, so that equal inputs give equal drafts.

    Args:
        paths: token sequences, each a candidate for what follows the last committed token.
        weights: one positive weight a path; a node's weight is the sum over the paths through it.
        budget: the most nodes.
    """
    tokens: list[int] = []
    parents: list[int] = []
    mass: list[float] = []
    depth: list[int] = []
    children: dict[tuple[int, int], int] = {}
    for path, weight in zip(paths, weights, strict=True):
        node = -1
        for token in path:
            key = (node, int(token))
            found = children.get(key)
            if found is None:
                found = children[key] = len(tokens)
                tokens.append(key[1])
                parents.append(node)
                mass.append(0.0)
                depth.append(1 if node < 0 else depth[node] + 1)
            mass[found] += weight
            node = found
    if not tokens:
        return empty()
    full = tree(np.array(tokens, np.int32), np.array(parents, np.int32), np.array(mass), float(sum(weights)))
    probability = full.path_probability()
    kept = heapq.nsmallest(budget, range(len(tokens)), key=lambda node: (-probability[node], depth[node], node))
    order = np.array(sorted(kept, key=lambda node: (depth[node], node)), dtype=np.int64)
    renumber = np.full(len(tokens) + 1, -1, dtype=np.int32)
    renumber[order] = np.arange(len(order))
    return Draft(full.tokens[order], renumber[full.parents[order]], full.score[order])
