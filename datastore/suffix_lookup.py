"""Search in suffix arrays of documents: the longest match of a context, and the counted tree of what follows it.

A text is documents of token ids with one separator after or between them: the largest value of the array's dtype. No
query holds it, so no match crosses a document's end, and continuations stop there. The documents may lie in several
texts, each with a suffix array of its own: what is answered is what one text of all of them would answer.

All occurrences of a string are one range of a suffix array, sorted by what follows; so within the range the
occurrences that share one more token are a range again. Counts are therefore widths of ranges, exact however many
occurrences there are, and cost a few probes each.

The arrays may be memory maps of files that somebody else wrote. Entries of a suffix array are checked before they
are used as addresses; one that points outside its text is an occurrence that nothing follows. Every loop works on a
range that shrinks, so that a corrupt array gives wrong answers at worst, never a crash or an endless loop.

Source: Z. He et al., "REST: Retrieval-Based Speculative Decoding", NAACL 2024, section 3 (longest suffix match, tree of
continuations by frequency); here every occurrence is counted.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from specds.jit import compiled, load_int32, load_int64, load_uint16, load_uint32, prefetch_address

Array = npt.NDArray[Any]
Ranges = npt.NDArray[np.int64]
Tree = tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.int64]]
# A row of `Parts.table`.
Part = tuple[int, int, int, int, int, int]

# What `_following` gives where the text ends: below every token, as the end is in the order of suffixes.
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
    found: tuple[int, Ranges] = _longest_match(parts.table, query, min_match)
    return found


def continuation_tree(
    parts: Parts,
    length: int,
    ranges: Ranges,
    max_depth: int = 10,
    max_nodes: int = 64,
    min_share: int = 256,
) -> Tree:
    """Count what follows all occurrences of a match, as a tree of at most `max_nodes` nodes.

    A node stands for the path of tokens from the root to it; its count is the number of occurrences, in all parts,
    whose continuation starts with that path. Kept are the best nodes in the order: larger count, smaller depth, path in
    the order of token ids. A node with count * min_share < occurrences is never kept, so that the cost of a wide range
    does not grow with its width; matches with fewer than `min_share` occurrences lose nothing to this rule.

    Args:
        parts: the texts.
        length: tokens in the match.
        ranges: int64[S, 2], its occurrences in each part's suffix array, as `longest_match` gives them.
        max_depth: longest path, in tokens (REST: 10).
        max_nodes: most nodes kept (REST: 64).
        min_share: smallest share of the occurrences that a node must have, as 1 / min_share.

    Returns:
        Node tokens int32 [k], parents int32 [k], counts int64 [k], in the order above. It is topological:
        parents[i] < i; -1 for depth 1. Token ids from 2^31 on wrap.

    Raises:
        ValueError: a range does not lie in its suffix array, or `length` or `min_share` makes no sense.
    """
    if min_share < 1:
        raise ValueError(f"min_share must be at least 1, not {min_share}")
    # A copy for the same reason as the query's.
    where = np.array(ranges, np.int64, order="C", ndmin=2)
    if where.shape != (len(parts.tokens), 2):
        raise ValueError(f"ranges of shape {where.shape} do not belong to {len(parts.tokens)} parts")
    tree: Tree = _continuation_tree(parts.table, length, where, max_depth, max_nodes, min_share)
    return tree


def backoff_trees(
    parts: Parts,
    context: npt.NDArray[np.integer[Any]] | Sequence[int],
    max_depths: npt.NDArray[np.int64],
    max_nodes: npt.NDArray[np.int64],
    min_share: int = 256,
) -> list[tuple[int, int, Tree]]:
    """What followed the end of a text, by contexts of three lengths, in one call.

    They are the longest match of `context`; a suffix of half its length, of 2 to 4 tokens, where it has 3 or more; and
    the last token alone, where it has 2 or more.

    Args:
        parts: where to look.
        context: integers [m], as for `longest_match`; all of it matters.
        max_depths: int64[3], longest path of each tree.
        max_nodes: int64[3], most nodes of each.
        min_share: as for `continuation_tree`, which says what the trees are.

    Returns:
        length, occurrences and tree of each; length 0 and an empty tree for one that is not there.
    """
    query = np.array(context, np.int64)
    (tokens, parents, counts), ends, lengths, totals = _backoff_trees(
        parts.table, query, max_depths, max_nodes, min_share
    )
    trees: list[tuple[int, int, Tree]] = []
    start = 0
    for end, length, total in zip(ends.tolist(), lengths.tolist(), totals.tolist(), strict=True):
        trees.append((length, total, (tokens[start:end], parents[start:end], counts[start:end])))
        start = end
    return trees


def _plain(array: Array, expected: tuple[type, type]) -> Array:
    if array.dtype not in expected or array.ndim != 1:
        raise TypeError(
            f"need a flat array of {' or '.join(t.__name__ for t in expected)}, not {array.ndim}-d {array.dtype}"
        )
    return np.ascontiguousarray(array).view(np.ndarray)


@compiled
def _part(table: Array, s: int) -> Part:
    return table[s, 0], table[s, 1], table[s, 2], table[s, 3], table[s, 4], table[s, 5]


@compiled
def _position(part: Part, rank: int) -> int:
    """The entry of this rank, which must be below the part's number of ranks; what it says may be anything."""
    _, suffixes, _, _, _, width = part
    if width == 4:
        return load_int32(suffixes + 4 * rank)
    return load_int64(suffixes + 8 * rank)


