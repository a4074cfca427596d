"""The probability that a candidate is accepted: regression trees over its features, and corrections by its sources."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from specds.decode.auto.features import AGREEMENT, SOURCES
from specds.jit import compiled_inside

DEPTHS = 3
"""Corrections are kept for depths 1, 2 to 3, and more."""
SUREST, _FAINTEST = 0.985, 1e-4
"""No candidate is held to be likelier, or less likely."""


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


@compiled_inside
def log_odds(ensemble: Any, features: Any) -> float:
    """What an `Ensemble` says of a candidate's features, float32[len(FEATURES)]."""
    base, roots, feature, threshold, left, right = ensemble
    total: float = base
    for tree in range(len(roots)):
        node = roots[tree]
        while feature[node] >= 0:
            node = left[node] if features[feature[node]] <= threshold[node] else right[node]
        total += threshold[node]
    return total


@compiled_inside
def depth_bucket(depth: int) -> int:
    """Which of DEPTHS a depth, counted from 1, belongs to."""
    return 0 if depth <= 1 else 1 if depth <= 3 else 2


@compiled_inside
def count_sources(sources: int) -> int:
    """How many sources a set of them, as bits, holds."""
    count = 0
    for bit in range(len(SOURCES)):
        count += sources >> bit & 1
    return count


@compiled_inside
def probability(ensemble: Any, offsets: Any, features: Any, sources: int, depth: int) -> float:
    """Of one candidate, before siblings share 1.

    Args:
        ensemble: `Ensemble`.
        offsets: float64[len(SOURCES), DEPTHS], of log-odds: the mean of its sources' is added.
        features: float32[len(FEATURES)], all set.
        sources: who proposed it, as bits.
        depth: from 1.
    """
    bucket = depth_bucket(depth)
    moved = 0.0
    for bit in range(len(SOURCES)):
        if sources >> bit & 1:
            moved += offsets[bit, bucket]
    value = log_odds(ensemble, features) + moved / max(features[AGREEMENT], 1.0)
    chance: float = min(max(1.0 / (1.0 + np.exp(-value)), _FAINTEST), SUREST)
    return chance
