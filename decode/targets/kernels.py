"""The CPU runtime's forward pass, run by several threads at once: every thread calls `forward` with its number.

All arrays are float32, flat or row-major. Matrices are packed in panels of LANES outputs, `[panel][input][lane]`;
keys lie in panels of LANES positions, `[panel][dimension][lane]`, values in panels of LANES dimensions,
`[panel][position][lane]`: so one inner loop serves projections, scores and attention. Every sum runs in an order
that does not depend on how many rows a pass has, on the draft's shape or on the number of threads.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import float32, int32, int64

from specds.decode.targets.microkernel import (
    LANES,
    LN2_HIGH,
    LN2_LOW,
    LOG2_E,
    POLYNOMIAL,
    ROWS,
    address,
    atomic_add,
    atomic_read,
    exponentials,
    float_of_bits,
    gate,
    give_way,
    largest,
    product,
)
from specds.jit import compiled

# Columns of the table of one layer's places in the flat weights; -1: the model has no such part.
QKV, OUT, GATE_UP, DOWN, QKV_BIAS, OUT_BIAS, NORM_IN, NORM_MLP, NORM_Q, NORM_K, WINDOW, CACHE = range(12)
FIELDS = 12

# Entries of the model's shape.
HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD, INNER, VOCABULARY, FINAL_NORM, HEAD_MATRIX, EMBEDDING = range(10)
SHAPE = 10

_SPINS = 2_000


@compiled
def barrier(door: Any, threads: int, turn: int) -> int:
    """Wait until all threads are here; returns the number of the next turn."""
    if threads > 1:
        atomic_add(door, 0, 1)
        spins = 0
        while atomic_read(door, 0) < threads * turn:
            spins += 1
            if spins > _SPINS:
                give_way()
    return turn + 1


@compiled
def open_door(door: Any) -> None:
    """Let everyone pass who waits at the barrier, now and later."""
    atomic_add(door, 0, 1 << 60)


@compiled
def share(count: int, thread: int, threads: int) -> tuple[int, int]:
    """This thread's part of `count` things: from, to."""
    return count * thread // threads, count * (thread + 1) // threads