@compiled
def _token(part: Part, position: int) -> int:
    """The token at this position, which must lie in the text; separators as they are stored."""
    tokens, _, _, _, width, _ = part
    if width == 2:
        return load_uint16(tokens + 2 * position)
    return load_uint32(tokens + 4 * position)


@compiled
def _compare(part: Part, rank: int, query: Array, start: int) -> int:
    """-1, 0 or 1: the suffix of this rank is smaller than query[start:], begins with it, or is larger."""
    _, _, n, _, _, _ = part
    p = _position(part, rank)
    if p < 0 or p >= n:
        return -1
    for k in range(start, query.size):
        if p >= n:
            return -1
        token = _token(part, p)
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
def _following(part: Part, rank: int, length: int) -> int:
    """The token `length` places into the suffix of this rank; END for a separator, NOTHING past the end of the text."""
    _, _, n, _, width, _ = part
    p = _position(part, rank)
    if p < 0 or p >= n or p + length >= n:
        return NOTHING
    token = _token(part, p + length)
    return END if token == (1 << (8 * width)) - 1 else token


@compiled
def _continues(part: Part, query: Array, start: int, low: int) -> bool:
    """Whether an occurrence of query[start:] is followed by a token, given the rank of the first.

    Occurrences are sorted by what follows: at most one, the first, ends with the text, and separators come last.
    """
    length = query.size - start
    for rank in range(low, low + 2):
        if not _begins(part, rank, query, start):
            return False
        token = _following(part, rank, length)
        if token != NOTHING:
            return token != END
    return False


@compiled
def _speakable(part: Part, query: Array) -> int:
    """How many tokens at the end of the query this part's text could hold."""
    _, _, _, _, width, _ = part
    end = (1 << (8 * width)) - 1
    valid = 0
    while valid < query.size and 0 <= query[query.size - 1 - valid] < end:
        valid += 1
    return valid


# What `tried` says in `_longest_match` of a part that the match cannot occur in.
ABSENT = -1


@compiled
def _longest_match(table: Array, query: Array, min_match: int) -> tuple[int, Ranges]:
    count = table.shape[0]
    ranges = np.zeros((count, 2), np.int64)
    # The length of the string whose first rank in part s is ranges[s, 0].
    tried = np.zeros(count, np.int64)
    best = 0
    for s in range(count):
        part = _part(table, s)
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
        part = _part(table, s)
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


# Columns of the queue in `_continuation_tree`.
COUNT, DEPTH, LOW, SLOT = range(4)


@compiled
def _worse(queue: Array, row: int, count: int, depth: int, low: int) -> bool:
    """Whether the queue's entry comes after a node (count, depth, low) in the order of `continuation_tree`.

    Nodes of one depth have disjoint ranges in the order of their paths, in each part, empty ranges included. So the
    sum of the starts of a node's ranges stands for its path: it is the start in one suffix array of all parts.
    """
    if queue[row, COUNT] != count:
        return bool(queue[row, COUNT] < count)
    if queue[row, DEPTH] != depth:
        return bool(queue[row, DEPTH] > depth)
    return bool(queue[row, LOW] > low)


@compiled
def _run_end(part: Part, low: int, high: int, length: int, token: int) -> int:
    """The end of the run of ranks from `low` on, before `high`, that are followed by `token`; `low` has it."""
    step = 1
    probe = low + 1
    while probe < high and _following(part, probe, length) == token:
        low = probe
        step *= 2
        probe += step
    high = min(probe, high)
    low += 1
    while low < high:
        middle = (low + high) >> 1
        if _following(part, middle, length) == token:
            low = middle + 1
        else:
            high = middle
    return low


