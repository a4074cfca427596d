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
    """One pass over n tokens, after `start` committed ones.

    Attributes:
        tokens: int64[n].
        lineage: int32[n, n]: for each row its branch among the pass's rows, ascending, itself last, then -1.
        lows: int64[layers, n]: the first committed position that a row sees.
        cosine, sine: float32[n · head], rotary factors of each row's position.
        start: committed tokens.
        asked: of how many rows, the last ones, logits are wanted.
        layer: the one whose residual stream is captured, 1 the first; 0: none.
    """

    tokens: NDArray[np.int64]
    lineage: NDArray[np.int32]
    lows: NDArray[np.int64]
    cosine: NDArray[np.float32]
    sine: NDArray[np.float32]
    start: int
    asked: int
    layer: int


class Cache(NamedTuple):
    """Keys and values of `room` positions.

    Attributes:
        keys: float32[layers · key-value heads · room · head].
        values: float32[layers · key-value heads · room · padded head].
    """

    keys: NDArray[np.float32]
    values: NDArray[np.float32]
    room: int


class Space(NamedTuple):
    """Work space for passes of n rows at most.

    Attributes:
        x, wide, mixed: float32, shared by all threads: the residual stream, projections, attention's output.
        own: float32[threads, …]: each thread's normalised rows, and what attention keeps.
        scores: float32[threads, ROWS · room].
    """

    x: NDArray[np.float32]
    wide: NDArray[np.float32]
    mixed: NDArray[np.float32]
    own: NDArray[np.float32]
    scores: NDArray[np.float32]


class Results(NamedTuple):
    """Where a pass puts what it found.

    Attributes:
        states: float32[asked, hidden], final-normed.
        captured: float32[n, hidden], the residual stream after the captured layer; float32[0, hidden] for none.
        logits: float32[asked · padded vocabulary].
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
    """Query rows first … last - 1 of a key-value head, whose keys stand in the cache's line `cached`."""

    group: int
    cached: int
    first: int
    last: int