@compiled
def even(rows: int) -> int:
    """Rows of a block where blocks are as few as can be, and all of about one size: small ones cost more a row."""
    blocks = max(1, (rows + ROWS - 1) // ROWS)
    return (rows + blocks - 1) // blocks


@compiled
def project(
    weights: Any, at: int, depth: int, first: int, last: int, rows: int, x: Any, x_stride: int, out: Any, stride: int
) -> None:
    """out[r, LANES·p + j] = x[r] · column j of panel p, for panels first … last - 1 of the matrix at `at`."""
    most = even(rows)
    for panel in range(first, last):
        matrix = address(weights, at + panel * depth * LANES)
        row = 0
        while row < rows:
            some = min(most, rows - row)
            place = address(out, row * stride + panel * LANES)
            product(some, matrix, address(x, row * x_stride), x_stride, depth, place, stride)
            row += some


@compiled
def exponential(x: float) -> float:
    """e^x for x ≤ 88, to two units in the last place; 0 far below."""
    x = max(x, float32(-87.0))
    whole = np.floor(x * float32(LOG2_E) + float32(0.5))
    rest = x - whole * float32(LN2_HIGH)
    rest = rest - whole * float32(LN2_LOW)
    value = float32(POLYNOMIAL[0])
    for term in POLYNOMIAL[1:]:
        value = value * rest + float32(term)
    value = value * rest * rest + rest + float32(1.0)
    power: float = value * float_of_bits((int32(whole) + int32(127)) << int32(23))
    return power


# Loops below run over slices from 0 on: an index that could be negative would keep LLVM from vectorising them.


@compiled
def normalise(x: Any, weights: Any, norm: int, epsilon: float, out: Any) -> None:
    """out = x / √(mean x² + ε) · weight, of one row (RMSNorm)."""
    width = len(x)
    a, b, c, d = 0.0, 0.0, 0.0, 0.0
    quarter = width // 4
    for column in range(quarter):
        one, two = float(x[column]), float(x[quarter + column])
        three, four = float(x[2 * quarter + column]), float(x[3 * quarter + column])
        a += one * one
        b += two * two
        c += three * three
        d += four * four
    for column in range(4 * quarter, width):
        a += float(x[column]) * float(x[column])
    factor = float32(1.0 / np.sqrt(((a + b) + (c + d)) / width + epsilon))
    weight = weights[norm : norm + width]
    for column in range(width):
        out[column] = weight[column] * (x[column] * factor)


@compiled
def rotate(x: Any, cosine: Any, sine: Any) -> None:
    """Rotary position embedding of one head in place; halves belong together, as in Llama."""
    half = len(x) // 2
    for column in range(half):
        low, high = x[column], x[half + column]
        x[column] = low * cosine[column] - high * sine[column]
        x[half + column] = high * cosine[half + column] + low * sine[half + column]


@compiled
def soften(scores: Any) -> None:
    """Softmax in place; the sum runs in four interleaved streams."""
    count = len(scores)
    blocks = count // LANES
    highest = largest(address(scores, 0), blocks) if blocks else scores[0]
    for key in range(blocks * LANES, count):
        highest = max(highest, scores[key])
    exponentials(address(scores, 0), blocks, highest)
    for key in range(blocks * LANES, count):
        scores[key] = exponential(scores[key] - highest)
    a, b, c, d = float32(0.0), float32(0.0), float32(0.0), float32(0.0)
    for key in range(0, count - 3, 4):
        a += scores[key]
        b += scores[key + 1]
        c += scores[key + 2]
        d += scores[key + 3]
    for key in range(count // 4 * 4, count):
        a += scores[key]
    factor = float32(1.0) / ((a + b) + (c + d))
    for key in range(count):
        scores[key] *= factor


@compiled
def add(x: Any, other: Any) -> None:
    """x += other."""
    for column in range(len(x)):
        x[column] += other[column]


@compiled
def add_panels(x: Any, other: Any, first: int, last: int, rows: int, stride: int) -> None:
    """x += other in panels first … last - 1 of every row."""
    for row in range(rows):
        low, high = row * stride + first * LANES, row * stride + last * LANES
        add(x[low:high], other[low:high])


@compiled
def attend(
    query: Any,
    rows: int,
    shared: int,
    first: int,
    last: int,
    head: int,
    keys: Any,
    keys_at: int,
    values: Any,
    values_at: int,
    room: int,
    start: int,
    lineage: Any,
    lows: Any,
    scores: Any,
    kept: Any,
    mixed: Any,
    out: Any,
    out_stride: int,
    column: int,
) -> None:
    """Attention of some query rows of one key-value head.

    Query row i is row i // shared of the pass, and one of `shared` heads. Row r sees the committed keys from lows[r] to
    start, and of the pass's own keys those in lineage[r], ascending, which ends with -1 or at its width.
    """
    panels = (start + rows + LANES - 1) // LANES
    block, most = first, even(last - first)
    while block < last:
        some = min(most, last - block)
        low = start
        for i in range(some):
            low = min(low, lows[(block + i) // shared])
        for panel in range(low // LANES, panels):
            place = address(keys, keys_at + panel * head * LANES)
            product(some, place, address(query, block * head), head, head, address(scores, panel * LANES), room)
        for i in range(some):
            row = (block + i) // shared
            line = scores[i * room : (i + 1) * room]
            tail, branch = line[start : start + rows], lineage[row]
            count = 0
            while count < rows and branch[count] >= 0:
                # Its own branch comes to stand where it would stand in the plain text.
                tail[count] = tail[branch[count]]
                count += 1
            soften(line[lows[row] : start + count])
            line[low : lows[row]] = float32(0.0)
            kept[:count] = tail[:count]
            tail[:] = float32(0.0)
            for key in range(count):
                tail[branch[key]] = kept[key]
        for panel in range((head + LANES - 1) // LANES):
            place = address(values, values_at + (panel * room + low) * LANES)
            product(some, place, address(scores, low), room, start + rows - low, address(mixed, 0), LANES)
            width = min(LANES, head - panel * LANES)
            for i in range(some):
                to = (block + i) // shared * out_stride + column + (block + i) % shared * head + panel * LANES
                out[to : to + width] = mixed[i * LANES : i * LANES + width]
        block += some


@compiled
def forward(
    thread: int,
    threads: int,
    door: Any,
    shape: Any,
    epsilon: float,
    weights: Any,
    table: Any,
    tokens: Any,
    lineage: Any,
    lows: Any,
    cosine: Any,
    sine: Any,
    start: int,
    asked: int,
    keys: Any,
    values: Any,
    room: int,
    x: Any,
    wide: Any,
    mixed: Any,
    own: Any,
    scores: Any,
    states: Any,
    tap: int,
    tapped: Any,
    logits: Any,
) -> None:
    """One pass over `tokens`, behind `start` committed ones; logits and final states of the last `asked` rows.

    Args:
        thread, threads, door: who this is, of how many, and their barrier (int64[1], 0 before the pass).
        shape, table: the model's sizes and where its parts lie in `weights`.
        tokens: int64[n].
        lineage: int32[n, n]: for each row its branch among the pass's rows, ascending, itself last, then -1.
        lows: int64[layers, n]: the first committed position that a row sees.
        cosine, sine: [n · head] rotary factors of each row's position.
        keys, values: [layers, key-value heads, room · padded head] caches; written at start … start + n - 1.
        x, wide, mixed: work space for n rows, shared: the residual stream, projections, attention's output.
        own: work space of each thread, [threads, …]; scores: [threads, ROWS · room].
        tap: a layer, 1 the first; 0: none. tapped: [n, hidden], the residual stream behind it, of all rows.
        states: [asked, hidden]; logits: [asked, padded vocabulary]: the results.
    """
    rows = len(tokens)
    hidden, heads, kv_heads, head = shape[HIDDEN], shape[HEADS], shape[KV_HEADS], shape[HEAD]
    inner = shape[INNER]
    shared = heads // kv_heads
    padded = (head + LANES - 1) // LANES * LANES
    stream = (hidden + LANES - 1) // LANES * LANES
    query_width, kv_width = heads * head, kv_heads * head
    qkv_width = (query_width + 2 * kv_width + LANES - 1) // LANES * LANES
    normed, scratch = own[thread], scores[thread]
    kept = int64(rows * stream)
    scale = float32(1.0 / np.sqrt(head))
    turn = 1

    first, last = share(rows, thread, threads)
    for row in range(first, last):
        token = tokens[row]
        place = shape[EMBEDDING] + token // LANES * hidden * LANES + token % LANES
        x[row * stream : row * stream + hidden] = weights[place : place + hidden * LANES : LANES]
    turn = barrier(door, threads, turn)

    for layer in range(shape[LAYERS]):
        at = table[layer]
        for row in range(rows):
            line = row * stream
            normalise(x[line : line + hidden], weights, at[NORM_IN], epsilon, normed[line : line + hidden])
        first, last = share(qkv_width // LANES, thread, threads)
        project(weights, at[QKV], hidden, first, last, rows, normed, stream, wide, qkv_width)
        if at[QKV_BIAS] >= 0:
            bias = weights[at[QKV_BIAS] + first * LANES : at[QKV_BIAS] + last * LANES]
            for row in range(rows):
                add(wide[row * qkv_width + first * LANES : row * qkv_width + last * LANES], bias)
        turn = barrier(door, threads, turn)

        # Rotate, and put keys and values into the cache: thread by (row, head).
        first, last = share(rows * kv_heads, thread, threads)
        cache = at[CACHE] * kv_heads
        for task in range(first, last):
            row, group = task // kv_heads, task % kv_heads
            position = start + row
            angle = row * head
            cos, sin = cosine[angle : angle + head], sine[angle : angle + head]
            line = wide[row * qkv_width : (row + 1) * qkv_width]
            key = line[query_width + group * head : query_width + (group + 1) * head]
            if at[NORM_K] >= 0:
                normalise(key, weights, at[NORM_K], epsilon, key)
            rotate(key, cos, sin)
            place = (cache + group) * room * head + position // LANES * head * LANES + position % LANES
            keys[place : place + head * LANES : LANES] = key
            value = line[query_width + kv_width + group * head : query_width + kv_width + (group + 1) * head]
            for panel in range(padded // LANES):
                place = (cache + group) * room * padded + (panel * room + position) * LANES
                part = value[panel * LANES : min(head, (panel + 1) * LANES)]
                values[place : place + len(part)] = part
            for one in range(shared):
                query = line[(group * shared + one) * head : (group * shared + one + 1) * head]
                if at[NORM_Q] >= 0:
                    normalise(query, weights, at[NORM_Q], epsilon, query)
                rotate(query, cos, sin)
                to = ((group * rows + row) * shared + one) * head
                scaled = mixed[to : to + head]
                for column in range(head):
                    scaled[column] = query[column] * scale
        turn = barrier(door, threads, turn)

        # Attention: thread by (key-value head, row, head). Its output goes where the queries were projected.
        first, last = share(rows * heads, thread, threads)
        for group in range(kv_heads):
            low = max(first, group * rows * shared)
            high = min(last, (group + 1) * rows * shared)
            if low < high:
                attend(
                    mixed[group * rows * shared * head :],
                    rows,
                    shared,
                    low - group * rows * shared,
                    high - group * rows * shared,
                    head,
                    keys,
                    (cache + group) * room * head,
                    values,
                    (cache + group) * room * padded,
                    room,
                    start,
                    lineage,
                    lows[layer],
                    scratch,
                    normed[kept:],
                    normed[kept + rows :],
                    wide,
                    qkv_width,
                    group * shared * head,
                )
        turn = barrier(door, threads, turn)

        first, last = share(stream // LANES, thread, threads)
        project(weights, at[OUT], query_width, first, last, rows, wide, qkv_width, mixed, stream)
        add_panels(x, mixed, first, last, rows, stream)
        if at[OUT_BIAS] >= 0:
            bias = weights[at[OUT_BIAS] + first * LANES : at[OUT_BIAS] + last * LANES]
            for row in range(rows):
                add(x[row * stream + first * LANES : row * stream + last * LANES], bias)
        turn = barrier(door, threads, turn)

        # Panels of gate and up lie side by side: SiLU(gate) · up is done before they leave the cache.
        for row in range(rows):
            line = row * stream
            normalise(x[line : line + hidden], weights, at[NORM_MLP], epsilon, normed[line : line + hidden])
        first, last = share(inner // LANES, thread, threads)
        for panel in range(first, last):
            project(weights, at[GATE_UP], hidden, 2 * panel, 2 * panel + 2, rows, normed, stream, wide, 2 * inner)
            for row in range(rows):
                both, to = 2 * (row * inner + panel * LANES), row * inner + panel * LANES
                gate(address(wide, both), address(mixed, to))
        turn = barrier(door, threads, turn)

        first, last = share(stream // LANES, thread, threads)
        project(weights, at[DOWN], inner, first, last, rows, mixed, inner, wide, stream)
        add_panels(x, wide, first, last, rows, stream)
        turn = barrier(door, threads, turn)
        if layer + 1 == tap:  # nobody writes to x before the barrier after next
            first, last = share(rows, thread, threads)
            for row in range(first, last):
                tapped[row] = x[row * stream : row * stream + hidden]

    for row in range(asked):
        line, to = (rows - asked + row) * stream, row * stream
        normalise(x[line : line + hidden], weights, shape[FINAL_NORM], epsilon, normed[to : to + hidden])
        if thread == 0:
            states[row] = normed[to : to + hidden]
    panels = (shape[VOCABULARY] + LANES - 1) // LANES
    first, last = share(panels, thread, threads)
    project(weights, shape[HEAD_MATRIX], hidden, first, last, asked, normed, stream, logits, panels * LANES)


@compiled
def compact(layers: int, kv_heads: int, head: int, keys: Any, values: Any, room: int, start: int, rows: Any) -> None:
    """Move the cache entries at start + rows[i] to start + i; rows ascend."""
    padded = (head + LANES - 1) // LANES * LANES
    for to in range(len(rows)):
        if rows[to] == to:
            continue
        old, new = start + rows[to], start + to
        for line in range(layers * kv_heads):
            source = line * room * head + old // LANES * head * LANES + old % LANES
            target = line * room * head + new // LANES * head * LANES + new % LANES
            for column in range(head):
                keys[target + column * LANES] = keys[source + column * LANES]
            for panel in range(padded // LANES):
                base = line * room * padded + panel * room * LANES
                for lane in range(LANES):
                    values[base + new * LANES + lane] = values[base + old * LANES + lane]