@compiled
def _run_start(part: Part, low: int, high: int, length: int, token: int) -> int:
    """The first rank from `low` on that is followed by `token` or more, or `high`."""
    while low < high:
        middle = (low + high) >> 1
        if _following(part, middle, length) >= token:
            high = middle
        else:
            low = middle + 1
    return high


@compiled
def _next_run(part: Part, rank: int, high: int, length: int, width: int) -> tuple[int, int]:
    """The first run of at least `width` ranks in [rank, high) that are followed by one token: its token and start.

    The token is END where there is none. Each such run holds one of the ranks that are probed.
    """
    while True:
        probe = rank + width - 1
        if probe >= high:
            return END, high
        token = _following(part, probe, length)
        if token == END:
            # Separators come last: nothing else follows.
            return END, high
        start = _run_start(part, rank, probe, length, token)
        if start + width > high:
            return END, high
        if start > rank and _following(part, start + width - 1, length) != token:
            # Too short, and so is what is left of it after the probe.
            rank = probe + 1
        elif token == NOTHING:
            rank = _run_end(part, start + width - 1, high, length, token)
        else:
            return token, start


# Columns of the cursors in `_continuation_tree`, one for each part that holds the node whose children are found: the
# part and its share of the width looked for; where the child counted last starts and ends; the end of the node's
# range; the run found next: its token, its start and a rank in it.
PART, SHARE, FROM, BASE, HIGH, NEXT, START, INSIDE = range(8)
# Their NEXT before it is looked for.
UNKNOWN = -2


@compiled
def _next_child(
    table: Array, cursors: Array, active: int, shares: int, length: int, width: int
) -> tuple[int, int, int]:
    """The next token that `width` ranks or more may be followed by: the token, their number, the sum of their starts.

    It moves the cursors on. The token is END where no other follows.
    """
    token = END
    for a in range(active):
        if cursors[a, NEXT] == UNKNOWN:
            # The widths asked of the parts are chosen so that a child narrower in each has at most width - 1 ranks.
            part = _part(table, cursors[a, PART])
            least = 1 + (width - 1) * cursors[a, SHARE] // shares
            found, start = _next_run(part, cursors[a, BASE], cursors[a, HIGH], length, least)
            cursors[a, NEXT] = found
            cursors[a, START] = start
            cursors[a, INSIDE] = start + least - 1
        token = min(token, cursors[a, NEXT])
    count = 0
    low = 0
    if token == END:
        return token, count, low
    for a in range(active):
        part = _part(table, cursors[a, PART])
        start = cursors[a, START]
        end = start
        if cursors[a, NEXT] == token:
            end = _run_end(part, cursors[a, INSIDE], cursors[a, HIGH], length, token)
            cursors[a, NEXT] = UNKNOWN
        else:
            start = _run_start(part, cursors[a, BASE], end, length, token)
            if start < end and _following(part, start, length) == token:
                end = _run_end(part, start, end, length, token)
            else:
                end = start
        cursors[a, FROM] = start
        cursors[a, BASE] = end
        count += end - start
        low += start
    return token, count, low


