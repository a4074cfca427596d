"""Suffix arrays of token sequences, in linear time and on one thread.

The method is SA-IS: G. Nong, S. Zhang, W. H. Chan, "Two Efficient Algorithms for Linear Time Suffix Array
Construction", IEEE Transactions on Computers 60(10), 2011. Its words are used here: a suffix is of type S when it is
smaller than the suffix one place to its right, else of type L; an S suffix whose left neighbour is L is an LMS suffix.
Sorted LMS suffixes induce the order of all L suffixes in one scan to the right, and those induce all S suffixes in one
scan to the left.

The whole work is done inside the result array. Two things make it fast on large inputs:

- The sign of an entry says whether the scan that reads it must act on it, so that types are never stored, and each
  entry costs one random read of the text: the token wanted and the one left of it lie side by side.
- The scans know their future addresses from the array itself and ask for them ahead of time.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from specds.jit import compiled, int64, prefetch

Array = npt.NDArray[Any]

# Entries between asking for a cache line and using it. Flat optimum between 16 and 64 on the CPUs tried.
AHEAD = 32
# Values are looked up in tables of this many entries, one for each block of values that occurs.
BLOCK_BITS = 16


def build_suffix_array(tokens: npt.NDArray[np.uint16 | np.uint32]) -> Array:
    """Sort all suffixes of `tokens`.

    The order is lexicographic by token value, and a suffix comes before every longer one that it prefixes.
    Deterministic, and linear in time for any content (uint32 values spread so thinly that a table of them would be
    larger than the text are sorted first). Memory beyond the input: 4 bytes a token for the result, 2 (uint16) or 4
    (uint32) for a working copy, and tables of the larger of 8 bytes a distinct value and, at worst, 4 bytes a token:
    9 and 11 in all for real text. From 2^31 tokens on twice that, the uint16 copy excepted.

    Args:
        tokens: uint16 or uint32 [n]; may be a memory map.

    Returns:
        int32 [n] (int64 from n = 2^31 on): start positions of the suffixes, smallest suffix first.

    Raises:
        TypeError: `tokens` is not uint16 or uint32.
        ValueError: `tokens` is not one-dimensional.

    Source: Nong, Zhang and Chan 2011 (SA-IS).
    """
    if tokens.dtype not in (np.uint16, np.uint32):
        raise TypeError(f"tokens must be uint16 or uint32, not {tokens.dtype}: convert them with astype")
    if tokens.ndim != 1:
        raise ValueError(f"tokens must have one dimension, not {tokens.ndim}: pass one flat array")
    dtype = np.int32 if tokens.size < 2**31 else np.int64
    text, size = _rank(tokens, dtype)
    order = np.empty(tokens.size, dtype)
    _sort(text, order, size)
    return order


def _rank(tokens: Array, dtype: type[np.signedinteger[Any]]) -> tuple[Array, int]:
    """Tokens as numbers below an alphabet size that the tables of `_sort` can afford, in the same order."""
    if tokens.dtype == np.uint16 and tokens.size >= 2**BLOCK_BITS:
        # Pages of a file map are small, and the scans read at random: work on a copy in memory.
        return np.array(tokens, subok=False), 2**BLOCK_BITS
    if tokens.size == 0:
        return np.empty(0, dtype), 0
    blocks = np.zeros(2 ** (32 - BLOCK_BITS), np.int64)
    _mark_blocks(tokens, blocks)
    used = int(np.count_nonzero(blocks))
    if used << BLOCK_BITS > tokens.size:
        # Not np.unique, whose hash table takes ten times the memory.
        values = np.sort(tokens)
        values = values[: _drop_repeats(values)]
        bounds = np.searchsorted(values, np.arange(blocks.size, dtype=np.uint32) << BLOCK_BITS)
        text = np.empty(tokens.size, dtype)
        _search_ranks(tokens, values, np.append(bounds, values.size), text)
        return text, values.size
    blocks[blocks != 0] = np.arange(used)
    table = np.zeros(used << BLOCK_BITS, dtype)
    text = np.empty(tokens.size, dtype)
    size = _table_ranks(tokens, blocks, table, text)
    return text, size


def _sort(text: Array, order: Array, size: int) -> None:
    """Fill `order` with the suffix array of `text`, whose values lie in [0, size).

    Calls itself on a text of at most half the length: 31 levels for 2^32 tokens.
    """
    n = text.size
    if n == 0:
        return
    starts = _bucket_starts(text, size)
    lms = _place_lms(text, order, starts[1:].copy())
    if lms > 1:
        _induce_l_names(text, order, starts[:-1].copy())
        _induce_s_names(text, order, starts[1:].copy())
        names = _name_lms(text, order, lms)
        if names < lms:
            # Their own tables are as large as these: do not hold both.
            del starts
            _sort(order[n - lms :], order[:lms], names)
            _names_to_positions(text, order, lms)
            starts = _bucket_starts(text, size)
    elif lms == 1:
        order[0] = 0
        _names_to_positions(text, order, lms)
    _spread_lms(text, order, starts[1:].copy(), lms)
    _induce_l(text, order, starts[:-1].copy())
    _induce_s(text, order, starts[1:].copy())


@compiled
def _mark_blocks(tokens: Array, blocks: Array) -> None:
    """blocks int64[65536]: 1 for each block of values that occurs in tokens uint16[n] or uint32[n]."""
    for token in tokens:
        blocks[int64(token) >> BLOCK_BITS] = 1


@compiled
def _table_ranks(tokens: Array, blocks: Array, table: Array, text: Array) -> int:
    """Each token's rank among the values that occur, by a table; returns how many values do.

    tokens: uint16[n] or uint32[n].
    blocks: int64[65536], the number of each block of values in the table.
    table: int32 or int64 [blocks << BLOCK_BITS], zeros; afterwards the ranks.
    text: the same dtype [n]; the ranks of the tokens are written there.
    """
    low = (1 << BLOCK_BITS) - 1
    for i in range(tokens.size):
        token = int64(tokens[i])
        table[(blocks[token >> BLOCK_BITS] << BLOCK_BITS) | (token & low)] = 1
    size = 0
    for cell in range(table.size):
        occurs = table[cell]
        table[cell] = size
        size += occurs
    for i in range(tokens.size):
        token = int64(tokens[i])
        text[i] = table[(blocks[token >> BLOCK_BITS] << BLOCK_BITS) | (token & low)]
    return size


@compiled
def _drop_repeats(values: Array) -> int:
    """Put the distinct ones of sorted values, uint16[n] or uint32[n], first; returns how many they are."""
    count = 1
    for i in range(1, values.size):
        if values[i] != values[count - 1]:
            values[count] = values[i]
            count += 1
    return count


@compiled
def _search_ranks(tokens: Array, values: Array, bounds: Array, text: Array) -> None:
    """Each token's rank among the distinct values, by bisection.

    tokens: uint32[n], what is ranked.
    values: uint32[m], ascending.
    bounds: int64[65537], where each block of values starts in them.
    text: int32[n] or int64[n]; the ranks are written there.
    """
    for i in range(tokens.size):
        token = int64(tokens[i])
        low = bounds[token >> BLOCK_BITS]
        high = bounds[(token >> BLOCK_BITS) + 1]
        while low < high:
            middle = (low + high) >> 1
            if values[middle] < token:
                low = middle + 1
            else:
                high = middle
        text[i] = low


@compiled
def _count(text: Array, starts: Array) -> None:
    """starts int32 or int64 [size + 1], zeros: afterwards where each value's bucket begins, of text [n] below size."""
    for i in range(text.size):
        starts[int64(text[i]) + 1] += 1
    for c in range(1, starts.size):
        starts[c] += starts[c - 1]


