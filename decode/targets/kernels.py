"""The CPU runtime's forward pass, run by several threads at once: every thread calls `forward` with its number.

All arrays are float32, flat or row-major. Matrices are packed in panels of LANES outputs, `[panel][input][lane]`;
keys lie in panels of LANES positions, `[panel][dimension][lane]`, values in panels of LANES dimensions,
`[panel][position][lane]`: so one inner loop serves projections, scores and attention. Every sum runs in an order
that does not depend on how many rows a pass has, on the draft's shape or on the number of threads.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import float32, int32

from specds.decode.targets.layout import (
    CACHE,
    DOWN,
    EMBEDDING,
    FINAL_NORM,
    GATE_UP,
    HEAD,
    HEAD_MATRIX,
    HEADS,
    HIDDEN,
    INNER,
    KV_HEADS,
    LAYERS,
    NORM_IN,
    NORM_K,
    NORM_MLP,
    NORM_Q,
    OUT,
    OUT_BIAS,
    QKV,
    QKV_BIAS,
    VOCABULARY,
    Heads,
    Sizes,
)
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
from specds.jit import compiled, compiled_inside

_SPINS = 2_000


@compiled
def barrier(arrived: Any, threads: int, turn: int) -> int:
    """Wait until all threads are here; returns the number of the next turn.

    Args:
        arrived: int64[…], whose first entry counts arrivals since the beginning of the pass.
        turn: from 1, of this pass's barriers.
    """
    if threads > 1:
        atomic_add(arrived, 0, 1)
        spins = 0
        while atomic_read(arrived, 0) < threads * turn:
            spins += 1
            if spins > _SPINS:
                give_way()
    return turn + 1


@compiled
def release(arrived: Any) -> None:
    """Let everyone pass who waits at the barrier, now and later."""
    atomic_add(arrived, 0, 1 << 60)


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


@compiled_inside
def copy(source: Any, target: Any) -> None:
    """The numbers of one array into another that is as long."""
    for place in range(len(source)):
        target[place] = source[place]


@compiled_inside
def sizes_of(shape: Any) -> Any:
    """The `Sizes` of a model's shape, int64[SHAPE]."""
    hidden, heads, kv_heads, head = shape[HIDDEN], shape[HEADS], shape[KV_HEADS], shape[HEAD]
    query_width, kv_width = heads * head, kv_heads * head
    return Sizes(
        hidden,
        heads,
        kv_heads,
        head,
        shape[INNER],
        heads // kv_heads,
        (head + LANES - 1) // LANES * LANES,
        (hidden + LANES - 1) // LANES * LANES,
        query_width,
        kv_width,
        (query_width + 2 * kv_width + LANES - 1) // LANES * LANES,
    )


@compiled_inside
def gather_embeddings(worker: Any, sizes: Any, model: Any, tokens: Any, x: Any) -> None:
    """The embedding of each token, of this thread's rows, into the residual stream."""
    hidden = sizes.hidden
    first, last = share(len(tokens), worker.thread, worker.threads)
    for row in range(first, last):
        token = tokens[row]
        place = model.shape[EMBEDDING] + token // LANES * hidden * LANES + token % LANES
        line = row * sizes.stream
        copy(model.weights[place : place + hidden * LANES : LANES], x[line : line + hidden])


@compiled_inside
def normalise_rows(sizes: Any, model: Any, norm: int, rows: int, x: Any, normed: Any) -> None:
    """Every row of the residual stream, normalised by the weights at `norm`."""
    for row in range(rows):
        line = row * sizes.stream
        low, high = line, line + sizes.hidden
        normalise(x[low:high], model.weights, norm, model.epsilon, normed[low:high])


@compiled_inside
def add_bias(weights: Any, bias: int, first: int, last: int, rows: int, out: Any, stride: int) -> None:
    """out += the bias at `bias` in panels first … last - 1 of every row; nothing where there is none."""
    if bias >= 0:
        part = weights[bias + first * LANES : bias + last * LANES]
        for row in range(rows):
            add(out[row * stride + first * LANES : row * stride + last * LANES], part)


