"""Search in a suffix array of documents: the longest match of a context, and the counted tree of what follows it.

The text is documents of token ids with one separator after or between them: the largest value of the array's dtype. No
query holds it, so no match crosses a document's end, and continuations stop there.

All occurrences of a string are one range of the suffix array, sorted by what follows; so within the range the
occurrences that share one more token are a range again. Counts are therefore widths of ranges, exact however many
occurrences there are, and cost a few probes each.

Both arrays may be memory maps of files that somebody else wrote. Entries of the suffix array are checked before they
are used as addresses; one that points outside the text is an occurrence that nothing follows. Every loop works on a
range that shrinks, so that a corrupt array gives wrong answers at worst, never a crash or an endless loop.

Source: Z. He et al., "REST: Retrieval-Based Speculative Decoding", NAACL 2024, section 3 (longest suffix match, tree of
continuations by frequency); here every occurrence is counted.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from specds.jit import compiled, int64, prefetch

Array = npt.NDArray[Any]
Tree = tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.int64]]

# What `_following` gives where the text ends: below every token, as the end is in the order of suffixes.
NOTHING = -1


def separator(dtype: npt.DTypeLike) -> int:
    """The value that ends a document in a text of this dtype (uint16 or uint32): its largest."""
    return int(np.iinfo(dtype).max)


def longest_match(
    tokens: Array,
    sa: Array,
    context: npt.NDArray[np.integer[Any]] | Sequence[int],
    max_match: int = 16,
    min_match: int = 2,
) -> tuple[int, int, int]:
    """Find the longest suffix of `context` that occurs in the text with at least one token after it.

    Args:
        tokens: uint16 or uint32 [n], documents and separators.
        sa: int32 or int64 [n], the suffix array of `tokens`.
        context: integers [m], any m; only the last `max_match` matter. A token that the text's dtype cannot hold, or
            that equals the separator, matches nothing.
        max_match: longest match looked for, in tokens (REST: 16).
        min_match: shortest match that counts, in tokens, at least 1 (REST's back-off ends at 2).

    Returns:
        (length, lo, hi): `sa[lo:hi]` are all occurrences of the last `length` tokens of the context, those at the end
        of a document included. (0, 0, 0) if there is none.

    Raises:
        TypeError: an array has another dtype.
        ValueError: `min_match` is below 1.
    """
    if min_match < 1:
        raise ValueError(f"min_match must be at least 1, not {min_match}: the empty string matches everywhere")
    if min(max_match, len(context)) < min_match:
        return 0, 0, 0
    # A copy, so that its layout and flags never ask for another compiled version.
    query = np.array(context[-max_match:], np.int64)
    length, lo, hi = _longest_match(_view(tokens, "uint"), _view(sa, "int"), query, min_match)
    return length, lo, hi


def continuation_tree(
    tokens: Array,
    sa: Array,
    length: int,
    lo: int,
    hi: int,
    max_depth: int = 10,
    max_nodes: int = 64,
    min_share: int = 256,
) -> Tree:
    """Count what follows all occurrences of a match, as a tree of at most `max_nodes` nodes.

    A node stands for the path of tokens from the root to it; its count is the number of occurrences whose continuation
    starts with that path. Kept are the best nodes in the order: larger count, smaller depth, path in the order of token
    ids. A node with count * min_share < hi - lo is never kept, so that the cost of a wide range does not grow with its
    width; ranges narrower than `min_share` lose nothing to this rule.

    Args:
        tokens: uint16 or uint32 [n], documents and separators.
        sa: int32 or int64 [n], the suffix array of `tokens`.
        length: tokens in the match.
        lo: with `hi`, the range of the match in `sa`, as `longest_match` gives it.
        hi: end of the range, exclusive.
        max_depth: longest path, in tokens (REST: 10).
        max_nodes: most nodes kept (REST: 64).
        min_share: smallest share of the occurrences that a node must have, as 1 / min_share.

    Returns:
        Node tokens int32 [k], parents int32 [k], counts int64 [k], in the order above. It is topological:
        parents[i] < i; -1 for depth 1. Token ids from 2^31 on wrap.

    Raises:
        TypeError: an array has another dtype.
        ValueError: the range does not lie in `sa`, or `length` or `min_share` makes no sense.
    """
    if not 0 <= lo <= hi <= sa.size:
        raise ValueError(f"lo={lo}, hi={hi} is no range in a suffix array of {sa.size} entries")
    if not 0 <= length <= tokens.size:
        raise ValueError(f"length={length} is no match length in a text of {tokens.size} tokens")
    if min_share < 1:
        raise ValueError(f"min_share must be at least 1, not {min_share}")
    # More nodes than this there cannot be: at each depth the ranges of the nodes are disjoint.
    max_nodes = min(max_nodes, max_depth * min(hi - lo, min_share))
    if max_nodes <= 0:
        return np.empty(0, np.int32), np.empty(0, np.int32), np.empty(0, np.int64)
    least = -(-(hi - lo) // min_share)
    tree: Tree = _continuation_tree(
        _view(tokens, "uint"), _view(sa, "int"), length, lo, hi, max_depth, max_nodes, least
    )
    return tree


def _view(array: Array, kind: str) -> Array:
    """The same memory as a plain read-only array, so that one compiled version serves memory maps and arrays alike."""
    expected = (np.uint16, np.uint32) if kind == "uint" else (np.int32, np.int64)
    if array.dtype not in expected or array.ndim != 1:
        raise TypeError(
            f"need a flat array of {' or '.join(t.__name__ for t in expected)}, not {array.ndim}-d {array.dtype}"
        )
    view = array.view(np.ndarray)
    view.flags.writeable = False
    return view


@compiled
def _compare(tokens: Array, sa: Array, rank: int, query: Array, start: int) -> int:
    """-1, 0 or 1: the suffix of this rank is smaller than query[start:], begins with it, or is larger."""
    n = tokens.size
    p = int64(sa[rank])
    if p < 0 or p >= n:
        return -1
    for k in range(start, query.size):
        if p >= n:
            return -1
        token = int64(tokens[p])
        if token != query[k]:
            return -1 if token < query[k] else 1
        p += 1
    return 0


@compiled
def _lower_bound(tokens: Array, sa: Array, query: Array, start: int) -> int:
    """The rank of the first suffix that is not smaller than query[start:]."""
    low = 0
    high = sa.size
    while low < high:
        middle = (low + high) >> 1
        # Either is the next place read: have both on the way while this one's token arrives.
        prefetch(sa, (low + middle) >> 1)
        prefetch(sa, (middle + 1 + high) >> 1)
        if _compare(tokens, sa, middle, query, start) < 0:
            low = middle + 1
        else:
            high = middle
    return low


@compiled
def _upper_bound(tokens: Array, sa: Array, query: Array, start: int, low: int) -> int:
    """The end of the suffixes that begin with query[start:], given the first. Most such ranges are short: gallop."""
    step = 1
    high = low + 1
    while high < sa.size and _compare(tokens, sa, high, query, start) == 0:
        low = high
        step *= 2
        high = min(high + step, sa.size)
    low += 1
    while low < high:
        middle = (low + high) >> 1
        if _compare(tokens, sa, middle, query, start) == 0:
            low = middle + 1
        else:
            high = middle
    return low


@compiled
def _following(tokens: Array, sa: Array, rank: int, length: int) -> int:
    """The token `length` places into the suffix of this rank, which may be a separator; NOTHING behind the text."""
    n = tokens.size
    p = int64(sa[rank])
    if p < 0 or p >= n or p + length >= n:
        return NOTHING
    return int64(tokens[p + length])


@compiled
def _continues(tokens: Array, sa: Array, query: Array, start: int, low: int, end: int) -> bool:
    """Whether an occurrence of query[start:] is followed by a token, given the rank of the first.

    Occurrences are sorted by what follows: at most one, the first, ends with the text, and separators come last.
    """
    length = query.size - start
    for rank in range(low, min(low + 2, sa.size)):
        if _compare(tokens, sa, rank, query, start) != 0:
            return False
        token = _following(tokens, sa, rank, length)
        if token != NOTHING:
            return token != end
    return False


@compiled
def _longest_match(tokens: Array, sa: Array, query: Array, min_match: int) -> tuple[int, int, int]:
    end = (int64(1) << (8 * tokens.itemsize)) - 1
    valid = 0
    while valid < query.size and 0 <= query[query.size - 1 - valid] < end:
        valid += 1
    # If a string occurs with a token after it, so does each of its suffixes: the length can be found by bisection.
    best = 0
    best_low = 0
    low = min_match
    high = valid
    while low <= high:
        length = (low + high) >> 1
        start = query.size - length
        first = _lower_bound(tokens, sa, query, start)
        if _continues(tokens, sa, query, start, first, end):
            best = length
            best_low = first
            low = length + 1
        else:
            high = length - 1
    if best == 0:
        return 0, 0, 0
    return best, best_low, _upper_bound(tokens, sa, query, query.size - best, best_low)


# Columns of the queue in `_continuation_tree`.
COUNT, DEPTH, LOW, TOKEN, PARENT = range(5)


@compiled
def _worse(queue: Array, row: int, count: int, depth: int, low: int) -> bool:
    """Whether the queue's entry comes after a node (count, depth, low) in the order of `continuation_tree`.

    Nodes of one depth have disjoint ranges in the order of their paths: the start of the range stands for the path.
    """
    if queue[row, COUNT] != count:
        return bool(queue[row, COUNT] < count)
    if queue[row, DEPTH] != depth:
        return bool(queue[row, DEPTH] > depth)
    return bool(queue[row, LOW] > low)


@compiled
def _run_end(tokens: Array, sa: Array, low: int, high: int, length: int, token: int) -> int:
    """The end of the run of ranks from `low` on, before `high`, that are followed by `token`; `low` has it."""
    step = 1
    probe = low + 1
    while probe < high and _following(tokens, sa, probe, length) == token:
        low = probe
        step *= 2
        probe += step
    high = min(probe, high)
    low += 1
    while low < high:
        middle = (low + high) >> 1
        if _following(tokens, sa, middle, length) == token:
            low = middle + 1
        else:
            high = middle
    return low


@compiled
def _run_start(tokens: Array, sa: Array, low: int, high: int, length: int, token: int) -> int:
    """The start of the run of ranks up to `high`, not before `low`, that are followed by `token`; `high` has it."""
    while low < high:
        middle = (low + high) >> 1
        if _following(tokens, sa, middle, length) == token:
            high = middle
        else:
            low = middle + 1
    return high


@compiled
def _continuation_tree(
    tokens: Array, sa: Array, length: int, lo: int, hi: int, max_depth: int, max_nodes: int, least: int
) -> Tree:
    end = (int64(1) << (8 * tokens.itemsize)) - 1
    node_tokens = np.empty(max_nodes, np.int32)
    parents = np.empty(max_nodes, np.int32)
    counts = np.empty(max_nodes, np.int64)
    # Candidates, best first, in queue[head:tail]. No more are kept than can still be taken: head is the number taken,
    # so one array of max_nodes rows does.
    queue = np.empty((max_nodes, 5), np.int64)
    head = 0
    tail = 0

    depth = 0
    low = lo
    high = hi
    while True:
        # Children of the node (depth, [low, high)) that was taken last; the root at first.
        if depth < max_depth:
            offset = length + depth
            depth += 1
            rank = low
            while True:
                # Only a run of at least `width` can still be taken; each such run holds a rank that is probed.
                width = least
                if tail == max_nodes:
                    worst = tail - 1
                    width = max(width, queue[worst, COUNT])
                    if not _worse(queue, worst, width, depth, rank):
                        width += 1
                probe = rank + width - 1
                if probe >= high:
                    break
                token = _following(tokens, sa, probe, offset)
                if token == end:
                    # Separators come last: nothing else follows.
                    break
                start = _run_start(tokens, sa, rank, probe, offset, token)
                if start + width > high:
                    break
                if start > rank and _following(tokens, sa, start + width - 1, offset) != token:
                    # Too short, and so is what is left of it after the probe.
                    rank = probe + 1
                    continue
                rank = _run_end(tokens, sa, start + width - 1, high, offset, token)
                if token == NOTHING:
                    continue
                count = rank - start
                row = tail
                if tail == max_nodes:
                    row = tail - 1
                else:
                    tail += 1
                while row > head and _worse(queue, row - 1, count, depth, start):
                    for column in range(5):
                        queue[row, column] = queue[row - 1, column]
                    row -= 1
                queue[row, COUNT] = count
                queue[row, DEPTH] = depth
                queue[row, LOW] = start
                queue[row, TOKEN] = token
                queue[row, PARENT] = head - 1
        if head == tail:
            break
        node_tokens[head] = queue[head, TOKEN]
        parents[head] = queue[head, PARENT]
        counts[head] = queue[head, COUNT]
        depth = queue[head, DEPTH]
        low = queue[head, LOW]
        high = low + queue[head, COUNT]
        head += 1
        if head == max_nodes:
            break
    return node_tokens[:head], parents[:head], counts[:head]
