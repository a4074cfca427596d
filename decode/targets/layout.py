"""What the CPU runtime's kernels are handed: where the parts of a model lie, and the NamedTuples of a pass."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

# Columns of the table of one layer's places in the flat weights; -1: the model has no such part.
QKV, OUT, GATE_UP, DOWN, QKV_BIAS, OUT_BIAS, NORM_IN, NORM_MLP, NORM_Q, NORM_K, WINDOW, CACHE = range(12)
FIELDS = 12

# Entries of the model's shape.
HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD, INNER, VOCABULARY, FINAL_NORM, HEAD_MATRIX, EMBEDDING = range(10)
SHAPE = 10


class Worker(NamedTuple):
    """Which of the threads of a pass this is, and of how many."""

    thread: int
    threads: int


class Model(NamedTuple):
    """All that the kernels read of a model.

    Attributes:
        weights: float32, every matrix in panels of LANES outputs, and every norm and bias.
        shape: int64[SHAPE], sizes and places.
        table: int64[layers, FIELDS], each layer's places in the weights; -1 where there is none.
        epsilon: of the norms.
    """

    weights: NDArray[np.float32]
    shape: NDArray[np.int64]
    table: NDArray[np.int64]
    epsilon: float


class Run(NamedTuple):
    """One pass over n tokens of m items, those of an item side by side.

    Attributes:
        tokens: int64[n].
        first: int64[m + 1], ascending from 0: the rows of item i are first[i] … first[i + 1] - 1.
        starts: int64[m]: tokens that the item's slot holds.
        lines: int64[m]: its line in the table of pages.
        lineage: int32[n, w]: of each row its branch among the item's rows, counted from 0, ascending, itself last, then
            -1. Of a row of a chain, whose branch is all rows up to it, -1 from the beginning.
        lows: int64[layers, n]: the first held token that a row sees.
        cosine, sine: float32[n · head], rotary factors of each row's position.
        wanted: int64[k]: rows of which logits are wanted.
        bounds: int64[threads + 1, 2]: where each thread's part of attention begins: an item, and which of its query
            rows (key-value head by key-value head, row by row, head by head).
        layer: the one whose residual stream is captured, 1 the first; 0: none.
    """

    tokens: NDArray[np.int64]
    first: NDArray[np.int64]
    starts: NDArray[np.int64]
    lines: NDArray[np.int64]
    lineage: NDArray[np.int32]
    lows: NDArray[np.int64]
    cosine: NDArray[np.float32]
    sine: NDArray[np.float32]
    wanted: NDArray[np.int64]
    bounds: NDArray[np.int64]
    layer: int


class Cache(NamedTuple):
    """Keys and values, page by page; in a page, line by line of layers · key-value heads.

    Attributes:
        keys: float32[pages · lines · PAGE · head], in panels of LANES positions, `[panel][dimension][lane]`.
        values: float32[pages · lines · PAGE · padded head], in panels of LANES dimensions, `[panel][position][lane]`.
        table: int32[slots, …]: the pages of each slot, in order.
        lines: layers · key-value heads.
    """

    keys: NDArray[np.float32]
    values: NDArray[np.float32]
    table: NDArray[np.int32]
    lines: int


class Space(NamedTuple):
    """Work space for passes of n rows at most.

    Attributes:
        x, wide, mixed: float32, shared by all threads: the residual stream, projections, attention's output.
        own: float32[threads, …]: each thread's normalised rows, and what attention keeps.
        scores: float32[threads, ROWS · room], of `room` positions.
    """

    x: NDArray[np.float32]
    wide: NDArray[np.float32]
    mixed: NDArray[np.float32]
    own: NDArray[np.float32]
    scores: NDArray[np.float32]
    room: int


class Results(NamedTuple):
    """Where a pass puts what it found.

    Attributes:
        states: float32[k, hidden], final-normed, of the rows that are wanted.
        captured: float32[n, hidden], the residual stream after the captured layer; float32[0, hidden] for none.
        logits: float32[k · padded vocabulary]; float32[0]: nobody wants them.
    """

    states: NDArray[np.float32]
    captured: NDArray[np.float32]
    logits: NDArray[np.float32]


class Sizes(NamedTuple):
    """Numbers of a model: `shared` query heads to a key-value head; `padded` and `stream` are whole panels."""

    hidden: int
    heads: int
    kv_heads: int
    head: int
    inner: int
    shared: int
    padded: int
    stream: int
    query_width: int
    kv_width: int
    qkv_width: int


class Heads(NamedTuple):
    """Query rows first … last - 1 of an item and a key-value head, whose keys stand in the cache's line `cached`."""

    item: int
    group: int
    cached: int
    first: int
    last: int
