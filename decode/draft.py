"""The draft: a tree of proposed tokens, and how drafters grow one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from specds.decode.trie import descend, new_trie
from specds.errors import CorruptStore
from specds.jit import compiled


class Source(NamedTuple):
    """One way of finding tokens.

    Attributes:
        name: as traces show it.
        retrieved: the tokens are copied from text, not guessed by a model. Only such tokens may be verified leniently.
    """

    name: str
    retrieved: bool


@dataclass(frozen=True, slots=True)
class Origin:
    """Where the n nodes of a draft come from.

    Attributes:
        sources: those that the drafter has.
        source: int8[n] or int16[n], which of them proposed a node.
        place: int32[n], the position in the text so far that the token was copied from; -1: from nowhere in it.
    """

    sources: tuple[Source, ...]
    source: NDArray[np.int8] | NDArray[np.int16]
    place: NDArray[np.int32]

    @classmethod
    def of(cls, source: Source, count: int, place: int = -1) -> Origin:
        """Of `count` nodes of one source, copied from the text from a place on, or from elsewhere."""
        places = np.arange(place, place + count, dtype=np.int32) if place >= 0 else np.full(count, -1, np.int32)
        return cls((source,), np.zeros(count, np.int8), places)

    def keep(self, kept: NDArray[np.int64]) -> Origin:
        """Of some nodes."""
        return Origin(self.sources, self.source[kept], self.place[kept])

    def retrieved(self) -> NDArray[np.bool_]:
        """bool[n]: which nodes are copied from text."""
        found: NDArray[np.bool_] = np.array([source.retrieved for source in self.sources])[self.source]
        return found

    def names(self) -> list[str]:
        """Each node's source by name."""
        return [self.sources[source].name for source in self.source.tolist()]


@dataclass(frozen=True, slots=True)
class Draft:
    """A tree of tokens in topological order, proposed to follow the last committed token.

    Attributes:
        tokens: int32[n].
        parents: int32[n]; parents[i] < i, or -1 for a child of the last committed token. Siblings are distinct tokens.
        score: float32[n], the estimated probability that the target picks this token once its parent is accepted.
        q: float32[n, vocabulary], the distribution that each token was drawn from; None for deterministic proposals.
        origin: where the nodes come from; None if the drafter does not say.
    """

    tokens: NDArray[np.int32]
    parents: NDArray[np.int32]
    score: NDArray[np.float32]
    q: NDArray[np.float32] | None = None
    origin: Origin | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def depths(self) -> NDArray[np.int32]:
        """int32[n]: 1 for children of the last committed token, and so on down."""
        depths: NDArray[np.int32] = _depths(self.parents)
        return depths

    def ancestors(self) -> NDArray[np.bool_]:
        """bool[n, n]: row i marks the nodes on the path down to i, i itself included."""
        seen: NDArray[np.bool_] = _ancestors(self.parents)
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
        if len(self) <= budget and (depth is None or len(self) <= depth):
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
            None if self.origin is None else self.origin.keep(kept),
        )


def check_tokens(tokens: NDArray[np.integer], vocabulary: int) -> None:
    """Refuse tokens that the model does not have.

    Raises:
        CorruptStore: there is one; it can only come from a damaged datastore.
    """
    if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocabulary:
        raise CorruptStore(
            f"a draft holds token ids from {tokens.min()} to {tokens.max()}, and the model has {vocabulary:,}",
            "`specds verify` says in which file; `specds rebuild` makes the indexes again from the corpus",
        )


def along_paths(parents: NDArray[np.int32], chance: NDArray[np.float64]) -> NDArray[np.float64]:
    """float64[n]: the product of chances down to each node; `chance` is changed in place."""
    _along(parents, chance)
    return chance


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two texts begin with together."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if list(one[low:middle]) == list(other[low:middle]):
            low = middle
        else:
            high = middle - 1
    return low


EMPTY = Draft(np.empty(0, np.int32), np.empty(0, np.int32), np.empty(0, np.float32))
"""The draft of nothing: a step over it is ordinary decoding."""


def empty() -> Draft:
    """The draft of nothing."""
    return EMPTY


def chain(
    tokens: Sequence[int] | NDArray[np.integer],
    score: Sequence[float] | NDArray[np.floating],
    origin: Origin | None = None,
) -> Draft:
    """A draft without branches."""
    nodes = np.asarray(tokens, dtype=np.int32)
    parents = np.arange(-1, len(nodes) - 1, dtype=np.int32)
    return Draft(nodes, parents, np.asarray(score, dtype=np.float32), origin=origin)


