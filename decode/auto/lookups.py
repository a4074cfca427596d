"""What stores are asked for once a step: trees of what followed a match, and what followed the nearest states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from specds.datastore.by_token import nearest
from specds.datastore.dense import DenseIndex
from specds.datastore.suffix import SuffixIndex
from specds.decode.auto.tries import Continuations
from specds.decode.trie import descend, new_trie
from specds.jit import compiled

# Most nodes, and tokens of a path, of the suffix index's trees.
_NODES, _DEPTHS = np.array([40, 16, 8]), np.array([12, 4, 2])
# Tokens from which a longer match says nothing more of a store; how fast what is known of a store moves.
_LONG_MATCH, _CREDIT_RATE = 8, 0.1
# Similarities are weighed by their exponential, this steep.
_STEEP = 12.0


def suffix_trees(index: SuffixIndex, tail: NDArray[np.int64]) -> dict[int, Continuations]:
    """Counted trees of what followed the end of a text, by number: of its longest match, a shorter one, one token.

    Args:
        tail: int64[m], the last tokens.

    Returns:
        nothing where the last token is unknown.
    """
    trees: dict[int, Continuations] = {}
    for number, (length, total, (tokens, parents, counts)) in enumerate(index.backoff(tail, _DEPTHS, _NODES)):
        if len(tokens):
            trees[number] = Continuations(tokens, parents, counts.astype(np.float64), float(total), length)
    return trees


class SuffixLookup:
    """The suffix indexes of several stores, of which the one that has served best is asked.

    Args:
        indexes: of each store.
        max_match: longest suffix that is looked up.
    """

    def __init__(self, indexes: Sequence[SuffixIndex], max_match: int) -> None:
        self._indexes, self._max_match = indexes, max_match
        # How often each store's first token came true, lately; and these tokens of the step, by store.
        self._credit = np.full(len(indexes), 0.5)
        self._tops: list[tuple[int, int]] = []

    def __len__(self) -> int:
        """Stores."""
        return len(self._indexes)

    def skip(self) -> None:
        """A step in which nothing is asked."""
        self._tops = []

    def ask(self, text: NDArray[np.int64]) -> Mapping[int, Continuations]:
        """The trees of the store that has served best, by how long its match is."""
        self.skip()
        tail = text[-self._max_match :]
        trees = [suffix_trees(index, tail) for index in self._indexes]
        if len(trees) == 1:
            return trees[0]
        self._tops = [(store, int(tree[0].tokens[0])) for store, tree in enumerate(trees) if tree]
        lengths = [min(tree[0].length, _LONG_MATCH) if tree else 0 for tree in trees]
        return trees[int(np.argmax(self._credit * lengths))]

    def observe(self, token: int) -> None:
        """What came next."""
        for store, predicted in self._tops:
            self._credit[store] += _CREDIT_RATE * (float(predicted == token) - self._credit[store])


class Nearest(NamedTuple):
    """What followed the nearest states.

    Attributes:
        continuations: as a tree, weighed by similarity; the nearest one's weight is 1.
        similarity, margin: of the nearest one, and how much less the second's is.
    """

    continuations: Continuations
    similarity: float
    margin: float


def neighbours(
    indexes: Sequence[DenseIndex], hidden: NDArray[np.float32], last: int, count: int, length: int
) -> Nearest | None:
    """What followed the states nearest to the last forwarded token's where the last token came next (DReSD, §3.5).

    Args:
        hidden: float32[d].
        last: the token just picked.
        count: neighbours fetched.
        length: most tokens of a continuation.
    """
    if len(indexes) == 1 and (alone := indexes[0].alone(last)) is not None:
        # One store of one segment, as most are: all of it in one call.
        part, by_token = alone
        end = np.iinfo(part.tokens.dtype).max
        key = part.normalizer.key(hidden)
        return _nearest(_followed_by(by_token.table, part.tokens, end, last, key, count, length))
    similarities: list[NDArray[np.float32]] = []
    blocks: list[NDArray[np.int64]] = []
    for index in indexes:
        similarity, positions = index.search_followed_by(hidden, last, count)
        similarities.append(similarity)
        blocks.append(index.following(positions + 1, length))
    return _nearest(weighted_tree(np.concatenate(blocks), np.concatenate(similarities)))


def _nearest(tree: Any) -> Nearest | None:
    tokens, parents, weights, total, similarity, margin = tree
    if not len(tokens):
        return None
    return Nearest(Continuations(tokens, parents, weights, total), similarity, margin)


@compiled
def _followed_by(table: Any, tokens: Any, end: int, token: int, key: Any, count: int, length: int) -> Any:
    """`weighted_tree` of what follows the `count` nearest keys that a token follows, up to `length` tokens of each.

    Args:
        table: `by_token.Table`.
        tokens: uint16[n] or uint32[n], the segment's; `end` stands where a document ends.
        key: float32[dims].
    """
    similarity, positions = nearest(table, token, key, count)
    block = np.full((len(positions), length), -1, np.int64)
    for row in range(len(positions)):
        for at in range(length):
            place = positions[row] + 1 + at
            if place >= len(tokens) or tokens[place] == end:
                break
            block[row, at] = tokens[place]
    return weighted_tree(block, similarity)


@compiled
def weighted_tree(block: Any, similarity: Any) -> Any:
    """The tree of some paths, each up to its first -1, and the weight of all paths through each node.

    Args:
        block: int64[paths, length].
        similarity: float32[paths].

    Returns:
        tokens int32[n], parents int32[n] and weights float64[n]; the weight of all paths, the best similarity, and how
        much less the second one is.
    """
    best, second = -np.inf, -np.inf
    for value in similarity:
        if value > best:
            best, second = value, best
        elif value > second:
            second = value
    trie = new_trie(1, block.size)
    total = 0.0
    for path in range(len(block)):
        weight = np.exp(_STEEP * (float(similarity[path]) - best))
        total += weight
        node = 0
        for at in range(block.shape[1]):
            if block[path, at] < 0:
                break
            node = descend(trie, node, block[path, at])
            trie.weight[node] += weight
    size = trie.size[0]
    # The root is no node of the tree that is given back.
    parents = trie.parent[1:size] - np.int32(1)
    return trie.token[1:size], parents, trie.weight[1:size], total, best, best - max(second, -1.0)
