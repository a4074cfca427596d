"""One tree from every source: grown node by node, the likeliest first, until the next node is not worth its row.

Each node asks every source what follows it, given the text and the path down to it: counts over the text so far and
over earlier answers, the trees of a store's suffix index, the rows of likeliest tokens that are kept, the runners-up
for the last token, the neighbours' continuations of a dense index, a draft model's chain. What they say of one token
becomes features of one node, and these its probability (`acceptance.py`), moved by what the sources were worth lately
(`feedback.py`).

A child is never likelier to be accepted than its parent. So nodes come in the order of falling path probability, and
the first n of them are the n nodes with the largest sum; of all n the one of most expected tokens per second is taken.
Growth ends where no number of further nodes, each as likely as the next one, would raise that.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from specds.decode.auto.ngrams import (
    COUNTS,
    KEPT,
    ORDERS,
    PLACES,
    REACH,
    RECENT,
    TOKENS,
    TOTAL,
    WIDTH,
    find_row,
    hash_tail,
)
from specds.decode.contracts import TOP
from specds.decode.draft import Source
from specds.jit import compiled

SOURCES = ("context", "session", "suffix", "recycling", "runners-up", "dense", "model")
"""What proposes tokens; a node's source is the set of those that proposed it, as bits."""
CONTEXT, SESSION, SUFFIX, RECYCLING, GUESS, DENSE, MODEL = range(7)
_COPIED = (1 << CONTEXT) | (1 << SESSION) | (1 << SUFFIX) | (1 << DENSE)

ORIGINS = tuple(
    Source(
        "+".join(name for bit, name in enumerate(SOURCES) if mask >> bit & 1),
        # What a session's or a store's text and the model agree on was copied, whoever else guessed it.
        retrieved=bool(mask & _COPIED),
    )
    for mask in range(1 << len(SOURCES))
)
"""The sources of nodes, by their bits."""

FEATURES = (
    "depth",
    "lead",
    "entropy",
    "context order",
    "context own order",
    "context share",
    "context count",
    "context recent",
    "session order",
    "session own order",
    "session share",
    "session count",
    "suffix length",
    "suffix share",
    "suffix count",
    "suffix second share",
    "suffix third share",
    "recycling order",
    "recycling rank",
    "recycling gap",
    "recycling lead",
    "runner-up rank",
    "runner-up gap",
    "dense share",
    "dense weight",
    "dense similarity",
    "dense margin",
    "model score",
    "agreement",
)
"""What a node's probability is made of. Depth counts from 1. Lead and entropy are those of the distribution that the
last token was picked from, by its TOP likeliest tokens. Orders are numbers of last tokens by which the source knows the
node's parent, or the node; shares are of the times that it did; -1: the source does not know the parent. Agreement is
how many sources proposed the node."""
(
    _DEPTH,
    _LEAD,
    _ENTROPY,
    _CONTEXT,
    _SESSION,
    _SUFFIX,
    _RECYCLING,
    _GUESS,
    _DENSE,
    _MODEL,
    _AGREEMENT,
) = 0, 1, 2, 3, 8, 12, 17, 21, 23, 27, 28

TRIES = 5
"""Trees asked for once a step: the suffix index's by its longest match, by a shorter one and by one token, the dense
index's, and the draft model's."""
SUFFIX_TRIES = 3
_DENSE_TRIE, _MODEL_TRIE = 3, 4

DEPTHS = 3
"""Corrections are kept for depths 1, 2 to 3, and more."""

MOST_NODES = 1024
"""Nodes looked at in a step, at most."""
_CANDIDATES = 16
_DEEPEST = 24
_COPIES, _RECYCLED, _GUESSES, _BRANCHES = 4, 5, 6, 6
_FURTHEST = 6.0
_SUREST = 0.985
_FAINTEST = 1e-4


class Known(NamedTuple):
    """What the counting sources know; see `Followers` and `Rows`."""

    context: NDArray[np.int32]
    session: NDArray[np.int32]
    keys: NDArray[np.int32]
    ids: NDArray[np.int32]
    gaps: NDArray[np.float32]


class Tries(NamedTuple):
    """The trees of one step, flattened: the first TRIES nodes are their roots.

    Attributes:
        token, child, sibling: int32[n]: of a node its token, its first child and its next sibling; -1: none.
        weight: float64[n]: counts, or for a draft model its probability of the node; 0 for the root of a tree that
            is not there.
        length: int64[TRIES]: tokens of the match that a suffix tree hangs on.
        similarity, margin: of the dense index's best neighbour, and by how much the second is less similar.
    """

    token: NDArray[np.int32]
    child: NDArray[np.int32]
    sibling: NDArray[np.int32]
    weight: NDArray[np.float64]
    length: NDArray[np.int64]
    similarity: float
    margin: float