def _bucket_starts(text: Array, size: int) -> Array:
    """Where the suffixes that begin with each token start in the sorted order; one more entry for the end."""
    starts = np.zeros(size + 1, np.int32 if text.size < 2**31 else np.int64)
    _count(text, starts)
    return starts


# What the functions below share: text[n], unsigned or signed integers below the alphabet's size; order[n], int32 or
# int64, which becomes its suffix array; heads and ends[size], where the next suffix of each bucket goes, from its front
# and from its end, moved as the bucket fills.

# In the two scans that only name LMS substrings, an entry j > 0 means: the suffix at j + 1 has this rank, and j is of
# the type that the running scan sorts. A negative entry ~j waits for the other scan; 0 is an empty place. Nothing need
# be known about position 0: it is never LMS.


@compiled
def _place_lms(text: Array, order: Array, ends: Array) -> int:
    """Put (LMS position - 1) at the end of the bucket of each LMS suffix; return how many there are."""
    order[:] = 0
    count = 0
    right = int64(text[text.size - 1])
    s_type = False
    for i in range(text.size - 2, -1, -1):
        c = int64(text[i])
        if c < right:
            s_type = True
        elif c > right:
            if s_type:
                count += 1
                ends[right] -= 1
                order[ends[right]] = i
            s_type = False
        right = c
    return count


@compiled
def _induce_l_names(text: Array, order: Array, heads: Array) -> None:
    """Scan to the right: the L suffixes, by what stands left of the LMS ones in `order`; `heads` moves on."""
    n = text.size
    j = int64(n - 1)
    c = int64(text[j])
    left = int64(text[j - 1])
    order[heads[c]] = ~(j - 1) if left < c else j - 1
    heads[c] += 1
    for i in range(n):
        prefetch(text, order[min(i + AHEAD, n - 1)])
        j = int64(order[i])
        if j > 0:
            c = int64(text[j])
            left = int64(text[j - 1])
            place = heads[c]
            heads[c] = place + 1
            order[place] = ~(j - 1) if left < c else j - 1
            order[i] = 0
        elif j < 0:
            order[i] = ~j