@compiled
def _continuation_tree(
    table: Array, length: int, ranges: Ranges, max_depth: int, max_nodes: int, min_share: int
) -> Tree:
    parts = table.shape[0]
    total = 0
    longest = 0
    for s in range(parts):
        _, _, n, ranks, _, _ = _part(table, s)
        if not 0 <= ranges[s, 0] <= ranges[s, 1] <= ranks:
            raise ValueError("no range of the suffix array: ranges must be those of a match in these parts")
        total += ranges[s, 1] - ranges[s, 0]
        longest = max(longest, n)
    if not 0 <= length <= longest:
        raise ValueError("no match has this length: it is negative or above every text's")
    # More nodes than this there cannot be: at each depth the ranges of the nodes are disjoint.
    max_nodes = max(0, min(max_nodes, max_depth * min(total, min_share)))
    node_tokens = np.empty(max_nodes, np.int32)
    parents = np.empty(max_nodes, np.int32)
    counts = np.empty(max_nodes, np.int64)
    if max_nodes == 0:
        return node_tokens, parents, counts
    least = -(-total // min_share)
    # Candidates, best first, in queue[head:tail]. No more are kept than can still be taken: head is the number taken,
    # so one array of max_nodes rows does. Ranges lie in slots, the root's in the last; tokens and parents in links.
    queue = np.empty((max_nodes, 4), np.int64)
    links = np.empty((max_nodes, 2), np.int64)
    slots = np.empty((max_nodes + 1, parts, 2), np.int64)
    cursors = np.empty((parts, 8), np.int64)
    for s in range(parts):
        slots[max_nodes, s, 0] = ranges[s, 0]
        slots[max_nodes, s, 1] = ranges[s, 1]
    head = 0
    tail = 0

    depth = 0
    here = max_nodes
    while True:
        # Children of the node (depth, slots[here]) that was taken last; the root at first.
        if depth < max_depth:
            offset = length + depth
            depth += 1
            active = 0
            shares = 0
            absent = 0
            for s in range(parts):
                low = slots[here, s, 0]
                high = slots[here, s, 1]
                if low == high:
                    absent += low
                    continue
                # Roots make the probes fewest: a part of n ranks is probed n / share times.
                share = 1 + int(16 * np.sqrt(np.float64(high - low)))
                shares += share
                cursors[active, PART] = s
                cursors[active, SHARE] = share
                cursors[active, BASE] = low
                cursors[active, HIGH] = high
                cursors[active, NEXT] = UNKNOWN
                active += 1
            # Most nodes lie in one part: their children are found without cursors.
            part = _part(table, cursors[0, PART])
            base = cursors[0, BASE]
            end = cursors[0, HIGH]
            while True:
                # Only a child of at least `width` occurrences can still be taken.
                width = least
                if tail == max_nodes:
                    worst = tail - 1
                    width = max(width, queue[worst, COUNT])
                    low = absent + base
                    if active > 1:
                        low = absent
                        for a in range(active):
                            low += cursors[a, BASE]
                    if not _worse(queue, worst, width, depth, low):
                        width += 1
                if active == 1:
                    token, start = _next_run(part, base, end, offset, width)
                    if token == END:
                        # Separators come last: nothing else follows.
                        break
                    base = _run_end(part, start + width - 1, end, offset, token)
                    count = base - start
                    low = absent + start
                else:
                    token, count, low = _next_child(table, cursors, active, shares, offset, width)
                    if token == END:
                        break
                    if count < width:
                        continue
                    low += absent
                    start = 0
                row = tail
                slot = tail
                if tail == max_nodes:
                    row = tail - 1
                    slot = queue[row, SLOT]
                    if active > 1 and not _worse(queue, row, count, depth, low):
                        continue
                else:
                    tail += 1
                while row > head and _worse(queue, row - 1, count, depth, low):
                    for column in range(4):
                        queue[row, column] = queue[row - 1, column]
                    row -= 1
                queue[row, COUNT] = count
                queue[row, DEPTH] = depth
                queue[row, LOW] = low
                queue[row, SLOT] = slot
                links[slot, 0] = token
                links[slot, 1] = head - 1
                if parts > 1:
                    for s in range(parts):
                        slots[slot, s, 0] = slots[here, s, 0]
                        slots[slot, s, 1] = slots[here, s, 0]
                if active == 1:
                    slots[slot, cursors[0, PART], 0] = start
                    slots[slot, cursors[0, PART], 1] = base
                else:
                    for a in range(active):
                        slots[slot, cursors[a, PART], 0] = cursors[a, FROM]
                        slots[slot, cursors[a, PART], 1] = cursors[a, BASE]
        if head == tail:
            break
        here = queue[head, SLOT]
        node_tokens[head] = links[here, 0]
        parents[head] = links[here, 1]
        counts[head] = queue[head, COUNT]
        depth = queue[head, DEPTH]
        head += 1
        if head == max_nodes:
            break
    return node_tokens[:head], parents[:head], counts[:head]


@compiled
def _backoff_trees(table: Array, query: Array, max_depths: Array, max_nodes: Array, min_share: int) -> Any:
    """`backoff_trees`: the nodes of all trees, one after the other; of each tree its end, length and occurrences."""
    lengths, totals, ends = np.zeros(3, np.int64), np.zeros(3, np.int64), np.zeros(3, np.int64)
    room = max_nodes.sum()
    tokens, parents, counts = np.empty(room, np.int32), np.empty(room, np.int32), np.empty(room, np.int64)
    filled = 0
    longest = 0
    for number in range(3):
        size = query.size
        if number == 1:
            size = 0 if longest < 3 else min(max(2, longest // 2), 4)
        elif number == 2:
            size = 1 if longest > 1 else 0
        if size > 0:
            length, ranges = _longest_match(table, query[query.size - size :], 1)
            if number == 0:
                longest = length
            if length > 0:
                lengths[number] = length
                totals[number] = (ranges[:, 1] - ranges[:, 0]).sum()
                tree = _continuation_tree(table, length, ranges, max_depths[number], max_nodes[number], min_share)
                end = filled + len(tree[0])
                tokens[filled:end], parents[filled:end], counts[filled:end] = tree
                filled = end
        ends[number] = filled
    return (tokens, parents, counts), ends, lengths, totals