class Ensemble(NamedTuple):
    """Regression trees over FEATURES, whose sum is a log-odds.

    Attributes:
        base: what is added to the sum.
        roots: int32[trees].
        feature: int32[n]: what a node asks; -1: it is a leaf.
        threshold: float32[n]: up to it the way goes left; of a leaf its value.
        left, right: int32[n].
    """

    base: float
    roots: NDArray[np.int32]
    feature: NDArray[np.int32]
    threshold: NDArray[np.float32]
    left: NDArray[np.int32]
    right: NDArray[np.int32]


class Grown(NamedTuple):
    """What `grow` has looked at: `count` nodes, in the order in which they were proposed.

    Attributes:
        tokens, parents, depths: int32[count]; a parent of -1 is the last committed token.
        chance: float64[count]: the probability that a node is accepted once its parent is, corrected.
        path: float64[count]: that it is accepted.
        mask: int32[count]: who proposed it, as bits.
        place: int32[count]: where in the text it was copied from; -1: from nowhere in it.
        features: float32[count, len(FEATURES)].
        order: int32[taken]: the nodes that growth went through, the likeliest first.
        chosen: how many of these make most expected tokens per second.
        expected: tokens that a step with these is expected to commit.
    """

    tokens: NDArray[np.int32]
    parents: NDArray[np.int32]
    depths: NDArray[np.int32]
    chance: NDArray[np.float64]
    path: NDArray[np.float64]
    mask: NDArray[np.int32]
    place: NDArray[np.int32]
    features: NDArray[np.float32]
    order: NDArray[np.int32]
    chosen: int
    expected: float


@compiled
def log_odds(ensemble: Any, row: Any) -> float:
    """What an ensemble says of a row of features."""
    base, roots, feature, threshold, left, right = ensemble
    total: float = base
    for tree in range(len(roots)):
        node = roots[tree]
        while feature[node] >= 0:
            node = left[node] if row[feature[node]] <= threshold[node] else right[node]
        total += threshold[node]
    return total


@compiled
def depth_bucket(depth: int) -> int:
    """Which of DEPTHS a depth, counted from 1, belongs to."""
    return 0 if depth <= 1 else 1 if depth <= 3 else 2


@compiled
def _push(heap: Any, size: int, path: Any, node: int) -> None:
    """Into a heap by falling path probability, of equals the one proposed first."""
    at = size
    while at > 0:
        above = (at - 1) >> 1
        other = heap[above]
        if path[other] > path[node] or (path[other] == path[node] and other < node):
            break
        heap[at] = other
        at = above
    heap[at] = node


@compiled
def _pop(heap: Any, size: int, path: Any) -> int:
    """The first of `size` entries, taken out."""
    first: int = heap[0]
    node = heap[size - 1]
    last = size - 1
    at = 0
    while 2 * at + 1 < last:
        below = 2 * at + 1
        if below + 1 < last:
            one, other = heap[below], heap[below + 1]
            if path[other] > path[one] or (path[other] == path[one] and other < one):
                below += 1
        child = heap[below]
        if path[node] > path[child] or (path[node] == path[child] and node < child):
            break
        heap[at] = child
        at = below
    heap[at] = node
    return first


@compiled
def _candidate(candidates: Any, block: Any, blank: Any, count: int, token: int) -> int:
    """The place of a token among the candidates, where it is put if it is new; -1 if there is no room."""
    for at in range(count):
        if candidates[at, 0] == token:
            return at
    if count == len(candidates):
        return -1
    candidates[count, 0] = token
    candidates[count, 1] = 0
    candidates[count, 2] = -1
    block[count] = blank
    return count


