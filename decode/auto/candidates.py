"""Candidates: the tokens that may follow one node, and what the sources say of each."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from specds.decode.auto.features import FEATURES
from specds.jit import compiled, compiled_inside

MOST_CANDIDATES = 16
"""Candidates of a node, at most; what is proposed after them is not looked at."""
UNKNOWN = -1.0
"""A feature of which its source says nothing."""


class Candidates(NamedTuple):
    """Work space of k = MOST_CANDIDATES rows, filled source by source for one node after another.

    Attributes:
        tokens: int64[k].
        sources: int64[k]: who proposed each, as bits.
        places: int64[k]: where in the text it was copied from; -1: from nowhere in it.
        features: float32[k, len(FEATURES)].
        absent: float32[len(FEATURES)]: the features of a token that no source has proposed, so far.
        size: int64[1]: how many there are.
    """

    tokens: NDArray[np.int64]
    sources: NDArray[np.int64]
    places: NDArray[np.int64]
    features: NDArray[np.float32]
    absent: NDArray[np.float32]
    size: NDArray[np.int64]


class Position(NamedTuple):
    """The node whose followers are asked for.

    Attributes:
        depth: of the followers; 1 behind the text itself.
        hashes: uint64[len(ORDERS)]: keys of the last tokens down to the node, by `ngrams.hash_tail`.
        orders: how many of these there are.
        cursors: int32[TRIES]: the node in each trie; -1: not in it.
        rows: int64[len(ORDERS)]: work space for rows of a table by these keys.
    """

    depth: int
    hashes: NDArray[np.uint64]
    orders: int
    cursors: NDArray[np.int32]
    rows: NDArray[np.int64]


@compiled
def new_candidates() -> Any:
    """Room for `Candidates`."""
    count = MOST_CANDIDATES
    return Candidates(
        np.empty(count, np.int64),
        np.empty(count, np.int64),
        np.empty(count, np.int64),
        np.empty((count, len(FEATURES)), np.float32),
        np.empty(len(FEATURES), np.float32),
        np.zeros(1, np.int64),
    )


@compiled_inside
def clear(candidates: Any) -> None:
    """Begin with another node: no candidates, no features."""
    candidates.size[0] = 0
    candidates.absent[:] = UNKNOWN


@compiled_inside
def find(candidates: Any, token: int) -> int:
    """The row of a token; -1 if it is not there."""
    for row in range(candidates.size[0]):
        if candidates.tokens[row] == token:
            return row
    return -1


@compiled_inside
def enter(candidates: Any, token: int) -> int:
    """The row of a token, which is put there if it is new; -1 if there is no room."""
    known = find(candidates, token)
    if known >= 0 or candidates.size[0] == len(candidates.tokens):
        return known
    row: int = candidates.size[0]
    candidates.size[0] = row + 1
    candidates.tokens[row], candidates.sources[row], candidates.places[row] = token, 0, -1
    for column in range(len(FEATURES)):
        candidates.features[row, column] = candidates.absent[column]
    return row


@compiled_inside
def propose(candidates: Any, token: int, source: int) -> int:
    """The row of a token that a source proposes; -1 if there is no room."""
    row = enter(candidates, token)
    if row >= 0:
        candidates.sources[row] |= 1 << source
    return row


@compiled_inside
def set_all(candidates: Any, column: int, value: float) -> None:
    """A feature that is the same for all candidates, those to come included, unless their own is set."""
    candidates.absent[column] = value
    for row in range(candidates.size[0]):
        candidates.features[row, column] = value
