"""What followed the last n tokens, for several n at once: counts over a growing text, and rows of likeliest tokens."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import int32, int64, uint64
from numpy.typing import NDArray

from specds.decode.contracts import TOP
from specds.jit import compiled, compiled_inside

ORDERS = np.array([1, 2, 3, 4, 6, 8, 12, 16], np.int64)
"""Numbers of last tokens that counts are kept by."""
REACH = 16
"""The largest of them."""
KEPT = 3
"""Rows of likeliest tokens are kept by the last 1, 2 and 3 tokens."""

WIDTH = 4
"""Followers that are kept of a context: when a new one comes, the rarest gives way, of equally rare the oldest."""

# Columns of a row of counts, one cache line: its key in two parts, how often the context was followed, which follower
# came last; then the followers, how often each came, and where in the text it stood last.
LOW, HIGH, TOTAL, RECENT, TOKENS, COUNTS, PLACES = 0, 1, 2, 3, 4, 8, 12
_COLUMNS = 16
# So few that tables grow in a warm-up, which compiles that too.
_LEAST = 1 << 6


@compiled_inside
def hash_tail(tail: Any, length: int, hashes: Any) -> int:
    """Keys of the last ORDERS tokens into `hashes`; returns for how many orders there are tokens enough.

    Args:
        tail: the last tokens, the last one first.
        length: how many there are.
    """
    value = uint64(0x9E3779B97F4A7C15)
    order = 0
    for at in range(min(length, REACH)):
        value = (value ^ uint64(tail[at] + 1)) * uint64(0xBF58476D1CE4E5B9)
        value ^= value >> uint64(29)
        if at + 1 == ORDERS[order]:
            hashes[order] = value | uint64(1)
            order += 1
    return order


@compiled_inside
def find_row(rows: Any, key: Any) -> Any:
    """The row of a key, or -1 - the free row where it would be."""
    mask = len(rows) - 1
    low, high = int32(key & uint64(0xFFFFFFFF)), int32(key >> uint64(32))
    place = int64(key >> uint64(7)) & mask
    while rows[place, LOW] != 0:
        if rows[place, LOW] == low and rows[place, HIGH] == high:
            return place
        place = (place + 1) & mask
    return -1 - place


@compiled_inside
def _claim(rows: Any, key: Any, used: Any) -> Any:
    """The row of a key, made if there is none."""
    place = find_row(rows, key)
    if place < 0:
        place = -1 - place
        rows[place, LOW] = int32(key & uint64(0xFFFFFFFF))
        rows[place, HIGH] = int32(key >> uint64(32))
        used[0] += 1
    return place


@compiled_inside
def _count(rows: Any, place: int, token: int, where: int) -> None:
    """One more time that `token` followed."""
    rows[place, TOTAL] += 1
    chosen = -1
    for slot in range(WIDTH):
        if rows[place, COUNTS + slot] > 0 and rows[place, TOKENS + slot] == token:
            chosen = slot
            break
    if chosen < 0:
        chosen = 0
        for slot in range(1, WIDTH):
            fewer = rows[place, COUNTS + slot] - rows[place, COUNTS + chosen]
            if fewer < 0 or (fewer == 0 and rows[place, PLACES + slot] < rows[place, PLACES + chosen]):
                chosen = slot
        rows[place, TOKENS + chosen] = token
        rows[place, COUNTS + chosen] = 0
    rows[place, COUNTS + chosen] += 1
    rows[place, PLACES + chosen] = where
    rows[place, RECENT] = chosen


@compiled
def _extend(rows: Any, used: Any, text: Any, start: int) -> None:
    """Count text[start:], each token behind what stands before it."""
    hashes, tail = np.empty(len(ORDERS), np.uint64), np.empty(REACH, np.int64)
    for at in range(start, len(text)):
        length = min(at, REACH)
        for back in range(length):
            tail[back] = text[at - 1 - back]
        orders = hash_tail(tail, length, hashes)
        for order in range(orders):
            _count(rows, _claim(rows, hashes[order], used), text[at], at)


@compiled_inside
def _key(row: Any) -> Any:
    """The key of a row, int32[…], whose first two columns are its parts."""
    return (uint64(row[HIGH]) << uint64(32)) | (uint64(row[LOW]) & uint64(0xFFFFFFFF))


@compiled
def _move(old: Any, new: Any) -> None:
    """All rows of a table of counts, int32[n, 16], into a larger one."""
    for row in range(len(old)):
        if old[row, LOW] != 0:
            new[-1 - find_row(new, _key(old[row]))] = old[row]


class Followers:
    """Counts of what followed the last 1 to 16 tokens of a text that grows; about a kilobyte a token at most.

    Attributes:
        rows: int32[n, 16], a hash table; see the columns above.
    """

    def __init__(self) -> None:
        self._used = np.zeros(1, np.int64)
        self.rows = np.zeros((_LEAST, _COLUMNS), np.int32)

    def __len__(self) -> int:
        """Contexts that are known."""
        return int(self._used[0])

    def extend(self, text: NDArray[np.int64], start: int) -> None:
        """Count text[start:]; what stands before is context only."""
        new = len(ORDERS) * (len(text) - start)
        if 3 * (len(self) + new) > 2 * len(self.rows):
            room = 1 << (2 * (len(self) + new)).bit_length()
            rows = np.zeros((room, _COLUMNS), np.int32)
            _move(self.rows, rows)
            self.rows = rows
        _extend(self.rows, self._used, text, start)


class LikeliestRows(NamedTuple):
    """The target's likeliest next tokens, by the last 1, 2 and 3 tokens.

    Attributes:
        keys: int32[n, 2], a hash table.
        ids: int32[n, TOP], likeliest first; -1 after the last.
        gaps: float32[n, TOP], by how much each one's logit is below the first's.
    """

    keys: NDArray[np.int32]
    ids: NDArray[np.int32]
    gaps: NDArray[np.float32]


@compiled
def _record(rows: Any, used: Any, text: Any, tokens: Any, parents: Any, ids: Any, gaps: Any) -> None:
    """Take in a pass: what follows the text's last token, and each draft node. See `Likeliest.record`.

    Args:
        rows: `LikeliestRows` with room.
        used: int64[1]: contexts that are known.
    """
    hashes, tail = np.empty(len(ORDERS), np.uint64), np.empty(REACH, np.int64)
    for row in range(len(ids)):
        length = 0
        node = row - 1
        while node >= 0 and length < KEPT:
            tail[length] = tokens[node]
            length += 1
            node = parents[node]
        at = len(text) - 1
        while at >= 0 and length < KEPT:
            tail[length] = text[at]
            length += 1
            at -= 1
        orders = hash_tail(tail, length, hashes)
        for order in range(min(orders, KEPT)):
            place = _claim(rows.keys, hashes[order], used)
            for rank in range(ids.shape[1]):
                rows.ids[place, rank] = ids[row, rank]
                rows.gaps[place, rank] = gaps[row, rank]


@compiled
def _move_rows(old: Any, new: Any) -> None:
    """All of some `LikeliestRows` into larger ones."""
    for row in range(len(old.keys)):
        if old.keys[row, LOW] != 0:
            place = -1 - find_row(new.keys, _key(old.keys[row]))
            new.keys[place], new.ids[place], new.gaps[place] = old.keys[row], old.ids[row], old.gaps[row]


class Likeliest:
    """The target's likeliest next tokens where the last 1, 2 or 3 tokens were last forwarded (Token Recycling, §3.2).

    Attributes:
        rows: a hash table of them.
    """

    def __init__(self) -> None:
        self._used = np.zeros(1, np.int64)
        self.rows = _new_rows(_LEAST)

    def __len__(self) -> int:
        """Contexts that are known."""
        return int(self._used[0])

    def record(
        self,
        text: NDArray[np.int64],
        tokens: NDArray[np.int32],
        parents: NDArray[np.int32],
        ids: NDArray[np.int32],
        gaps: NDArray[np.float32],
    ) -> None:
        """Take in a pass over the text's last token and a draft behind it.

        Args:
            text: int64[length].
            tokens, parents: int32[n], the draft.
            ids, gaps: [n + 1, TOP], what the pass says is likeliest after each token.
        """
        new = KEPT * len(ids)
        if 3 * (len(self) + new) > 2 * len(self.rows.keys):
            rows = _new_rows(1 << (2 * (len(self) + new)).bit_length())
            _move_rows(self.rows, rows)
            self.rows = rows
        _record(self.rows, self._used, text, tokens, parents, ids, gaps)


def _new_rows(room: int) -> LikeliestRows:
    return LikeliestRows(
        np.zeros((room, 2), np.int32), np.zeros((room, TOP), np.int32), np.zeros((room, TOP), np.float32)
    )
