"""One tree from every source: grown node by node, the likeliest first, until the next node does not pay for itself.

Each node asks every source what follows it, given the text and the path down to it (`sources/`): counts over the text
so far and over earlier answers, the trees of a store's suffix index, the rows of likeliest tokens that are kept, the
alternatives to the last token, the neighbours' continuations of a dense index, a draft model's chain. What they say of
one token becomes features of one node, and these its probability (`probability.py`, fitted in `acceptance.py`), moved
by how far the sources came true lately (`feedback.py`).

A child is never likelier to be accepted than its parent. So nodes come in the order of falling path probability, and
the first n of them are the n nodes with the largest sum; of all n the one of most expected tokens per second is taken.
Growth ends where no number of further nodes, each as likely as the next one, would raise that.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from specds.decode.auto.candidates import MOST_CANDIDATES, Candidates, Position, clear, new_candidates
from specds.decode.auto.features import AGREEMENT, DEPTH, ENTROPY, FEATURES, MARGIN
from specds.decode.auto.ngrams import ORDERS, REACH, hash_tail
from specds.decode.auto.probability import Ensemble, count_sources, probability
from specds.decode.auto.sources import Known, ask_sources
from specds.decode.auto.tries import TRIES, make_tries
from specds.decode.trie import find_child
from specds.jit import compiled, compiled_inside

MOST_NODES = 1024
"""Nodes looked at in a step, at most."""
_DEEPEST = 24
# Entries of `_Growth.sizes`.
_NODES, _QUEUED = 0, 1


class Limits(NamedTuple):
    """How far a tree grows.

    Attributes:
        cost: float64[most + 2]: entry n is what a step over n query tokens costs; entry 0 is not looked at.
        most: most nodes.
        least: nodes whose path is less probable are not gone into.
        gain: tokens that the pass is expected to give without this tree: 1 where the request is alone.
    """

    cost: NDArray[np.float64]
    most: int
    least: float
    gain: float = 1.0


class Grown(NamedTuple):
    """What `grow` has looked at: `count` nodes, in the order in which they were proposed.

    Attributes:
        tokens, parents, depths: int32[count]; a parent of -1 is the last committed token.
        chance: float64[count]: the probability that a node is accepted once its parent is, corrected.
        path: float64[count]: that it is accepted.
        sources: int32[count]: who proposed it, as bits.
        places: int32[count]: where in the text it was copied from; -1: from nowhere in it.
        features: float32[count, len(FEATURES)].
        order: int32[taken]: the nodes that growth went through, the likeliest first.
        chosen: how many of these make most expected tokens per second.
        expected: tokens that the request's step with these is expected to commit.
    """

    tokens: NDArray[np.int32]
    parents: NDArray[np.int32]
    depths: NDArray[np.int32]
    chance: NDArray[np.float64]
    path: NDArray[np.float64]
    sources: NDArray[np.int32]
    places: NDArray[np.int32]
    features: NDArray[np.float32]
    order: NDArray[np.int32]
    chosen: int
    expected: float


class _Growth(NamedTuple):
    """Work space of a tree of at most m = MOST_NODES nodes.

    Attributes:
        tokens, parents, depths, sources, places: int32[m], chance, path: float64[m], features: float32[m, …]: as in
            `Grown`.
        cursors: int32[m + 1, TRIES]: of each node its node in each trie; -1: not in it. The last row is the root's.
        heap: int64[m]: nodes that may be taken, the likeliest path first, of equals the one proposed first.
        sizes: int64[2]: how many nodes there are, and entries of the heap.
        tail: int64[REACH]: the last tokens down to a node, its own first.
        hashes, rows: uint64[len(ORDERS)] and int64[len(ORDERS)]: keys of these, and work space for their rows.
        odds: float64[MOST_CANDIDATES]: probabilities of siblings before they share 1.
        candidates: siblings to be.
    """

    tokens: NDArray[np.int32]
    parents: NDArray[np.int32]
    depths: NDArray[np.int32]
    sources: NDArray[np.int32]
    places: NDArray[np.int32]
    chance: NDArray[np.float64]
    path: NDArray[np.float64]
    features: NDArray[np.float32]
    cursors: NDArray[np.int32]
    heap: NDArray[np.int64]
    sizes: NDArray[np.int64]
    tail: NDArray[np.int64]
    hashes: NDArray[np.uint64]
    rows: NDArray[np.int64]
    odds: NDArray[np.float64]
    candidates: Candidates


@compiled
def _new_growth() -> Any:
    room = MOST_NODES
    growth = _Growth(
        np.empty(room, np.int32),
        np.empty(room, np.int32),
        np.empty(room, np.int32),
        np.empty(room, np.int32),
        np.empty(room, np.int32),
        np.empty(room),
        np.empty(room),
        np.empty((room, len(FEATURES)), np.float32),
        np.full((room + 1, TRIES), -1, np.int32),
        np.empty(room, np.int64),
        np.zeros(2, np.int64),
        np.empty(REACH, np.int64),
        np.empty(len(ORDERS), np.uint64),
        np.empty(len(ORDERS), np.int64),
        np.empty(MOST_CANDIDATES),
        new_candidates(),
    )
    for number in range(TRIES):
        growth.cursors[room, number] = number
    return growth


@compiled_inside
def _first(path: Any, node: int, other: int) -> bool:
    """Whether a node comes before another: its path is likelier, or as likely and it was proposed first."""
    before: bool = path[node] > path[other] or (path[node] == path[other] and node < other)
    return before


@compiled_inside
def _push(heap: Any, size: int, path: Any, node: int) -> None:
    """Into a heap of `size` entries, int64[m]; path: float64[m]."""
    at = size
    while at > 0:
        above = (at - 1) >> 1
        other = heap[above]
        if _first(path, other, node):
            break
        heap[at] = other
        at = above
    heap[at] = node


@compiled_inside
def _pop(heap: Any, size: int, path: Any) -> int:
    """The first of `size` entries, taken out."""
    first: int = heap[0]
    node = heap[size - 1]
    last = size - 1
    at = 0
    while 2 * at + 1 < last:
        below = 2 * at + 1
        if below + 1 < last and _first(path, heap[below + 1], heap[below]):
            below += 1
        child = heap[below]
        if _first(path, node, child):
            break
        heap[at] = child
        at = below
    heap[at] = node
    return first


@compiled_inside
def _hash_path(growth: Any, text: Any, node: int) -> int:
    """Keys of the last tokens down to a node, into `growth.hashes`; text: int64[length]. Returns how many."""
    tail = growth.tail
    length = 0
    at = node
    while at >= 0 and length < REACH:
        tail[length] = growth.tokens[at]
        length += 1
        at = growth.parents[at]
    back = len(text) - 1
    while back >= 0 and length < REACH:
        tail[length] = text[back]
        length += 1
        back -= 1
    return hash_tail(tail, length, growth.hashes)


@compiled_inside
def _add_children(growth: Any, node: int, position: Any, trie: Any, least: float) -> None:
    """Make nodes of the candidates, whose probabilities, if they sum up to more than 1, share it."""
    candidates = growth.candidates
    count, queued = growth.sizes[_NODES], growth.sizes[_QUEUED]
    above = 1.0 if node < 0 else growth.path[node]
    total = 0.0
    for row in range(candidates.size[0]):
        total += growth.odds[row]
    scale = 1.0 if total <= 1.0 else 1.0 / total
    for row in range(candidates.size[0]):
        token = candidates.tokens[row]
        for column in range(len(FEATURES)):
            growth.features[count, column] = candidates.features[row, column]
        growth.tokens[count], growth.parents[count], growth.depths[count] = token, node, position.depth
        growth.sources[count], growth.places[count] = candidates.sources[row], candidates.places[row]
        growth.chance[count] = growth.odds[row] * scale
        growth.path[count] = above * growth.chance[count]
        for number in range(TRIES):
            if position.cursors[number] >= 0:
                growth.cursors[count, number] = find_child(trie, position.cursors[number], token)
        if growth.path[count] > least:
            _push(growth.heap, queued, growth.path, count)
            queued += 1
        count += 1
    growth.sizes[_NODES], growth.sizes[_QUEUED] = count, queued


@compiled_inside
def _branch(growth: Any, node: int, text: Any, known: Any, tries: Any, model: Any, least: float) -> None:
    """Ask the sources what follows a node; -1: the text.

    Args:
        tries: `Tries` of `known.trees`.
        model: the ensemble and the offsets.
    """
    ensemble, offsets = model
    candidates = growth.candidates
    orders = _hash_path(growth, text, node)
    depth = 1 if node < 0 else growth.depths[node] + 1
    cursors = growth.cursors[MOST_NODES if node < 0 else node]
    position = Position(depth, growth.hashes, orders, cursors, growth.rows)
    clear(candidates)
    candidates.absent[DEPTH] = position.depth
    candidates.absent[MARGIN], candidates.absent[ENTROPY] = known.picked.margin, known.picked.entropy
    ask_sources(known, tries, position, candidates)
    for row in range(candidates.size[0]):
        features, sources = candidates.features[row], candidates.sources[row]
        features[AGREEMENT] = count_sources(sources)
        growth.odds[row] = probability(ensemble, offsets, features, sources, position.depth)
    _add_children(growth, node, position, tries.trie, least)


@compiled_inside
def _may_branch(growth: Any, node: int, least: float) -> bool:
    """Whether a node is to have children, and whether there is room for them."""
    if growth.sizes[_NODES] + MOST_CANDIDATES > MOST_NODES:
        return False
    return node < 0 or (growth.depths[node] < _DEEPEST and growth.path[node] > least)


@compiled_inside
def _could_pay(cost: Any, taken: int, most: int, gain: float, best: float, chance: float) -> bool:
    """Whether some number of further nodes, each of this chance, would give more tokens per second than the best."""
    more = 1
    while more <= most - taken and not gain + more * chance > best * cost[1 + taken + more]:
        more += 1
    return more <= most - taken


@compiled
def _grow(text: Any, known: Any, ensemble: Any, offsets: Any, limits: Any) -> Any:
    """`grow`, with `Grown` as a plain tuple."""
    cost, most, least, before = limits
    growth, tries = _new_growth(), make_tries(known.trees, known.similarity, known.margin)
    order = np.empty(max(most, 1), np.int32)
    taken, chosen = 0, 0
    gain, expected = before, 1.0
    best = before / cost[1]
    node = -1
    while True:
        if taken < most and _may_branch(growth, node, least):
            _branch(growth, node, text, known, tries, (ensemble, offsets), least)
        queued = growth.sizes[_QUEUED]
        if queued == 0 or taken >= most:
            break
        node = _pop(growth.heap, queued, growth.path)
        growth.sizes[_QUEUED] = queued - 1
        if not _could_pay(cost, taken, most, gain, best, growth.path[node]):
            break
        order[taken] = node
        taken += 1
        gain += growth.path[node]
        if gain / cost[1 + taken] > best:
            best = gain / cost[1 + taken]
            chosen, expected = taken, gain - before + 1.0
    count = growth.sizes[_NODES]
    return (
        growth.tokens[:count],
        growth.parents[:count],
        growth.depths[:count],
        growth.chance[:count],
        growth.path[:count],
        growth.sources[:count],
        growth.places[:count],
        growth.features[:count],
        order[:taken],
        chosen,
        expected,
    )


def grow(
    text: NDArray[np.int64],
    known: Known,
    ensemble: Ensemble,
    offsets: NDArray[np.float64],
    limits: Limits,
) -> Grown:
    """Grow the tree behind a text.

    Args:
        text: int64[length].
        known: what the sources know, and which are asked.
        ensemble: the probability of a node, as log-odds, of its features.
        offsets: float64[len(SOURCES), DEPTHS], added to the log-odds: of a node's sources the mean.
        limits: how far.
    """
    return Grown(*_grow(text, known, ensemble, offsets, limits))
