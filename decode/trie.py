"""A trie in arrays, for compiled code: token sequences that share prefixes become one tree."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from specds.jit import compiled, compiled_inside

NONE = -1
"""No node, and the token of a root."""


class Trie(NamedTuple):
    """Nodes by number: the roots first, every other node after its parent, siblings in the order in which they came.

    Attributes:
        token, parent: int32[room] of each node.
        child, last, sibling: int32[room]: its first child, its last child and its next sibling; NONE if there is none.
        weight: float64[room].
        size: int64[1]: how many nodes there are, roots included.
    """

    token: NDArray[np.int32]
    parent: NDArray[np.int32]
    child: NDArray[np.int32]
    last: NDArray[np.int32]
    sibling: NDArray[np.int32]
    weight: NDArray[np.float64]
    size: NDArray[np.int64]


@compiled
def new_trie(roots: int, room: int) -> Any:
    """A `Trie` of so many roots, with room for so many other nodes."""
    total = roots + room
    trie = Trie(
        np.empty(total, np.int32),
        np.empty(total, np.int32),
        np.full(total, NONE, np.int32),
        np.full(total, NONE, np.int32),
        np.full(total, NONE, np.int32),
        np.zeros(total),
        np.full(1, roots, np.int64),
    )
    trie.token[:roots] = NONE
    trie.parent[:roots] = NONE
    return trie


@compiled_inside
def find_child(trie: Any, node: int, token: int) -> int:
    """The child of a node that holds a token; NONE if there is none."""
    below: int = trie.child[node]
    while below >= 0 and trie.token[below] != token:
        below = trie.sibling[below]
    return below


@compiled_inside
def add_child(trie: Any, node: int, token: int) -> int:
    """A new child of a node, of weight 0; there must be room."""
    added: int = trie.size[0]
    trie.size[0] = added + 1
    trie.token[added], trie.parent[added] = token, node
    if trie.last[node] < 0:
        trie.child[node] = added
    else:
        trie.sibling[trie.last[node]] = added
    trie.last[node] = added
    return added


@compiled_inside
def descend(trie: Any, node: int, token: int) -> int:
    """The child of a node that holds a token, made if there is none."""
    below = find_child(trie, node, token)
    return add_child(trie, node, token) if below < 0 else below


@compiled_inside
def graft(trie: Any, root: int, tokens: Any, parents: Any, weights: Any) -> None:
    """Put a tree under a root as it is.

    Args:
        tokens: int32[n].
        parents: int32[n], parents[i] < i; -1 for a child of the root.
        weights: float64[n].
    """
    start = trie.size[0]
    for node in range(len(tokens)):
        added = add_child(trie, root if parents[node] < 0 else start + parents[node], tokens[node])
        trie.weight[added] = weights[node]