@compiled
def _copied(
    rows: Any, hashes: Any, orders: int, bit: int, base: int, blank: Any, candidates: Any, block: Any, count: int
) -> int:
    """Candidates of a table of counts: by the longest context that it knows, then by shorter ones."""
    found = np.empty(len(ORDERS), np.int64)
    known = 0
    while known < orders:
        found[known] = find_row(rows, hashes[known])
        if found[known] < 0:
            break
        known += 1
    longest = ORDERS[known - 1] if known else 0
    blank[base] = longest
    for at in range(count):
        block[at, base] = longest
    different = 0
    for order in range(known - 1, -1, -1):
        row = rows[found[order]]
        for slot in range(WIDTH):
            if row[COUNTS + slot] == 0:
                continue
            at = _candidate(candidates, block, blank, count, row[TOKENS + slot])
            if at < 0:
                continue
            count = max(count, at + 1)
            if candidates[at, 1] >> bit & 1:
                continue
            candidates[at, 1] |= 1 << bit
            if bit == 0:
                candidates[at, 2] = row[PLACES + slot]
            block[at, base + 1] = ORDERS[order]
            block[at, base + 2] = row[COUNTS + slot] / (row[TOTAL] + 0.5)
            block[at, base + 3] = row[COUNTS + slot]
            if bit == 0:
                block[at, base + 4] = 1.0 if row[RECENT] == slot else 0.0
            different += 1
        if different >= _COPIES:
            break
    return count


@compiled
def _hung(tries: Any, pointers: Any, blank: Any, candidates: Any, block: Any, count: int, depth: int) -> int:
    """Candidates of the suffix index's trees, the longest match's first."""
    token, child, sibling, weight, length, _, _ = tries
    first = -1
    for number in range(SUFFIX_TRIES):
        here = pointers[number]
        if here < 0 or weight[here] <= 0:
            continue
        if first < 0:
            first = number
            blank[_SUFFIX] = length[number] + depth - 1
            blank[_SUFFIX + 1] = 0.0
            blank[_SUFFIX + 2] = np.log2(weight[here])
            for at in range(count):
                block[at, _SUFFIX : _SUFFIX + 3] = blank[_SUFFIX : _SUFFIX + 3]
        column = _SUFFIX + 1 if number == first else _SUFFIX + 2 + number
        if number != first:
            blank[column] = 0.0
            for at in range(count):
                block[at, column] = 0.0
        taken = 0
        below = child[here]
        while below >= 0 and taken < _BRANCHES:
            at = _candidate(candidates, block, blank, count, token[below])
            if at >= 0:
                count = max(count, at + 1)
                candidates[at, 1] |= 1 << SUFFIX
                block[at, column] = weight[below] / (weight[here] + 0.5)
            taken += 1
            below = sibling[below]
    return count


@compiled
def _near(tries: Any, pointers: Any, blank: Any, candidates: Any, block: Any, count: int) -> int:
    """Candidates of the dense index and of the draft model."""
    token, child, sibling, weight, _, similarity, margin = tries
    here = pointers[_DENSE_TRIE]
    if here >= 0 and weight[here] > 0:
        blank[_DENSE : _DENSE + 4] = 0.0, weight[here], similarity, margin
        for at in range(count):
            block[at, _DENSE : _DENSE + 4] = blank[_DENSE : _DENSE + 4]
        below, taken = child[here], 0
        while below >= 0 and taken < _BRANCHES:
            at = _candidate(candidates, block, blank, count, token[below])
            if at >= 0:
                count = max(count, at + 1)
                candidates[at, 1] |= 1 << DENSE
                block[at, _DENSE] = weight[below] / weight[here]
            taken += 1
            below = sibling[below]
    here = pointers[_MODEL_TRIE]
    if here >= 0 and weight[here] > 0 and child[here] >= 0:
        below = child[here]
        blank[_MODEL] = 0.0
        for at in range(count):
            block[at, _MODEL] = 0.0
        at = _candidate(candidates, block, blank, count, token[below])
        if at >= 0:
            count = max(count, at + 1)
            candidates[at, 1] |= 1 << MODEL
            block[at, _MODEL] = weight[below]
    return count


@compiled
def _recycled(known: Any, hashes: Any, orders: int, blank: Any, candidates: Any, block: Any, count: int) -> int:
    """Candidates of the rows that are kept, by the most last tokens of which there is a row."""
    _, _, keys, ids, gaps = known
    for order in range(min(orders, KEPT) - 1, -1, -1):
        row = find_row(keys, hashes[order])
        if row < 0:
            continue
        blank[_RECYCLING] = order + 1
        blank[_RECYCLING + 1] = TOP
        blank[_RECYCLING + 3] = gaps[row, 1]
        for at in range(count):
            block[at, _RECYCLING] = order + 1
            block[at, _RECYCLING + 1] = TOP
            block[at, _RECYCLING + 3] = gaps[row, 1]
        for rank in range(TOP):
            if ids[row, rank] < 0:
                break
            fresh = rank < _RECYCLED and gaps[row, rank] < _FURTHEST
            at = -1
            if fresh:
                at = _candidate(candidates, block, blank, count, ids[row, rank])
            else:
                for other in range(count):
                    if candidates[other, 0] == ids[row, rank]:
                        at = other
            if at >= 0:
                count = max(count, at + 1)
                candidates[at, 1] |= 1 << RECYCLING
                block[at, _RECYCLING + 1] = rank
                block[at, _RECYCLING + 2] = gaps[row, rank]
        break
    return count


