"""How far sources came true lately: corrections of a node's log-odds by source and depth."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from specds.decode.auto.expansion import Grown
from specds.decode.auto.features import SOURCES
from specds.decode.auto.probability import DEPTHS, count_sources, depth_bucket
from specds.jit import compiled

# How much of what was learned is left after a step: of a request, and of all requests.
_REQUEST_MEMORY, _ALL_MEMORY = 0.97, 0.997
# How much must be learned before a correction counts half: of a request, and of all requests.
_REQUEST_DOUBT, _ALL_DOUBT = 1.0, 4.0
_LOWEST, _HIGHEST = -6.0, 1.5
# The least p (1 - p) that a node counts for.
_LEAST_CURVATURE = 0.02


class Corrections(NamedTuple):
    """What is added to log-odds, and how much is known of each entry.

    Attributes:
        offsets: float64[len(SOURCES), DEPTHS].
        curvature: float64[len(SOURCES), DEPTHS]: Σ p (1 - p) over the nodes that were judged, fading.
        memory: how much of it is left after a step.
        doubt: curvature at which a correction counts half.
    """

    offsets: NDArray[np.float64]
    curvature: NDArray[np.float64]
    memory: float
    doubt: float


@compiled
def _correct(corrections: Any, sources: int, bucket: int, share: float, missed: float, curvature: float) -> None:
    """Judge one node: of each of its sources, by its share in it, a step of Newton's method.

    Args:
        corrections: `Corrections`.
        sources: who proposed it, as bits.
        bucket: of its depth.
        missed: 1 if it was committed, else 0, less its probability p.
        curvature: p (1 - p).
    """
    offsets, known, _, doubt = corrections
    for bit in range(len(SOURCES)):
        if sources >> bit & 1:
            known[bit, bucket] += share * curvature
            moved = offsets[bit, bucket] + share * missed / (doubt + known[bit, bucket])
            offsets[bit, bucket] = min(max(moved, _LOWEST), _HIGHEST)


@compiled
def _learn(tokens: Any, parents: Any, chance: Any, sources: Any, committed: Any, request: Any, every: Any) -> None:
    """Judge every node whose parent was committed, whether it was verified or not.

    A source's offset is a weight of a logistic model whose input is its share in a node.

    Args:
        tokens, parents, sources: int32[n], chance: float64[n]: as in `Grown`.
        committed: int64[m].
        request, every: `Corrections` of this request and of all requests.
    """
    request.curvature[:] *= request.memory
    every.curvature[:] *= every.memory
    node, start = -1, 0
    for at in range(len(committed)):
        bucket = depth_bucket(at + 1)
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
            share = 1.0 / max(count_sources(sources[child]), 1)
            missed = (1.0 if hit else 0.0) - chance[child]
            curvature = max(chance[child] * (1.0 - chance[child]), _LEAST_CURVATURE)
            _correct(request, sources[child], bucket, share, missed, curvature)
            _correct(every, sources[child], bucket, share, missed, curvature)
        if following < 0:
            break
        node, start = following, following + 1


def no_corrections() -> Corrections:
    """Those of all requests of an engine, before there was any."""
    shape = len(SOURCES), DEPTHS
    return Corrections(np.zeros(shape), np.zeros(shape), _ALL_MEMORY, _ALL_DOUBT)


class Feedback:
    """Corrections of one request, and through it of all requests of an engine.

    A request begins with what all have learned, and moves faster. Every candidate that was looked at after a committed
    token is judged by the next one, whether it was verified or not: what is not drafted is judged, too, and a source
    that was wrong for a while comes back by itself, at no cost in query tokens.

    Args:
        every: of all requests; None: this one is alone.
    """

    def __init__(self, every: Corrections | None = None) -> None:
        self._all = every or no_corrections()
        self.start()

    @property
    def offsets(self) -> NDArray[np.float64]:
        """float64[len(SOURCES), DEPTHS], what `grow` adds to log-odds."""
        return self._request.offsets

    def start(self) -> None:
        """A new request."""
        known = np.zeros_like(self._all.curvature)
        self._request = Corrections(self._all.offsets.copy(), known, _REQUEST_MEMORY, _REQUEST_DOUBT)

    def observe(self, grown: Grown, committed: NDArray[np.int64]) -> None:
        """Learn from a step.

        Args:
            grown: what was looked at.
            committed: int64[m], what came of it.
        """
        _learn(grown.tokens, grown.parents, grown.chance, grown.sources, committed, self._request, self._all)


@compiled
def _reached(tokens: Any, parents: Any, kept: Any, committed: Any) -> int:
    """How many of the committed tokens, int64[m], a path through the kept nodes, int32[k], spells."""
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
    """How many tokens of a step the chosen nodes predicted, whether they were verified or not.

    Args:
        committed: int64[m].
    """
    count: int = _reached(grown.tokens, grown.parents, grown.order[: grown.chosen], committed)
    return count
