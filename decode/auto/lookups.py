"""What stores are asked for once a step: trees of what followed a match, and what followed the nearest states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specds.datastore.by_token import nearest
from specds.datastore.dense import DenseIndex
from specds.datastore.suffix_lookup import Parts, _continuation_tree, _longest_match
from specds.decode.auto.expansion import SUFFIX_TRIES, Branches
from specds.jit import compiled

_NODES, _REACHES = (40, 16, 8), (12, 4, 2)
_SHARES = 256
# Similarities are weighed by their exponential, this steep.
_STEEP = 12.0


@compiled
def _trees(table: Any, query: Any, nodes: Any, reaches: Any) -> Any:
    """Of the longest match, of a shorter one and of the last token alone: nodes, ends, occurrences and lengths."""
    lengths, totals, ends = np.zeros(3, np.int64), np.zeros(3, np.int64), np.zeros(3, np.int64)
    room = nodes.sum()
    tokens, parents, counts = np.empty(room, np.int32), np.empty(room, np.int32), np.empty(room)
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
                one, above, times = _continuation_tree(table, length, ranges, reaches[number], nodes[number], _SHARES)
                for node in range(len(one)):
                    tokens[filled], parents[filled], counts[filled] = one[node], above[node], times[node]
                    filled += 1
        ends[number] = filled
    return tokens, parents, counts, ends, totals, lengths


_NODE_COUNTS, _DEPTHS = np.array(_NODES), np.array(_REACHES)


def suffix_trees(parts: Parts, tail: NDArray[np.int64]) -> dict[int, tuple[Branches, float, int]]:
    """Counted trees of what followed the end of a text, by number: of its longest match, a shorter one, one token.

    Args:
        tail: int64[m], the last tokens.

    Returns:
        the nodes, the match's occurrences and its length; nothing where the last token is unknown.
    """
    tokens, parents, counts, ends, totals, lengths = _trees(
        parts.table, np.array(tail, np.int64), _NODE_COUNTS, _DEPTHS
    )
    found: dict[int, tuple[Branches, float, int]] = {}
    start = 0
    for number in range(SUFFIX_TRIES):
        end = int(ends[number])
        if end > start:
            branches = tokens[start:end], parents[start:end], counts[start:end]
            found[number] = branches, float(totals[number]), int(lengths[number])
        start = end
    return found


@dataclass(frozen=True, slots=True)
class Near:
    """What followed the nearest states.

    Attributes:
        branches: as a tree, weighed by similarity.
        weight: of all neighbours together, the nearest one 1.
        similarity, margin: of the nearest one, and how much less the second's is.
    """

    branches: Branches
    weight: float
    similarity: float
    margin: float


def neighbours(
    indexes: Sequence[DenseIndex], hidden: NDArray[np.float32], last: int, count: int, length: int
) -> Near | None:
    """What followed the states nearest to the last forwarded token's where the last token came next (DReSD, §3.5).

    Args:
        hidden: float32[d].
        last: the token just picked.
        count: neighbours fetched.
        length: most tokens of a continuation.
    """
    if len(indexes) == 1 and (alone := indexes[0].alone(last)) is not None:
        # One store of one segment, as most are: all of it in one call.
        part, by_token = alone
        end = np.iinfo(part.tokens.dtype).max
        return _near(*_tree(by_token.table, part.tokens, end, last, part.normalizer.key(hidden), count, length))
    sims: list[NDArray[np.float32]] = []
    blocks: list[NDArray[np.int64]] = []
    for index in indexes:
        similarity, positions = index.search_followed_by(hidden, last, count)
        sims.append(similarity)
        blocks.append(index.following(positions + 1, length))
    return _near(*_prefixes(np.concatenate(blocks), np.concatenate(sims)))


def _near(tokens: Any, parents: Any, mass: Any, total: float, top: float, margin: float) -> Near | None:
    return Near((tokens, parents, mass), total, top, margin) if len(tokens) else None


@compiled
def _tree(table: Any, tokens: Any, end: int, token: int, key: Any, count: int, length: int) -> Any:
    """`_prefixes` of what follows the `count` nearest keys that a token follows, up to `length` tokens of each."""
    similarity, positions = nearest(table, token, key, count)
    block = np.full((len(positions), length), -1, np.int64)
    for row in range(len(positions)):
        for at in range(length):
            place = positions[row] + 1 + at
            if place >= len(tokens) or tokens[place] == end:
                break
            block[row, at] = tokens[place]
    return _prefixes(block, similarity)


@compiled
def _prefixes(block: Any, similarity: Any) -> Any:
    """The tree of some paths, each up to its first -1: tokens, parents, and the weight of all paths through each node.

    Also the weight of all paths, the best similarity, and how much less the second one is.
    """
    top, second = -np.inf, -np.inf
    for one in similarity:
        if one > top:
            top, second = one, top
        elif one > second:
            second = one
    most = block.size
    token, parent, mass = np.empty(most, np.int32), np.empty(most, np.int32), np.zeros(most)
    child, sibling = np.full(most + 1, -1, np.int32), np.full(most, -1, np.int32)
    count, total = 0, 0.0
    for path in range(len(block)):
        weight = np.exp(_STEEP * (float(similarity[path]) - top))
        total += weight
        node = -1
        for at in range(block.shape[1]):
            if block[path, at] < 0:
                break
            found, last = child[node + 1], -1
            while found >= 0 and token[found] != block[path, at]:
                last, found = found, sibling[found]
            if found < 0:
                found = count
                count += 1
                token[found], parent[found] = block[path, at], node
                if last < 0:
                    child[node + 1] = found
                else:
                    sibling[last] = found
            mass[found] += weight
            node = found
    return token[:count], parent[:count], mass[:count], total, float(top), float(top - max(second, -1.0))