@compiled
def _induce_s_names(text: Array, order: Array, ends: Array) -> None:
    """After this the negative entries, ~p, are the LMS positions p in the order of their LMS substrings."""
    n = text.size
    for i in range(n - 1, -1, -1):
        prefetch(text, order[max(i - AHEAD, 0)])
        j = int64(order[i])
        if j > 0:
            c = int64(text[j])
            left = int64(text[j - 1])
            place = ends[c] - 1
            ends[c] = place
            order[place] = ~j if left > c else j - 1
            order[i] = 0


@compiled
def _name_lms(text: Array, order: Array, lms: int) -> int:
    """Number the distinct LMS substrings in their order; return how many there are.

    `order[:lms]` takes the LMS positions in the order of their substrings. Where names repeat, the last `lms` entries
    take the names in text order: the text of the next level.
    """
    n = text.size
    count = 0
    for i in range(n):
        j = order[i]
        order[count] = ~j
        count += j < 0
    order[lms:] = 0

    # LMS positions are at least two apart, so that half of one is an address of its own. The last substring ends with
    # the text and equals no other: its length stays 0.
    following = int64(-1)
    right = int64(text[n - 1])
    s_type = False
    for i in range(n - 2, -1, -1):
        c = int64(text[i])
        if c < right:
            s_type = True
        elif c > right:
            if s_type:
                if following >= 0:
                    order[lms + ((i + 1) >> 1)] = following - i
                following = i + 1
            s_type = False
        right = c

    names = 0
    previous = int64(0)
    previous_length = int64(-1)
    for i in range(lms):
        soon = order[min(i + AHEAD, lms - 1)]
        prefetch(text, soon)
        prefetch(order, lms + (soon >> 1))
        p = int64(order[i])
        cell = lms + (p >> 1)
        length = int64(order[cell])
        same = length == previous_length and length > 0
        if same:
            for k in range(length):
                if text[p + k] != text[previous + k]:
                    same = False
                    break
        if not same:
            names += 1
        order[cell] = names
        previous = p
        previous_length = length

    if names < lms:
        write = n
        for i in range(lms + ((n - 1) >> 1), lms - 1, -1):
            name = order[i]
            if name > 0:
                write -= 1
                order[write] = name - 1
    return names


@compiled
def _names_to_positions(text: Array, order: Array, lms: int) -> None:
    """Turn `order[:lms]` from indices among the LMS suffixes into their positions."""
    n = text.size
    write = n
    right = int64(text[n - 1])
    s_type = False
    for i in range(n - 2, -1, -1):
        c = int64(text[i])
        if c < right:
            s_type = True
        elif c > right:
            if s_type:
                write -= 1
                order[write] = i + 1
            s_type = False
        right = c
    for i in range(lms):
        prefetch(order, write + order[min(i + AHEAD, lms - 1)])
        order[i] = order[write + order[i]]


@compiled
def _spread_lms(text: Array, order: Array, ends: Array, lms: int) -> None:
    """Move the sorted LMS positions from the front to the ends of their buckets; all else becomes 0."""
    order[lms:] = 0
    for i in range(lms - 1, -1, -1):
        prefetch(text, order[max(i - AHEAD, 0)])
        p = order[i]
        order[i] = 0
        c = int64(text[p])
        ends[c] -= 1
        order[ends[c]] = p


# In the two scans that give the result, an entry j > 0 is a suffix whose left neighbour is of the type that the running
# scan sorts; ~j is one that the scan leaves as it is.


@compiled
def _induce_l(text: Array, order: Array, heads: Array) -> None:
    """Scan to the right: the L suffixes in their final order, induced by the LMS ones; `heads` moves on."""
    n = text.size
    j = int64(n - 1)
    c = int64(text[j])
    order[heads[c]] = ~j if j > 0 and int64(text[j - 1]) < c else j
    heads[c] += 1
    for i in range(n):
        prefetch(text, order[min(i + AHEAD, n - 1)])
        j = int64(order[i])
        order[i] = ~j
        if j > 0:
            j -= 1
            c = int64(text[j])
            left = int64(text[max(j - 1, 0)])
            place = heads[c]
            heads[c] = place + 1
            order[place] = ~j if left < c else j


@compiled
def _induce_s(text: Array, order: Array, ends: Array) -> None:
    """Scan to the left: the S suffixes in their final order, induced by the L ones; `ends` moves back."""
    n = text.size
    for i in range(n - 1, -1, -1):
        prefetch(text, order[max(i - AHEAD, 0)])
        j = int64(order[i])
        if j > 0:
            j -= 1
            c = int64(text[j])
            left = int64(text[max(j - 1, 0)])
            place = ends[c] - 1
            ends[c] = place
            order[place] = ~j if j == 0 or left > c else j
        else:
            order[i] = ~j
