"""The CPU runtime's forward pass, run by several threads at once: every thread calls `forward` with its number.

All arrays are float32, flat or row-major. Matrices are packed in panels of LANES outputs, `[panel][input][lane]`;
keys lie in panels of LANES positions, `[panel][dimension][lane]`, values in panels of LANES dimensions,
`[panel][position][lane]`: so one inner loop serves projections, scores and attention. Every sum runs in an order
that does not depend on how many rows a pass has, on the draft's shape or on the number of threads.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import float32

from specds.decode.targets.attention import attend_all, even, store
from specds.decode.targets.elementwise import add, add_panels, copy, normalise, rotate
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
    Sizes,
)
from specds.decode.targets.microkernel import (
    LANES,
    address,
    atomic_add,
    atomic_read,
    gate,
    give_way,
    product,
)
from specds.decode.targets.pages import PAGE
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
            product(some, matrix, address(x, row * x_stride), x_stride, depth, place, stride, 0)
            row += some


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
    item = 0
    for task in range(first, last):
        row, group = task // sizes.kv_heads, task % sizes.kv_heads
        while run.first[item + 1] <= row:
            item += 1
        angle = row * head
        cosine, sine = run.cosine[angle : angle + head], run.sine[angle : angle + head]
        line = space.wide[row * sizes.qkv_width : (row + 1) * sizes.qkv_width]
        begin = sizes.query_width + group * head
        key, value = line[begin : begin + head], line[begin + sizes.kv_width : begin + sizes.kv_width + head]
        if at[NORM_K] >= 0:
            normalise(key, model.weights, at[NORM_K], model.epsilon, key)
        rotate(key, cosine, sine)
        place = run.starts[item] + row - run.first[item]
        page = cache.table[run.lines[item], place // PAGE]
        store(sizes, cache, page, at[CACHE] * sizes.kv_heads + group, place % PAGE, key, value)
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
    """Final states and logits of the rows that are wanted."""
    asked, stream, hidden = len(run.wanted), sizes.stream, sizes.hidden
    normed, weights = space.own[worker.thread], model.weights
    for number in range(asked):
        line, to = run.wanted[number] * stream, number * stream
        normalise(
            space.x[line : line + hidden], weights, model.shape[FINAL_NORM], model.epsilon, normed[to : to + hidden]
        )
        if worker.thread == 0:
            copy(normed[to : to + hidden], results.states[number])
    if not len(results.logits):
        return
    panels = (model.shape[VOCABULARY] + LANES - 1) // LANES
    first, last = share(panels, worker.thread, worker.threads)
    at, stride = model.shape[HEAD_MATRIX], panels * LANES
    project(weights, at, hidden, first, last, asked, normed, stream, results.logits, stride)


@compiled
def forward(worker: Any, arrived: Any, model: Any, run: Any, cache: Any, space: Any, results: Any) -> None:
    """One pass over a `Run`'s tokens; logits and final states of the rows that are wanted.

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
