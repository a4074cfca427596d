"""The longest suffix of a context that occurs in texts, found in their suffix arrays.

All occurrences of a string are one range of a suffix array, sorted by what follows. Ranks count the suffixes of one
part's array from 0; queries are int64[m] token ids, and query[start:] is what is looked for.

Source: Z. He et al., "REST: Retrieval-Based Speculative Decoding", NAACL 2024, section 3 (longest suffix match).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from specds.datastore.suffix_parts import (
    END,
    NOTHING,
    Array,
    Part,
    Parts,
    Ranges,
    following,
    part_at,
    position_at,
    token_at,
)
from specds.jit import compiled, prefetch_address


def longest_match(
    parts: Parts,
    context: npt.NDArray[np.integer[Any]] | Sequence[int],
    max_match: int = 16,
    min_match: int = 2,
) -> tuple[int, Ranges]:
    """Find the longest suffix of `context` that occurs in some part with at least one token after it.

    Args:
        parts: where to look.
        context: integers [m], any m; only the last `max_match` matter. A token that a text's dtype cannot hold, or
            that equals its separator, matches nothing there.
        max_match: longest match looked for, in tokens (REST: 16).
        min_match: shortest match that counts, in tokens, at least 1 (REST's back-off ends at 2).

    Returns:
        (length, ranges int64[S, 2]): `suffixes[s][ranges[s, 0]:ranges[s, 1]]` are all occurrences in part s of the
        last `length` tokens of the context, those at the end of a document included. Length 0 and empty ranges if
        there is none.

    Raises:
        ValueError: `min_match` is below 1.
    """
    if min_match < 1:
        raise ValueError(f"min_match must be at least 1, not {min_match}: the empty string matches everywhere")
    # A copy, so that its layout and flags never ask for another compiled version.
    query = np.array(context[-max_match:] if max_match > 0 else (), np.int64)
    match: tuple[int, Ranges] = find_longest(parts.table, query, min_match)
    return match


@compiled
def _compare(part: Part, rank: int, query: Array, start: int) -> int:
    """-1, 0 or 1: the suffix of this rank is smaller than query[start:], begins with it, or is larger."""
    _, _, n, _, _, _ = part
    p = position_at(part, rank)
    if p < 0 or p >= n:
        return -1
    for k in range(start, query.size):
        if p >= n:
            return -1
        token = token_at(part, p)
        if token != query[k]:
            return -1 if token < query[k] else 1
        p += 1
    return 0


@compiled
def _lower_bound(part: Part, query: Array, start: int) -> int:
    """The rank of the first suffix that is not smaller than query[start:]."""
    _, suffixes, _, ranks, _, width = part
    low = 0
    high = ranks
    while low < high:
        middle = (low + high) >> 1
        # Either is the next place read: have both on the way while this one's token arrives.
        prefetch_address(suffixes + width * ((low + middle) >> 1))
        prefetch_address(suffixes + width * ((middle + 1 + high) >> 1))
        if _compare(part, middle, query, start) < 0:
            low = middle + 1
        else:
            high = middle
    return low


@compiled
def _upper_bound(part: Part, query: Array, start: int, low: int) -> int:
    """The end of the suffixes that begin with query[start:], given the first. Most such ranges are short: gallop."""
    _, _, _, ranks, _, _ = part
    step = 1
    high = low + 1
    while high < ranks and _compare(part, high, query, start) == 0:
        low = high
        step *= 2
        high = min(high + step, ranks)
    low += 1
    while low < high:
        middle = (low + high) >> 1
        if _compare(part, middle, query, start) == 0:
            low = middle + 1
        else:
            high = middle
    return low


@compiled
def _begins(part: Part, rank: int, query: Array, start: int) -> bool:
    """Whether there is a suffix of this rank and it begins with query[start:]."""
    _, _, _, ranks, _, _ = part
    return rank < ranks and _compare(part, rank, query, start) == 0


@compiled
def _continues(part: Part, query: Array, start: int, low: int) -> bool:
    """Whether an occurrence of query[start:] is followed by a token, given the rank of the first.

    Occurrences are sorted by what follows: at most one, the first, ends with the text, and separators come last.
    """
    length = query.size - start
    for rank in range(low, low + 2):
        if not _begins(part, rank, query, start):
            return False
        token = following(part, rank, length)
        if token != NOTHING:
            return token != END
    return False


@compiled
def _speakable(part: Part, query: Array) -> int:
    """How many tokens at the end of query int64[m] this part's text could hold."""
    _, _, _, _, width, _ = part
    end = (1 << (8 * width)) - 1
    valid = 0
    while valid < query.size and 0 <= query[query.size - 1 - valid] < end:
        valid += 1
    return valid


# What `tried` says in `find_longest` of a part that the match cannot occur in.
ABSENT = -1


@compiled
def find_longest(table: Array, query: Array, min_match: int) -> tuple[int, Ranges]:
    """`longest_match` of query int64[m] in the parts of table int64[S, 6]: its tokens, and its ranges int64[S, 2]."""
    count = table.shape[0]
    ranges = np.zeros((count, 2), np.int64)
    # The length of the string whose first rank in part s is ranges[s, 0].
    tried = np.zeros(count, np.int64)
    best = 0
    for s in range(count):
        part = part_at(table, s)
        high = _speakable(part, query)
        low = min_match
        length = (low + high) >> 1
        if best > 0:
            # What lacks the match of an earlier part also lacks all longer ones.
            start = query.size - best
            first = _lower_bound(part, query, start) if best <= high else 0
            if best > high or not _begins(part, first, query, start):
                tried[s] = ABSENT
                continue
            ranges[s, 0] = first
            tried[s] = best
            # Few parts know more than one before: ask that first.
            low = best + 1
            length = low
        # If a string occurs with a token after it, so does each of its suffixes: the length can be found by bisection.
        while low <= high:
            start = query.size - length
            first = _lower_bound(part, query, start)
            if _continues(part, query, start, first):
                best = length
                ranges[s, 0] = first
                tried[s] = length
                low = length + 1
            else:
                high = length - 1
            length = (low + high) >> 1
    start = query.size - best
    for s in range(count):
        part = part_at(table, s)
        first = ranges[s, 0]
        if best == 0 or tried[s] == ABSENT or _speakable(part, query) < best:
            ranges[s, 0] = 0
            continue
        if tried[s] != best:
            first = _lower_bound(part, query, start)
            ranges[s, 0] = first
        ranges[s, 1] = first
        if _begins(part, first, query, start):
            ranges[s, 1] = _upper_bound(part, query, start, first)
    return best, ranges
