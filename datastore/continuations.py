"""The counted tree of what follows all occurrences of a match.

Within the range of a match the occurrences that share one more token are a range again. Counts are therefore widths of
ranges, exact however many occurrences there are, and cost a few probes each.

Source: Z. He et al., "REST: Retrieval-Based Speculative Decoding", NAACL 2024, section 3 (tree of continuations by
frequency); here every occurrence is counted.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from specds.datastore.suffix_match import find_longest
from specds.datastore.suffix_parts import END, Array, Parts, Ranges, part_at
from specds.datastore.suffix_runs import BASE, FROM, HIGH, NEXT, PART, SHARE, UNKNOWN, next_child, next_run, run_end
from specds.jit import compiled, compiled_inside

Tree = tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.int64]]


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


# Columns of `Frontier.queue`.
COUNT, DEPTH, LOW, SLOT = range(4)


class Frontier(NamedTuple):
    """Nodes that were found and may still be taken, and the work space to find their children.

    No more are kept than can be taken: those taken stand first, so N rows do for a tree of N nodes.

    Attributes:
        queue: int64[N, 4], the nodes taken, then candidates, best first; COUNT, DEPTH, LOW and SLOT of each.
        links: int64[N, 2], the token and the parent of the node in each slot.
        slots: int64[N + 1, S, 2], its range in each part; the root's in the last slot.
        cursors: int64[S, 8], a row for each part that holds the node whose children are looked for.
    """

    queue: Array
    links: Array
    slots: Array
    cursors: Array


class Parent(NamedTuple):
    """The node whose children are looked for.

    Attributes:
        slot: where its ranges lie.
        number: its number in the tree; -1: the root.
        depth: its children's depth, in tokens.
        offset: tokens from the start of an occurrence to its children.
        active: parts that hold it.
        shares: the sum of their SHARE.
        absent: the sum of where its ranges start in the other parts.
        least: fewest occurrences of a node that is kept.
    """

    slot: int
    number: int
    depth: int
    offset: int
    active: int
    shares: int
    absent: int
    least: int


@compiled
def _worse(queue: Array, row: int, count: int, depth: int, low: int) -> bool:
    """Whether the entry of queue int64[N, 4] comes after a node (count, depth, low) in the order of
    `continuation_tree`.

    Nodes of one depth have disjoint ranges in the order of their paths, in each part, empty ranges included. So the
    sum of the starts of a node's ranges stands for its path: it is the start in one suffix array of all parts.
    """
    if queue[row, COUNT] != count:
        return bool(queue[row, COUNT] < count)
    if queue[row, DEPTH] != depth:
        return bool(queue[row, DEPTH] > depth)
    return bool(queue[row, LOW] > low)


@compiled_inside
def _occurrences(table: Array, length: int, ranges: Ranges) -> int:
    """How many there are in ranges int64[S, 2] of a match of `length` tokens; ValueError where it makes no sense."""
    total = 0
    longest = 0
    for s in range(table.shape[0]):
        _, _, n, ranks, _, _ = part_at(table, s)
        if not 0 <= ranges[s, 0] <= ranges[s, 1] <= ranks:
            raise ValueError("no range of the suffix array: ranges must be those of a match in these parts")
        total += ranges[s, 1] - ranges[s, 0]
        longest = max(longest, n)
    if not 0 <= length <= longest:
        raise ValueError("no match has this length: it is negative or above every text's")
    return total


@compiled_inside
def _parent(frontier: Frontier, slot: int, number: int, depth: int, length: int, least: int) -> Parent:
    """The node in a slot, at `depth` tokens, with a cursor on each part that holds it."""
    cursors, slots = frontier.cursors, frontier.slots
    active = 0
    shares = 0
    absent = 0
    for s in range(slots.shape[1]):
        low = slots[slot, s, 0]
        high = slots[slot, s, 1]
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
    return Parent(slot, number, depth + 1, length + depth, active, shares, absent, least)


@compiled_inside
def _least_width(queue: Array, tail: int, least: int, depth: int, low: int) -> int:
    """The fewest occurrences, `least` or more, that a node (depth, low) must have to be kept in queue int64[N, 4]."""
    width = least
    if tail == len(queue):
        width = max(width, queue[tail - 1, COUNT])
        if not _worse(queue, tail - 1, width, depth, low):
            width += 1
    return width


@compiled_inside
def _enqueue(queue: Array, head: int, tail: int, count: int, depth: int, low: int) -> int:
    """Put a candidate among those in rows [head, tail) of queue int64[N, 4], where it belongs; its slot.

    Where the queue is full, the last one leaves, which must be worse, and the slot was its.
    """
    row = tail
    slot = tail
    if tail == len(queue):
        row = tail - 1
        slot = queue[row, SLOT]
    while row > head and _worse(queue, row - 1, count, depth, low):
        for column in range(4):
            queue[row, column] = queue[row - 1, column]
        row -= 1
    queue[row, COUNT] = count
    queue[row, DEPTH] = depth
    queue[row, LOW] = low
    queue[row, SLOT] = slot
    return slot


@compiled_inside
def _expand_in_one(table: Array, frontier: Frontier, tail: int, parent: Parent) -> int:
    """Queue the children of a node that lies in one part of table int64[S, 6], as most do; the queue's new end."""
    queue, links, slots, cursors = frontier.queue, frontier.links, frontier.slots, frontier.cursors
    s = cursors[0, PART]
    part = part_at(table, s)
    base = cursors[0, BASE]
    end = cursors[0, HIGH]
    while True:
        width = _least_width(queue, tail, parent.least, parent.depth, parent.absent + base)
        token, start = next_run(part, base, end, parent.offset, width)
        if token == END:
            # Separators come last: nothing else follows.
            return tail
        base = run_end(part, start + width - 1, end, parent.offset, token)
        slot = _enqueue(queue, parent.number + 1, tail, base - start, parent.depth, parent.absent + start)
        links[slot, 0] = token
        links[slot, 1] = parent.number
        for other in range(slots.shape[1]):
            slots[slot, other, 0] = slots[parent.slot, other, 0]
            slots[slot, other, 1] = slots[parent.slot, other, 0]
        slots[slot, s, 0] = start
        slots[slot, s, 1] = base
        tail = min(tail + 1, len(queue))


