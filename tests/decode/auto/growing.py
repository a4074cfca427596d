"""Random texts, and random things that sources know, to grow trees from."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from specds.decode.auto.acceptance import shipped
from specds.decode.auto.expansion import Grown, Limits, grow
from specds.decode.auto.features import SOURCES
from specds.decode.auto.ngrams import Followers, Likeliest
from specds.decode.auto.probability import DEPTHS
from specds.decode.auto.sources import Known, Picked
from specds.decode.auto.tries import TRIES, Continuations, Trees, all_trees
from specds.decode.contracts import TOP

ALL = (1 << len(SOURCES)) - 1
"""Every source, as bits."""


def random_known(random: np.random.Generator, vocabulary: int, length: int) -> tuple[NDArray[np.int64], Known]:
    """A text, and what sources know that have seen it, and others that are wrong; all of them are asked."""
    text = random.integers(0, vocabulary, length)
    followers, answers, likeliest = Followers(), Followers(), Likeliest()
    followers.extend(text, 1)
    answers.extend(random.integers(0, vocabulary, length), 1)
    for _ in range(6):
        ids = np.argsort(random.random((1, max(TOP, vocabulary))), axis=1)[:, :TOP].astype(np.int32)
        gaps = np.sort(random.random((1, TOP)).astype(np.float32) * 6, axis=1)
        end = int(random.integers(1, length + 1))
        likeliest.record(text[:end], np.empty(0, np.int32), np.empty(0, np.int32), ids, gaps - gaps[:, :1])
    picked = Picked(random.integers(0, 5, 2).astype(np.int32), np.array([0.4, 2.0], np.float32), 1.0, 0.5)
    trees = random_trees(random, vocabulary)
    return text, Known(ALL, followers.rows, answers.rows, likeliest.rows, picked, trees, 0.8, 0.1)


def random_trees(random: np.random.Generator, vocabulary: int) -> Trees:
    """Counted trees of depth 3 at most, some of them missing."""
    trees = {}
    for number in range(TRIES):
        if random.random() < 0.6:
            tokens, parents, weights = [], [], []
            total = int(random.integers(1, 20))
            stack = [(-1, total, 0)]
            while stack:
                parent, count, depth = stack.pop()
                if depth == 3:
                    continue
                for token in random.permutation(vocabulary)[:2]:
                    share = int(random.integers(0, count + 1))
                    if share and len(tokens) < 12:
                        tokens.append(token)
                        parents.append(parent)
                        weights.append(float(share))
                        stack.append((len(tokens) - 1, share, depth + 1))
                        count -= share
            if tokens:
                nodes = np.array(tokens, np.int32), np.array(parents, np.int32), np.array(weights)
                trees[number] = Continuations(*nodes, float(total), max(0, 3 - number))
    return all_trees(trees)


def grown_with(random: np.random.Generator, text: NDArray[np.int64], known: Known, cost: NDArray[np.float64]) -> Grown:
    """The tree at random corrections."""
    offsets = random.normal(size=(len(SOURCES), DEPTHS))
    return grow(text, known, shipped().ensemble, offsets, Limits(cost, len(cost) - 2, 0.12))