@compiled_inside
def project_queries(worker: Any, sizes: Any, model: Any, at: Any, rows: int, space: Any, normed: Any) -> None:
    """Queries, keys and values of all rows into `space.wide`, this thread's panels of them."""
    normalise_rows(sizes, model, at[NORM_IN], rows, space.x, normed)
    first, last = share(sizes.qkv_width // LANES, worker.thread, worker.threads)
    stride = sizes.qkv_width
    project(model.weights, at[QKV], sizes.hidden, first, last, rows, normed, sizes.stream, space.wide, stride)
    add_bias(model.weights, at[QKV_BIAS], first, last, rows, space.wide, stride)


@compiled_inside
def turn_queries(worker: Any, sizes: Any, model: Any, at: Any, run: Any, cache: Any, space: Any) -> None:
    """Rotate; keys and values go into the cache, scaled queries into `space.mixed`: thread by (row, head)."""
    rows, head, shared = len(run.tokens), sizes.head, sizes.shared
    scale = float32(1.0 / np.sqrt(head))
    first, last = share(rows * sizes.kv_heads, worker.thread, worker.threads)
    for task in range(first, last):
        row, group = task // sizes.kv_heads, task % sizes.kv_heads
        angle = row * head
        cosine, sine = run.cosine[angle : angle + head], run.sine[angle : angle + head]
        line = space.wide[row * sizes.qkv_width : (row + 1) * sizes.qkv_width]
        begin = sizes.query_width + group * head
        key, value = line[begin : begin + head], line[begin + sizes.kv_width : begin + sizes.kv_width + head]
        if at[NORM_K] >= 0:
            normalise(key, model.weights, at[NORM_K], model.epsilon, key)
        rotate(key, cosine, sine)
        store(sizes, cache, at[CACHE] * sizes.kv_heads + group, run.start + row, key, value)
        for number in range(shared):
            begin = (group * shared + number) * head
            query = line[begin : begin + head]
            if at[NORM_Q] >= 0:
                normalise(query, model.weights, at[NORM_Q], model.epsilon, query)
            rotate(query, cosine, sine)
            to = ((group * rows + row) * shared + number) * head
            scaled = space.mixed[to : to + head]
            for column in range(head):
                scaled[column] = query[column] * scale


@compiled_inside
def store(sizes: Any, cache: Any, line: int, position: int, key: Any, value: Any) -> None:
    """One head's key and value, float32[head] each, into the cache's line of a layer and head."""
    head, padded, room = sizes.head, sizes.padded, cache.room
    place = line * room * head + position // LANES * head * LANES + position % LANES
    copy(key, cache.keys[place : place + head * LANES : LANES])
    for panel in range(padded // LANES):
        place = line * room * padded + (panel * room + position) * LANES
        part = value[panel * LANES : min(head, (panel + 1) * LANES)]
        copy(part, cache.values[place : place + len(part)])


@compiled_inside
def attend_all(worker: Any, sizes: Any, cached: int, lows: Any, run: Any, cache: Any, space: Any) -> None:
    """Attention, thread by (key-value head, row, head); its output goes where the queries were projected.

    Args:
        cached: the layer's first line in the cache.
        lows: int64[n], of this layer.
    """
    each = len(run.tokens) * sizes.shared
    first, last = share(len(run.tokens) * sizes.heads, worker.thread, worker.threads)
    for group in range(sizes.kv_heads):
        low, high = max(first, group * each), min(last, (group + 1) * each)
        block, most = low - group * each, even(high - low)
        while block < high - group * each:
            some = min(most, high - group * each - block)
            attend(worker, sizes, Heads(group, cached + group, block, block + some), lows, run, cache, space)
            block += some


@compiled_inside
def attend(worker: Any, sizes: Any, heads: Any, lows: Any, run: Any, cache: Any, space: Any) -> None:
    """Attention of some query rows of one key-value head.

    Query row i is row i // shared of the pass, and one of `shared` heads. Row r sees the committed keys from lows[r] to
    start, and of the pass's own keys those in lineage[r], ascending, which ends with -1 or at its width.
    """
    rows, shared, head, room, start = len(run.tokens), sizes.shared, sizes.head, cache.room, run.start
    block, some = heads.first, heads.last - heads.first
    scores = space.scores[worker.thread]
    kept = space.own[worker.thread, rows * sizes.stream :]
    mixed = kept[rows:]
    panels = (start + rows + LANES - 1) // LANES
    low = start
    for i in range(some):
        low = min(low, lows[(block + i) // shared])
    query = address(space.mixed, (heads.group * rows * shared + block) * head)
    for panel in range(low // LANES, panels):
        place = address(cache.keys, (heads.cached * room + panel * LANES) * head)
        product(some, place, query, head, head, address(scores, panel * LANES), room)
    for i in range(some):
        row = (block + i) // shared
        weigh(scores[i * room : (i + 1) * room], low, lows[row], start, rows, run.lineage[row], kept)
    for panel in range((head + LANES - 1) // LANES):
        place = address(cache.values, heads.cached * room * sizes.padded + (panel * room + low) * LANES)
        product(some, place, address(scores, low), room, start + rows - low, address(mixed, 0), LANES)
        width = min(LANES, head - panel * LANES)
        for i in range(some):
            to = (block + i) // shared * sizes.qkv_width
            to += (heads.group * shared + (block + i) % shared) * head + panel * LANES
            copy(mixed[i * LANES : i * LANES + width], space.wide[to : to + width])


@compiled_inside
def weigh(line: Any, low: int, seen: int, start: int, rows: int, branch: Any, kept: Any) -> None:
    """Scores of one query row into attention weights, in place.

    Args:
        line: float32[room], scores of all positions from `low` on.
        low: where positions begin that other rows see.
        seen: the first one that this row sees.
        branch: int32[n], the pass's own rows that it sees, ascending, then -1.
        kept: work space for n numbers.
    """
    tail = line[start : start + rows]
    count = 0
    while count < rows and branch[count] >= 0:
        # Its own branch comes to stand where it would stand in the plain text.
        tail[count] = tail[branch[count]]
        count += 1
    soften(line[seen : start + count])
    line[low:seen] = float32(0.0)
    copy(tail[:count], kept[:count])
    tail[:] = float32(0.0)
    for key in range(count):
        tail[branch[key]] = kept[key]


@compiled_inside
def project_out(worker: Any, sizes: Any, model: Any, at: Any, rows: int, space: Any) -> None:
    """Attention's output, projected and added to the residual stream."""
    stream = sizes.stream
    first, last = share(stream // LANES, worker.thread, worker.threads)
    width, stride = sizes.query_width, sizes.qkv_width
    project(model.weights, at[OUT], width, first, last, rows, space.wide, stride, space.mixed, stream)
    add_panels(space.x, space.mixed, first, last, rows, stream)
    add_bias(model.weights, at[OUT_BIAS], first, last, rows, space.x, stream)


@compiled_inside
def project_inner(worker: Any, sizes: Any, model: Any, at: Any, rows: int, space: Any, normed: Any) -> None:
    """SiLU(gate) · up, whose panels lie side by side: it is done before they leave the cache."""
    inner = sizes.inner
    normalise_rows(sizes, model, at[NORM_MLP], rows, space.x, normed)
    first, last = share(inner // LANES, worker.thread, worker.threads)
    for panel in range(first, last):
        low, high, stride = 2 * panel, 2 * panel + 2, 2 * inner
        project(model.weights, at[GATE_UP], sizes.hidden, low, high, rows, normed, sizes.stream, space.wide, stride)
        for row in range(rows):
            to = row * inner + panel * LANES
            gate(address(space.wide, 2 * to), address(space.mixed, to))


@compiled_inside
def project_down(worker: Any, sizes: Any, model: Any, at: Any, rows: int, space: Any) -> None:
    """The inner values, projected and added to the residual stream."""
    inner, stream = sizes.inner, sizes.stream
    first, last = share(stream // LANES, worker.thread, worker.threads)
    project(model.weights, at[DOWN], inner, first, last, rows, space.mixed, inner, space.wide, stream)
    add_panels(space.x, space.wide, first, last, rows, stream)


@compiled_inside
def project_logits(worker: Any, sizes: Any, model: Any, run: Any, space: Any, results: Any) -> None:
    """Final states and logits of the last `run.asked` rows."""
    rows, asked, stream, hidden = len(run.tokens), run.asked, sizes.stream, sizes.hidden
    normed, weights = space.own[worker.thread], model.weights
    for row in range(asked):
        line, to = (rows - asked + row) * stream, row * stream
        normalise(
            space.x[line : line + hidden], weights, model.shape[FINAL_NORM], model.epsilon, normed[to : to + hidden]
        )
        if worker.thread == 0:
            copy(normed[to : to + hidden], results.states[row])
    panels = (model.shape[VOCABULARY] + LANES - 1) // LANES
    first, last = share(panels, worker.thread, worker.threads)
    at, stride = model.shape[HEAD_MATRIX], panels * LANES
    project(weights, at, hidden, first, last, asked, normed, stream, results.logits, stride)


@compiled
def forward(worker: Any, arrived: Any, model: Any, run: Any, cache: Any, space: Any, results: Any) -> None:
    """One pass over a `Run`'s tokens; logits and final states of its last rows.

    Args:
        worker: `Worker`.
        arrived: int64[…], for `barrier`: 0 before the pass.
        model: `Model`.
        run: `Run`.
        cache: `Cache`.
        space: `Space`.
        results: `Results`.
    """
    rows, sizes = len(run.tokens), sizes_of(model.shape)
    x, normed, threads = space.x, space.own[worker.thread], worker.threads
    gather_embeddings(worker, sizes, model, run.tokens, x)
    turn = barrier(arrived, threads, 1)
    for layer in range(model.shape[LAYERS]):
        at = model.table[layer]
        project_queries(worker, sizes, model, at, rows, space, normed)
        turn = barrier(arrived, threads, turn)
        turn_queries(worker, sizes, model, at, run, cache, space)
        turn = barrier(arrived, threads, turn)
        attend_all(worker, sizes, at[CACHE] * sizes.kv_heads, run.lows[layer], run, cache, space)
        turn = barrier(arrived, threads, turn)
        project_out(worker, sizes, model, at, rows, space)
        turn = barrier(arrived, threads, turn)
        project_inner(worker, sizes, model, at, rows, space, normed)
        turn = barrier(arrived, threads, turn)
        project_down(worker, sizes, model, at, rows, space)
        turn = barrier(arrived, threads, turn)
        if layer + 1 == run.layer:  # nobody writes to x before the barrier after next
            first, last = share(rows, worker.thread, threads)
            for row in range(first, last):
                line = row * sizes.stream
                copy(x[line : line + sizes.hidden], results.captured[row])
    project_logits(worker, sizes, model, run, space, results)


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