@compiled_inside
def _expand_in_several(table: Array, frontier: Frontier, tail: int, parent: Parent) -> int:
    """Queue the children of a node that lies in several parts of table int64[S, 6]; the queue's new end."""
    queue, links, slots, cursors = frontier.queue, frontier.links, frontier.slots, frontier.cursors
    while True:
        low = parent.absent
        for a in range(parent.active):
            low += cursors[a, BASE]
        width = _least_width(queue, tail, parent.least, parent.depth, low)
        token, count, starts = next_child(table, cursors, parent.active, parent.shares, parent.offset, width)
        if token == END:
            return tail
        low = parent.absent + starts
        if count < width or (tail == len(queue) and not _worse(queue, tail - 1, count, parent.depth, low)):
            continue
        slot = _enqueue(queue, parent.number + 1, tail, count, parent.depth, low)
        links[slot, 0] = token
        links[slot, 1] = parent.number
        for other in range(slots.shape[1]):
            slots[slot, other, 0] = slots[parent.slot, other, 0]
            slots[slot, other, 1] = slots[parent.slot, other, 0]
        for a in range(parent.active):
            slots[slot, cursors[a, PART], 0] = cursors[a, FROM]
            slots[slot, cursors[a, PART], 1] = cursors[a, BASE]
        tail = min(tail + 1, len(queue))


@compiled
def _continuation_tree(
    table: Array, length: int, ranges: Ranges, max_depth: int, max_nodes: int, min_share: int
) -> Tree:
    """`continuation_tree` in the parts of table int64[S, 6]; ranges int64[S, 2]. Best-first: take a node, expand it."""
    parts = table.shape[0]
    total = _occurrences(table, length, ranges)
    # More nodes than this there cannot be: at each depth the ranges of the nodes are disjoint.
    max_nodes = max(0, min(max_nodes, max_depth * min(total, min_share)))
    node_tokens = np.empty(max_nodes, np.int32)
    parents = np.empty(max_nodes, np.int32)
    counts = np.empty(max_nodes, np.int64)
    if max_nodes == 0:
        return node_tokens, parents, counts
    least = -(-total // min_share)
    frontier = Frontier(
        np.empty((max_nodes, 4), np.int64),
        np.empty((max_nodes, 2), np.int64),
        np.empty((max_nodes + 1, parts, 2), np.int64),
        np.empty((parts, 8), np.int64),
    )
    slot = max_nodes
    for s in range(parts):
        frontier.slots[slot, s, 0] = ranges[s, 0]
        frontier.slots[slot, s, 1] = ranges[s, 1]
    # Nodes taken, and where the candidates after them end.
    head = 0
    tail = 0
    depth = 0
    while True:
        if depth < max_depth:
            parent = _parent(frontier, slot, head - 1, depth, length, least)
            if parent.active == 1:
                tail = _expand_in_one(table, frontier, tail, parent)
            else:
                tail = _expand_in_several(table, frontier, tail, parent)
        if head == tail:
            break
        slot = frontier.queue[head, SLOT]
        node_tokens[head] = frontier.links[slot, 0]
        parents[head] = frontier.links[slot, 1]
        counts[head] = frontier.queue[head, COUNT]
        depth = frontier.queue[head, DEPTH]
        head += 1
        if head == max_nodes:
            break
    return node_tokens[:head], parents[:head], counts[:head]


@compiled
def _backoff_trees(table: Array, query: Array, max_depths: Array, max_nodes: Array, min_share: int) -> Any:
    """`backoff_trees` of query int64[m] in the parts of table int64[S, 6]; max_depths and max_nodes int64[3].

    Returns:
        The nodes of all trees, one after the other: tokens int32[k], parents int32[k], counts int64[k]; and of each
        tree its end among them, its match's length and occurrences, each int64[3].
    """
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
            length, ranges = find_longest(table, query[query.size - size :], 1)
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