def tree(
    tokens: NDArray[np.int32],
    parents: NDArray[np.int32],
    weights: NDArray[np.float64] | NDArray[np.int64],
    total: float,
    source: Source | None = None,
) -> Draft:
    """A draft from a counted tree: a node's score is its share of its parent's weight, shrunk towards 0.

    With weight w under a parent of weight W the score is w / (W + 1): a continuation seen once out of once
    is no certainty, one seen 99 times out of 99 nearly is.

    Args:
        tokens, parents: int32[n] in topological order, as in `Draft`.
        weights: [n], how often, or how strongly, each node was seen; never more than the parent's.
        total: the weight of the root.
        source: who proposed it.
    """
    weights = np.asarray(weights, dtype=np.float64)
    above = np.where(parents >= 0, weights[parents] if len(weights) else weights, float(total))
    return Draft(
        tokens.astype(np.int32, copy=False),
        parents.astype(np.int32, copy=False),
        (weights / (above + 1.0)).astype(np.float32),
        origin=None if source is None else Origin.of(source, len(tokens)),
    )


def merge(
    paths: Sequence[NDArray[np.integer]],
    weights: Sequence[float],
    budget: int,
    origins: Sequence[Origin] | None = None,
) -> Draft:
    """One tree from weighted token sequences that share prefixes.

    The `budget` nodes of the largest path probability are kept; ties go to the shallower node, then to the
    one proposed first, so that equal inputs give equal drafts.

    Args:
        paths: token sequences, each a candidate for what follows the last committed token.
        weights: one positive weight a path; a node's weight is the sum over the paths through it.
        budget: the most nodes.
        origins: where each path's tokens come from, of the same sources; a node's is that of the first path through it.
    """
    if not paths or budget < 1:
        return empty()
    ends = np.cumsum([len(path) for path in paths])
    if not ends[-1]:
        return empty()
    flat = np.concatenate(paths).astype(np.int32, copy=False)
    tokens, parents, score, first = _merge(flat, ends, np.asarray(weights, np.float64), budget)
    if origins is None:
        return Draft(tokens, parents, score)
    source = np.concatenate([origin.source for origin in origins])[first]
    place = np.concatenate([origin.place for origin in origins])[first]
    return Draft(tokens, parents, score, origin=Origin(origins[0].sources, source, place))


@compiled
def _merge(flat: Any, ends: Any, weights: Any, budget: int) -> Any:
    """The tree of some paths, cut to a budget.

    Args:
        flat: int32[m], the paths, one after the other.
        ends: int64[paths], where each ends.
        weights: float64[paths].

    Returns:
        tokens int32[n], parents int32[n], scores float32[n], and where in `flat` each node stood first, int64[n].
    """
    trie = new_trie(1, len(flat))
    first = np.empty(len(flat) + 1, np.int64)
    start = 0
    for path in range(len(ends)):
        node = 0
        for at in range(start, ends[path]):
            known = trie.size[0]
            node = descend(trie, node, flat[at])
            if node == known:
                first[node] = at
            trie.weight[node] += weights[path]
        start = ends[path]
    trie.weight[0] = weights.sum()
    return _best_of(trie, first, budget)


@compiled
def _best_of(trie: Any, first: Any, budget: int) -> Any:
    """The `budget` likeliest nodes of a trie of one root, as `_merge` returns them."""
    count = trie.size[0]
    score, chance, depth = np.zeros(count, np.float32), np.ones(count), np.zeros(count, np.int64)
    for node in range(1, count):
        above = trie.parent[node]
        score[node] = trie.weight[node] / (trie.weight[above] + 1.0)
        chance[node] = float(score[node]) * chance[above]
        depth[node] = depth[above] + 1
    # By depth, then as proposed; a stable sort by chance after that settles ties as they should be.
    level = np.argsort(depth, kind="mergesort")[1:]
    best = np.argsort(-chance[level], kind="mergesort")[:budget]
    taken = np.zeros(count, np.bool_)
    for rank in best:
        taken[level[rank]] = True
    size = len(best)
    tokens, parents = np.empty(size, np.int32), np.empty(size, np.int32)
    scores, places, renumber = np.empty(size, np.float32), np.empty(size, np.int64), np.full(count, -1, np.int32)
    filled = 0
    for node in level:
        if taken[node]:
            tokens[filled], scores[filled], places[filled] = trie.token[node], score[node], first[node]
            parents[filled] = renumber[trie.parent[node]]
            renumber[node] = filled
            filled += 1
    return tokens, parents, scores, places


@compiled
def _depths(parents: Any) -> Any:
    depths = np.ones(len(parents), np.int32)
    for node in range(len(parents)):
        if parents[node] >= 0:
            depths[node] = depths[parents[node]] + 1
    return depths


@compiled
def _ancestors(parents: Any) -> Any:
    seen = np.zeros((len(parents), len(parents)), np.bool_)
    for node in range(len(parents)):
        at = node
        while at >= 0:
            seen[node, at] = True
            at = parents[at]
    return seen


@compiled
def _along(parents: Any, chance: Any) -> None:
    for node in range(len(parents)):
        if parents[node] >= 0:
            chance[node] *= chance[parents[node]]
