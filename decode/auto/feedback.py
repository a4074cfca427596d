"""What sources turned out to be worth lately: corrections of a node's log-odds by source and depth."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from specds.decode.auto.expansion import DEPTHS, SOURCES, Grown, depth_bucket
from specds.jit import compiled

# How much of what was learned is left after a step: of a request, and of all requests.
_REQUEST, _PROCESS = 0.97, 0.997
# How much must be learned before a correction counts half: of a request, and of all requests.
_SLOW, _ALL_SLOW = 1.0, 4.0
_LOWEST, _HIGHEST = -6.0, 1.5


@compiled
def _learn(
    tokens: Any,
    parents: Any,
    chance: Any,
    mask: Any,
    committed: Any,
    offsets: Any,
    known: Any,
    all_offsets: Any,
    all_known: Any,
) -> None:
    """Judge every node whose parent was committed, whether it was verified or not.

    A source's offset is a weight of a logistic model whose input is its share in a node: this is a step of Newton's
    method on its own, with what `known` sums up, Σ p (1 - p), as the curvature.
    """
    for bit in range(offsets.shape[0]):
        for bucket in range(offsets.shape[1]):
            known[bit, bucket] *= _REQUEST
            all_known[bit, bucket] *= _PROCESS
    node, at, start = -1, 0, 0
    depth = 1
    while at < len(committed):
        bucket = depth_bucket(depth)
        following = -1
        seen = False
        for child in range(start, len(tokens)):
            if parents[child] != node:
                if seen:
                    break  # siblings stand together
                continue
            seen = True
            hit = tokens[child] == committed[at]
            if hit:
                following = child
            share = 0.0
            for bit in range(offsets.shape[0]):
                share += mask[child] >> bit & 1
            share = 1.0 / max(share, 1.0)
            missed = (1.0 if hit else 0.0) - chance[child]
            spread = max(chance[child] * (1.0 - chance[child]), 0.02)
            for bit in range(offsets.shape[0]):
                if mask[child] >> bit & 1:
                    known[bit, bucket] += share * spread
                    all_known[bit, bucket] += share * spread
                    moved = offsets[bit, bucket] + share * missed / (_SLOW + known[bit, bucket])
                    offsets[bit, bucket] = min(max(moved, _LOWEST), _HIGHEST)
                    moved = all_offsets[bit, bucket] + share * missed / (_ALL_SLOW + all_known[bit, bucket])
                    all_offsets[bit, bucket] = min(max(moved, _LOWEST), _HIGHEST)
        if following < 0:
            break
        node, start = following, following + 1
        at += 1
        depth += 1


class Feedback:
    """Corrections of one stream of requests, and of the request that is being decoded.

    A request begins with what the stream has learned, and moves faster. Every candidate that was looked at behind a
    committed token is judged by the next one, whether it was verified or not: what is not drafted is judged, too, and
    a source that was wrong for a while comes back by itself, at no cost in rows.

    Attributes:
        offsets: float64[len(SOURCES), DEPTHS], what `grow` adds to log-odds.
    """

    def __init__(self) -> None:
        shape = len(SOURCES), DEPTHS
        self._all, self._all_known = np.zeros(shape), np.zeros(shape)
        self.offsets: NDArray[np.float64] = np.zeros(shape)
        self._known = np.zeros(shape)

    def start(self) -> None:
        """A new request."""
        self.offsets = self._all.copy()
        self._known = np.zeros_like(self._all)

    def observe(self, grown: Grown, committed: NDArray[np.int64]) -> None:
        """Learn from a step.

        Args:
            grown: what was looked at.
            committed: int64[m], what came of it.
        """
        _learn(
            grown.tokens,
            grown.parents,
            grown.chance,
            grown.mask,
            committed,
            self.offsets,
            self._known,
            self._all,
            self._all_known,
        )


@compiled
def _reached(tokens: Any, parents: Any, kept: Any, committed: Any) -> int:
    """How many of the committed tokens a path through the kept nodes spells."""
    node, at = -1, 0
    while at < len(committed):
        following = -1
        for child in kept:
            if parents[child] == node and tokens[child] == committed[at]:
                following = child
                break
        if following < 0:
            break
        node = following
        at += 1
    return at


def reached(grown: Grown, committed: NDArray[np.int64]) -> int:
    """How many tokens of a step the chosen nodes foretold; those that were not verified could have foretold them, too.

    Args:
        committed: int64[m].
    """
    found: int = _reached(grown.tokens, grown.parents, grown.order[: grown.chosen], committed)
    return found
