"""Attention of the CPU runtime: each item's query rows over the pages of its own slot.

Keys lie in panels of LANES positions, values in panels of LANES dimensions (see `layout.Cache`), so that the inner loop
of projections serves scores and sums of values, too. A query row's sums run over its positions in ascending order, page
after page, whatever stands beside it.
"""

from __future__ import annotations

from typing import Any

from numba import float32

from specds.decode.targets.elementwise import copy, finite, soften
from specds.decode.targets.layout import Heads
from specds.decode.targets.microkernel import LANES, ROWS, address, product
from specds.decode.targets.pages import PAGE
from specds.jit import compiled, compiled_inside

_PANELS = PAGE // LANES


@compiled
def even(rows: int) -> int:
    """Rows of a block where blocks are as few as can be, and all of about one size: small ones cost more a row."""
    blocks = max(1, (rows + ROWS - 1) // ROWS)
    return (rows + blocks - 1) // blocks


@compiled_inside
def store(sizes: Any, cache: Any, page: int, line: int, place: int, key: Any, value: Any) -> None:
    """One head's key and value, float32[head] each, into a page's line of a layer and head.

    A value that is not finite becomes one: rows that do not see it weigh it with 0, which must give 0. Whoever sees it
    is not saved: its own row, and its key, are what they are.

    Args:
        sizes: `Sizes`.
        cache: `Cache`.
        place: of the token in its page.
    """
    head, padded = sizes.head, sizes.padded
    at = (page * cache.lines + line) * PAGE * head + place // LANES * head * LANES + place % LANES
    copy(key, cache.keys[at : at + head * LANES : LANES])
    for panel in range(padded // LANES):
        at = (page * cache.lines + line) * PAGE * padded + (panel * PAGE + place) * LANES
        part = value[panel * LANES : min(head, (panel + 1) * LANES)]
        for lane in range(len(part)):
            cache.values[at + lane] = finite(part[lane])


@compiled_inside
def attend_all(worker: Any, sizes: Any, cached: int, lows: Any, run: Any, cache: Any, space: Any) -> None:
    """This thread's part of attention; its output goes where the queries were projected.

    Args:
        cached: the layer's first line of the cache.
        lows: int64[n], of this layer.
    """
    item, first = run.bounds[worker.thread, 0], run.bounds[worker.thread, 1]
    end, last = run.bounds[worker.thread + 1, 0], run.bounds[worker.thread + 1, 1]
    while item < end or (item == end and first < last):
        each = (run.first[item + 1] - run.first[item]) * sizes.shared
        stop = last if item == end else each * sizes.kv_heads
        for group in range(first // each, sizes.kv_heads):
            low, high = max(first - group * each, 0), min(stop - group * each, each)
            most = even(max(high - low, 1))
            while low < high:
                some = min(most, high - low)
                attend(worker, sizes, Heads(item, group, cached + group, low, low + some), lows, run, cache, space)
                low += some
        item += 1
        first = 0


@compiled_inside
def attend(worker: Any, sizes: Any, heads: Any, lows: Any, run: Any, cache: Any, space: Any) -> None:
    """Attention of some query rows of one item and key-value head.

    Query row i is row i // shared of the item, and one of `shared` heads. Row r sees the held tokens from lows[r] on,
    and of the item's own those of its branch.
    """
    shared, head, room = sizes.shared, sizes.head, space.room
    base, rows = run.first[heads.item], run.first[heads.item + 1] - run.first[heads.item]
    start, pages = run.starts[heads.item], cache.table[run.lines[heads.item]]
    block, some = heads.first, heads.last - heads.first
    scores = space.scores[worker.thread]
    kept = space.own[worker.thread, len(run.tokens) * sizes.stream :]
    mixed = kept[len(run.tokens) :]
    low = start
    for i in range(some):
        low = min(low, lows[base + (block + i) // shared])
    query = address(space.mixed, ((heads.group * len(run.tokens) + base) * shared + block) * head)
    for panel in range(low // LANES, (start + rows + LANES - 1) // LANES):
        line = (pages[panel // _PANELS] * cache.lines + heads.cached) * PAGE
        place = address(cache.keys, (line + panel % _PANELS * LANES) * head)
        product(some, place, query, head, head, address(scores, panel * LANES), room, 0)
    for i in range(some):
        row = (block + i) // shared
        line = scores[i * room : (i + 1) * room]
        weigh(line, low, lows[base + row], start, rows, row, run.lineage[base + row], kept)
    for panel in range(sizes.padded // LANES):
        begin = low
        while begin < start + rows:
            page = begin // PAGE
            until = min(start + rows, (page + 1) * PAGE)
            line = (pages[page] * cache.lines + heads.cached) * PAGE * sizes.padded
            place = address(cache.values, line + (panel * PAGE + begin % PAGE) * LANES)
            out = address(mixed, 0)
            product(some, place, address(scores, begin), room, until - begin, out, LANES, begin - low)
            begin = until
        width = min(LANES, head - panel * LANES)
        for i in range(some):
            to = (base + (block + i) // shared) * sizes.qkv_width
            to += (heads.group * shared + (block + i) % shared) * head + panel * LANES
            copy(mixed[i * LANES : i * LANES + width], space.wide[to : to + width])


@compiled_inside
def weigh(line: Any, low: int, seen: int, start: int, rows: int, row: int, branch: Any, kept: Any) -> None:
    """Scores of one query row into attention weights, in place.

    Args:
        line: float32[room], scores of all positions from `low` on.
        low: where positions begin that other rows see.
        seen: the first one that this row sees.
        start: tokens that the slot holds.
        rows: of the item, of which this is number `row`.
        branch: int32[w], the item's own rows that it sees, ascending, then -1; -1 at once: all up to itself.
        kept: work space for n numbers.
    """
    tail = line[start : start + rows]
    count = 0
    if branch[0] < 0:
        count = row + 1
        soften(line[seen : start + count])
        line[low:seen] = float32(0.0)
        tail[count:] = float32(0.0)
    else:
        while count < len(branch) and branch[count] >= 0:
            # Its own branch comes to stand where it would stand in the plain text.
            tail[count] = tail[branch[count]]
            count += 1
        soften(line[seen : start + count])
        line[low:seen] = float32(0.0)
        copy(tail[:count], kept[:count])
        tail[:] = float32(0.0)
        for key in range(count):
            tail[branch[key]] = kept[key]


@compiled
def move(cache: Any, sizes: Any, pages: Any, start: int, rows: Any) -> None:
    """Move what a slot's cache holds at start + rows[i] to start + i; rows, int64[m], ascend.

    Args:
        cache: `Cache`.
        sizes: int64[2]: head, and padded head.
        pages: int32[…], of the slot.
    """
    head, padded = sizes[0], sizes[1]
    for to in range(len(rows)):
        if rows[to] == to:
            continue
        old, new = start + rows[to], start + to
        for line in range(cache.lines):
            source = (pages[old // PAGE] * cache.lines + line) * PAGE
            target = (pages[new // PAGE] * cache.lines + line) * PAGE
            a = source * head + old % PAGE // LANES * head * LANES + old % LANES
            b = target * head + new % PAGE // LANES * head * LANES + new % LANES
            for column in range(head):
                cache.keys[b + column * LANES] = cache.keys[a + column * LANES]
            for panel in range(padded // LANES):
                a = source * padded + (panel * PAGE + old % PAGE) * LANES
                b = target * padded + (panel * PAGE + new % PAGE) * LANES
                for lane in range(LANES):
                    cache.values[b + lane] = cache.values[a + lane]


@compiled
def branches(parents: Any, first: Any, lineage: Any, depths: Any) -> None:
    """Each row's depth in its item, from 0, and its branch, as `Run.lineage` has them.

    Args:
        parents: int64[n], of each row its parent among the item's rows, or -1.
        first: int64[m + 1], where items begin.
        lineage: int32[n, w], all -1; w: rows of the widest item that is no chain.
        depths: int64[n].
    """
    for item in range(len(first) - 1):
        base, rows = first[item], first[item + 1] - first[item]
        chain = True
        for row in range(rows):
            chain = chain and parents[base + row] == row - 1
        for row in range(rows):
            parent = parents[base + row]
            depth = depths[base + row] = 0 if parent < 0 else depths[base + parent] + 1
            if not chain:
                for at in range(depth):
                    lineage[base + row, at] = lineage[base + parent, at]
                lineage[base + row, depth] = row


@compiled
def widest(parents: Any, first: Any) -> int:
    """Rows of the widest item that is no chain, at least 1; arguments as those of `branches`."""
    most = 1
    for item in range(len(first) - 1):
        for row in range(first[item], first[item + 1]):
            if parents[row] != row - first[item] - 1:
                most = max(most, first[item + 1] - first[item])
                break
    return most


@compiled
def share_attention(first: Any, starts: Any, heads: int, bounds: Any) -> None:
    """Where each thread's part of attention begins, as `Run.bounds`: parts of about as many positions looked at.

    Args:
        first, starts: int64[m + 1] and int64[m], as in `Run`.
        heads: query heads.
        bounds: int64[threads + 1, 2].
    """
    threads, items = len(bounds) - 1, len(starts)
    total = 0.0
    for item in range(items):
        rows = first[item + 1] - first[item]
        total += rows * heads * float(starts[item] + rows)
    so_far, item, used = 0.0, 0, 0
    for thread in range(threads + 1):
        goal = total * thread / threads
        while item < items:
            rows = first[item + 1] - first[item]
            each = float(starts[item] + rows)
            left = rows * heads - used
            if so_far + left * each > goal:
                some = int((goal - so_far) / each)
                used += some
                so_far += some * each
                break
            so_far += left * each
            item += 1
            used = 0
        bounds[thread, 0], bounds[thread, 1] = item, used
    bounds[threads, 0], bounds[threads, 1] = items, 0