@compiled
def _grow(
    text: Any,
    known: Any,
    tries: Any,
    guesses: Any,
    guess_gaps: Any,
    lead: float,
    entropy: float,
    ensemble: Any,
    offsets: Any,
    active: int,
    cost: Any,
    most: int,
    least: float,
) -> Any:
    context, session, _, _, _ = known
    token, child, sibling, _, _, _, _ = tries
    room = MOST_NODES
    tokens, parents = np.empty(room, np.int32), np.empty(room, np.int32)
    depths, mask = np.empty(room, np.int32), np.empty(room, np.int32)
    place, chance, path = np.empty(room, np.int32), np.empty(room), np.empty(room)
    features = np.empty((room, len(FEATURES)), np.float32)
    order = np.empty(max(most, 1), np.int32)
    heap = np.empty(room, np.int64)
    pointers = np.full((room + 1, TRIES), -1, np.int32)
    for number in range(TRIES):
        pointers[room, number] = number
    hashes, tail = np.empty(len(ORDERS), np.uint64), np.empty(REACH, np.int64)
    candidates = np.empty((_CANDIDATES, 3), np.int64)
    block, blank = np.empty((_CANDIDATES, len(FEATURES)), np.float32), np.empty(len(FEATURES), np.float32)
    odds = np.empty(_CANDIDATES)

    count, queued, taken, chosen = 0, 0, 0, 0
    gain, expected = 1.0, 1.0
    best = 1.0 / cost[1]
    node = -1
    while True:
        # Children of the node that was taken last; of the last committed token at first.
        depth = 1 if node < 0 else depths[node] + 1
        above = 1.0 if node < 0 else path[node]
        if depth <= _DEEPEST and above > least and count + _CANDIDATES <= room and taken < most:
            length = 0
            at = node
            while at >= 0 and length < REACH:
                tail[length] = tokens[at]
                length += 1
                at = parents[at]
            back = len(text) - 1
            while back >= 0 and length < REACH:
                tail[length] = text[back]
                length += 1
                back -= 1
            orders = hash_tail(tail, length, hashes)
            blank[:] = -1.0
            blank[_DEPTH], blank[_LEAD], blank[_ENTROPY] = depth, lead, entropy
            here = pointers[room if node < 0 else node]
            found = 0
            if active >> CONTEXT & 1:
                found = _copied(context, hashes, orders, CONTEXT, _CONTEXT, blank, candidates, block, found)
            if active >> SESSION & 1:
                found = _copied(session, hashes, orders, SESSION, _SESSION, blank, candidates, block, found)
            if active >> SUFFIX & 1:
                found = _hung(tries, here, blank, candidates, block, found, depth)
            found = _near(tries, here, blank, candidates, block, found)
            if active >> RECYCLING & 1:
                found = _recycled(known, hashes, orders, blank, candidates, block, found)
            if node < 0 and active >> GUESS & 1:
                blank[_GUESS] = TOP
                for at in range(found):
                    block[at, _GUESS] = TOP
                for rank in range(len(guesses)):
                    at = -1
                    if rank < _GUESSES and guess_gaps[rank] < _FURTHEST:
                        at = _candidate(candidates, block, blank, found, guesses[rank])
                    if at >= 0:
                        found = max(found, at + 1)
                        candidates[at, 1] |= 1 << GUESS
                        block[at, _GUESS] = rank
                        block[at, _GUESS + 1] = guess_gaps[rank]
            bucket = depth_bucket(depth)
            total = 0.0
            for at in range(found):
                sources = candidates[at, 1]
                agreement = 0
                moved = 0.0
                for bit in range(len(SOURCES)):
                    if sources >> bit & 1:
                        agreement += 1
                        moved += offsets[bit, bucket]
                block[at, _AGREEMENT] = agreement
                value = log_odds(ensemble, block[at]) + moved / max(agreement, 1)
                odds[at] = min(max(1.0 / (1.0 + np.exp(-value)), _FAINTEST), _SUREST)
                total += odds[at]
            scale = 1.0 if total <= 1.0 else 1.0 / total
            for at in range(found):
                features[count] = block[at]
                tokens[count], parents[count], depths[count] = candidates[at, 0], node, depth
                mask[count], place[count] = candidates[at, 1], candidates[at, 2]
                chance[count] = odds[at] * scale
                path[count] = above * chance[count]
                for number in range(TRIES):
                    if here[number] >= 0:
                        below = child[here[number]]
                        while below >= 0 and token[below] != candidates[at, 0]:
                            below = sibling[below]
                        pointers[count, number] = below
                if path[count] > least:
                    _push(heap, queued, path, count)
                    queued += 1
                count += 1
        if queued == 0 or taken >= most:
            break
        node = _pop(heap, queued, path)
        queued -= 1
        worth = False
        for more in range(1, most - taken + 1):
            if gain + more * path[node] > best * cost[1 + taken + more]:
                worth = True
                break
        if not worth:
            break
        order[taken] = node
        taken += 1
        gain += path[node]
        if gain / cost[1 + taken] > best:
            best = gain / cost[1 + taken]
            chosen, expected = taken, gain
    return (
        tokens[:count],
        parents[:count],
        depths[:count],
        chance[:count],
        path[:count],
        mask[:count],
        place[:count],
        features[:count],
        order[:taken],
        chosen,
        expected,
    )


