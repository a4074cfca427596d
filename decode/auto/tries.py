"""The tries of one step: what stores and a draft model say follows the text, side by side in one trie."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from specds.decode.trie import Trie, graft, new_trie
from specds.jit import compiled

SUFFIX_TRIES = 3
"""Trees of the suffix index: by its longest match, by a shorter one, and by one token."""
DENSE_TRIE, MODEL_TRIE = SUFFIX_TRIES, SUFFIX_TRIES + 1
TRIES = SUFFIX_TRIES + 2
BRANCHES = 6
"""Children of a node that are looked at, the first ones."""


class Continuations(NamedTuple):
    """A tree of what may follow.

    Attributes:
        tokens, parents: int32[n], parents[i] < i; -1 for what follows at once.
        weights: float64[n]: counts, or for a draft model its probability of each token.
        total: the weight of all together.
        length: tokens of the match that a suffix tree stands behind.
    """

    tokens: NDArray[np.int32]
    parents: NDArray[np.int32]
    weights: NDArray[np.float64]
    total: float
    length: int = 0


class Tries(NamedTuple):
    """The trees of one step.

    Attributes:
        trie: whose first TRIES nodes are their roots; the weight of a root is 0 where the tree is not there.
        length: int64[TRIES]: tokens of the match that each tree stands behind.
        similarity, margin: of the dense index's best neighbour, and by how much the second is less similar.
    """

    trie: Trie
    length: NDArray[np.int64]
    similarity: float
    margin: float


Trees = tuple[Continuations, ...]
"""TRIES of them, in their order."""
_NOTHING = Continuations(np.empty(0, np.int32), np.empty(0, np.int32), np.empty(0), 0.0)


def all_trees(trees: Mapping[int, Continuations]) -> Trees:
    """Trees by number, with empty ones for those that are not there."""
    return tuple(trees.get(number, _NOTHING) for number in range(TRIES))


@compiled
def make_tries(trees: Any, similarity: float, margin: float) -> Any:
    """`Tries` of `Trees`, side by side."""
    room = 0
    for tree in trees:
        room += len(tree.tokens)
    trie = new_trie(TRIES, room)
    length = np.empty(TRIES, np.int64)
    for number in range(TRIES):
        tree = trees[number]
        trie.weight[number], length[number] = tree.total, tree.length
        graft(trie, number, tree.tokens, tree.parents, tree.weights)
    return Tries(trie, length, similarity, margin)
