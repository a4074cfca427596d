"""Texts and their suffix arrays as compiled code sees them: addresses, and what lies there.

A text is documents of token ids with one separator after or between them: the largest value of the array's dtype. No
query holds it, so no match crosses a document's end, and continuations stop there. The documents may lie in several
texts, each with a suffix array of its own: what is answered is what one text of all of them would answer.

The arrays may be memory maps of files that somebody else wrote. Entries of a suffix array are checked before they
are used as addresses; one that points outside its text is an occurrence that nothing follows. Every loop works on a
range that shrinks, so that a corrupt array gives wrong answers at worst, never a crash or an endless loop.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from specds.jit import compiled, load_int32, load_int64, load_uint16, load_uint32

Array = npt.NDArray[Any]
Ranges = npt.NDArray[np.int64]
# A row of `Parts.table`.
Part = tuple[int, int, int, int, int, int]

# What `following` gives where the text ends: below every token, as the end is in the order of suffixes.
NOTHING = -1
# What it gives for a separator of any dtype: above every token.
END = 1 << 32


def separator(dtype: npt.DTypeLike) -> int:
    """The value that ends a document in a text of this dtype (uint16 or uint32): its largest."""
    return int(np.iinfo(dtype).max)


class Parts:
    """Texts and their suffix arrays as compiled code sees them, whatever their number and dtypes.

    Attributes:
        tokens: each part's text, uint16[n] or uint32[n].
        suffixes: each part's suffix array, int32 or int64, as long as the text unless somebody forged it.
        table: int64[S, 6], for each part the addresses of both arrays, their lengths, and the bytes of an entry of
            each. Valid while this object lives, because it holds the arrays.
    """

    __slots__ = ("suffixes", "table", "tokens")

    def __init__(self, parts: Sequence[tuple[Array, Array]]) -> None:
        """Args:
            parts: pairs of tokens and suffix array; memory maps are not copied.

        Raises:
            TypeError: an array has another dtype or is not flat.
        """
        self.tokens = tuple(_plain(tokens, (np.uint16, np.uint32)) for tokens, _ in parts)
        self.suffixes = tuple(_plain(suffixes, (np.int32, np.int64)) for _, suffixes in parts)
        rows = [
            (t.ctypes.data, s.ctypes.data, t.size, s.size, t.itemsize, s.itemsize)
            for t, s in zip(self.tokens, self.suffixes, strict=True)
        ]
        self.table = np.array(rows, np.int64).reshape(len(rows), 6)


def _plain(array: Array, expected: tuple[type, type]) -> Array:
    if array.dtype not in expected or array.ndim != 1:
        raise TypeError(
            f"need a flat array of {' or '.join(t.__name__ for t in expected)}, not {array.ndim}-d {array.dtype}"
        )
    return np.ascontiguousarray(array).view(np.ndarray)


@compiled
def part_at(table: Array, s: int) -> Part:
    """Row s of `Parts.table`, int64[S, 6], as numbers."""
    return table[s, 0], table[s, 1], table[s, 2], table[s, 3], table[s, 4], table[s, 5]


@compiled
def position_at(part: Part, rank: int) -> int:
    """The entry of this rank, which must be below the part's number of ranks; what it says may be anything."""
    _, suffixes, _, _, _, width = part
    if width == 4:
        return load_int32(suffixes + 4 * rank)
    return load_int64(suffixes + 8 * rank)


@compiled
def token_at(part: Part, position: int) -> int:
    """The token at this position, which must lie in the text; separators as they are stored."""
    tokens, _, _, _, width, _ = part
    if width == 2:
        return load_uint16(tokens + 2 * position)
    return load_uint32(tokens + 4 * position)


@compiled
def following(part: Part, rank: int, length: int) -> int:
    """The token `length` places into the suffix of this rank; END for a separator, NOTHING past the end of the text."""
    _, _, n, _, width, _ = part
    p = position_at(part, rank)
    if p < 0 or p >= n or p + length >= n:
        return NOTHING
    token = token_at(part, p + length)
    return END if token == (1 << (8 * width)) - 1 else token