def grow(
    text: NDArray[np.int64],
    known: Known,
    tries: Tries,
    guesses: tuple[NDArray[np.int32], NDArray[np.float32]],
    sureness: tuple[float, float],
    ensemble: Ensemble,
    offsets: NDArray[np.float64],
    active: int,
    cost: NDArray[np.float64],
    most: int,
    least: float,
) -> Grown:
    """Grow the tree behind a text.

    Args:
        text: int64[length].
        known, tries: what the sources know.
        guesses: tokens int32[m] and gaps float32[m]: the runners-up for the text's last token.
        sureness: lead and entropy of the distribution that it was picked from.
        ensemble: the probability of a node, as log-odds, of its features.
        offsets: float64[len(SOURCES), DEPTHS], added to the log-odds: of a node's sources the mean.
        active: the sources that are asked, as bits. The tries of others must be empty.
        cost: float64[most + 2]: entry n is what a step over n rows costs; entry 0 is not looked at.
        most: most nodes.
        least: nodes whose path is less probable are not gone into.
    """
    return Grown(*_grow(text, known, tries, *guesses, *sureness, ensemble, offsets, active, cost, most, least))


@compiled
def _hang(token: Any, child: Any, sibling: Any, weight: Any, start: int, root: int, parts: Any) -> int:
    """Put a tree under a root, from place `start` on; siblings stand as they came. Returns where it ends."""
    tokens, parents, weights = parts
    last = np.full(len(tokens) + 1, -1, np.int32)
    for node in range(len(tokens)):
        at = start + node
        token[at], child[at], sibling[at], weight[at] = tokens[node], -1, -1, weights[node]
        parent = parents[node]
        above = root if parent < 0 else start + parent
        if last[parent + 1] < 0:
            child[above] = at
        else:
            sibling[last[parent + 1]] = at
        last[parent + 1] = at
    return start + len(tokens)


Branches = tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.float64]]
"""Tokens, parents and weights of a tree's nodes."""
_NO_BRANCHES = np.empty(0, np.int32), np.empty(0, np.int32), np.empty(0)


@compiled
def _flatten(trees: Any, totals: Any) -> Any:
    """Trees side by side: tokens, first children, next siblings, weights; the roots come first."""
    room = TRIES
    for tokens, _, _ in trees:
        room += len(tokens)
    token, child, sibling = np.full(room, -1, np.int32), np.full(room, -1, np.int32), np.full(room, -1, np.int32)
    weight = np.zeros(room)
    weight[:TRIES] = totals
    start = TRIES
    for number in range(TRIES):
        start = _hang(token, child, sibling, weight, start, number, trees[number])
    return token, child, sibling, weight


def make_tries(trees: dict[int, tuple[Branches, float, int]], similarity: float = 0.0, margin: float = 0.0) -> Tries:
    """Flatten trees.

    Args:
        trees: by number: nodes whose parents come before them, the weight of the root, and the match's length.
    """
    branches, length = [_NO_BRANCHES] * TRIES, np.zeros(TRIES, np.int64)
    totals = np.zeros(TRIES)
    for number, (tree, total, size) in trees.items():
        branches[number], totals[number], length[number] = tree, total, size
    token, child, sibling, weight = _flatten(tuple(branches), totals)
    return Tries(token, child, sibling, weight, length, similarity, margin)
