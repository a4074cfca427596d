"""Keys by the token that came next: of those with the token just picked all are compared, while they are not too many.

A search by similarity alone finds neighbours of which a good part are followed by another token, and takes its time to
be approximate. Who wants those followed by one token (DReSD §3.5) need only look at these: some thousands of a store of
hundreds of thousands, in one byte a number, contiguous in memory.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from specds.jit import compiled, compiled_loosely

MOST_NUMBERS = 1 << 26
"""Of segments with more numbers in their keys no copy is made: a million keys of 64 dimensions."""
MOST_COMPARED = 1 << 14
"""Keys of one token that are all compared; of more, an approximate search is faster."""
_MOST_TOKENS = 1 << 22
_CHUNK = 1 << 14
_BINS = 256
# Numbers of a key of unit length are no larger, by rounding to two bytes at most.
_LARGEST = 1.01


class Table(NamedTuple):
    """What is compared, for compiled code.

    Attributes:
        starts: int64[m + 1]: the rows of token t are starts[t] … starts[t + 1] - 1; of others there are none.
        codes: int8[n, dims]: keys, as whole numbers.
        scales: float32[n]: the value of a code of 1.
        positions: uint32[n] or uint64[n]: where continuations start.
    """

    starts: NDArray[np.int64]
    codes: NDArray[np.int8]
    scales: NDArray[np.float32]
    positions: NDArray[Any]


class ByToken:
    """A segment's keys, ordered by the token that came next, in one byte a number.

    Args:
        keys: float32[n, dims] of unit length; may be memory-mapped. Read once, from front to end. One that is longer,
            or not all numbers, is like nothing.
        positions: uint32[n] or uint64[n], where each key's continuation starts in `tokens`; the dtype's largest value:
            it has none.
        tokens: the segment's tokens; the dtype's largest value where a document ends.
    """

    def __init__(self, keys: NDArray[np.float32], positions: NDArray[Any], tokens: NDArray[Any]) -> None:
        gone = np.asarray(positions) == np.iinfo(positions.dtype).max
        at = np.where(gone | (positions >= len(tokens)), 0, positions).astype(np.int64)
        following = np.asarray(tokens)[at].astype(np.int64)
        gone |= (positions >= len(tokens)) | (following == np.iinfo(tokens.dtype).max) | (following >= _MOST_TOKENS)
        following[gone] = -1
        order = np.argsort(following, kind="stable")
        order = order[int(gone.sum()) :]
        sizes = np.bincount(following[order]) if len(order) else np.zeros(0, np.int64)
        starts: NDArray[np.int64] = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        place = np.full(len(keys), -1, np.int64)
        place[order] = np.arange(len(order))
        codes, scales = np.empty((len(order), keys.shape[1]), np.int8), np.empty(len(order), np.float32)
        for start in range(0, len(keys), _CHUNK):
            _encode(np.asarray(keys[start : start + _CHUNK]), place[start : start + _CHUNK], codes, scales)
        self.table = Table(starts, codes, scales, np.asarray(positions)[order])

    def search(
        self, key: NDArray[np.float32], token: int, k: int
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]] | None:
        """The k nearest keys that a token follows; None where there are too many of them to be compared.

        Returns:
            similarity float32[≤ k], falling, to within 0.01, and where each continuation starts, int64[≤ k].
        """
        if not self.compares(token):
            return None
        similarity, positions = nearest(self.table, token, key, k)
        return similarity, positions

    def compares(self, token: int) -> bool:
        """Whether the keys that a token follows are few enough to be compared."""
        starts = self.table.starts
        return not 0 <= token < len(starts) - 1 or int(starts[token + 1] - starts[token]) <= MOST_COMPARED


@compiled
def _encode(keys: Any, place: Any, codes: Any, scales: Any) -> None:
    """Keys as whole numbers up to 127, and the value of a 1; those of no place are left out.

    A key that is not a unit vector, or not finite, is similar to nothing.

    Args:
        keys: float32[n, dims].
        place: int64[n], the row of each in the table; -1: left out.
        codes, scales: int8[rows, dims] and float32[rows], which are written.
    """
    for row in range(len(keys)):
        to = place[row]
        if to < 0:
            continue
        largest, sound = np.float32(1e-12), True
        for at in range(keys.shape[1]):
            largest = max(largest, abs(keys[row, at]))
            sound = sound and np.isfinite(keys[row, at])
        if not sound or largest > _LARGEST:
            codes[to] = 0
            scales[to] = 0.0
            continue
        for at in range(keys.shape[1]):
            codes[to, at] = np.int8(np.rint(keys[row, at] / largest * 127.0))
        scales[to] = largest / 127.0


@compiled_loosely
def _similarities(codes: Any, scales: Any, low: int, high: int, key: Any, similarities: Any) -> None:
    """similarities float32[high - low]: inner products of key float32[dims] and the rows from `low` to `high`.

    A row is codes int8[n, dims] times scales float32[n].
    """
    for row in range(low, high):
        total = np.float32(0.0)
        for at in range(codes.shape[1]):
            total += np.float32(codes[row, at]) * key[at]
        similarities[row - low] = total * scales[row]


@compiled
def nearest(table: Any, token: int, key: Any, k: int) -> Any:
    """As `ByToken.search` with key float32[dims], however many there are; of equally similar keys the first."""
    starts, codes, scales, positions = table
    low, high = 0, 0
    if 0 <= token < len(starts) - 1 and np.isfinite(key).all():
        low, high = starts[token], starts[token + 1]
    count = high - low
    every = np.empty(count, np.float32)
    _similarities(codes, scales, low, high, key, every)
    candidates = np.empty(count, np.int64)
    size = 0
    if count > 2 * k:
        # Only what lies in the bins that hold the first k is sorted.
        lowest, highest = every.min(), every.max()
        width = max((highest - lowest) / _BINS, 1e-9)
        bins = np.zeros(_BINS + 1, np.int64)
        for value in every:
            bins[min(max(int((highest - value) / width), 0), _BINS)] += 1
        last, seen = 0, bins[0]
        while seen < k and last < _BINS:
            last += 1
            seen += bins[last]
        for row in range(count):
            if min(max(int((highest - every[row]) / width), 0), _BINS) <= last:
                candidates[size] = row
                size += 1
    else:
        for row in range(count):
            candidates[row] = row
        size = count
    candidates = candidates[:size]
    best = candidates[np.argsort(-every[candidates], kind="mergesort")[:k]]
    return every[best], positions[low + best].astype(np.int64)
