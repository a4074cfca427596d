"""Random texts, counts and tries to grow trees from."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from specds.decode.auto.acceptance import shipped
from specds.decode.auto.expansion import (
    DEPTHS,
    SOURCES,
    Grown,
    Known,
    Tries,
    grow,
    make_tries,
)
from specds.decode.auto.ngrams import (
    Followers,
    Rows,
)
from specds.decode.contracts import TOP


def random_known(random: np.random.Generator, vocabulary: int, length: int) -> tuple[NDArray[np.int64], Known]:
    text = random.integers(0, vocabulary, length)
    followers, rows = Followers(), Rows()
    followers.extend(text, 1)
    for _ in range(6):
        ids = np.argsort(random.random((1, max(TOP, vocabulary))), axis=1)[:, :TOP].astype(np.int32)
        gaps = np.sort(random.random((1, TOP)).astype(np.float32) * 6, axis=1)
        end = int(random.integers(1, length + 1))
        rows.keep(text[:end], np.empty(0, np.int32), np.empty(0, np.int32), ids, gaps - gaps[:, :1])
    return text, Known(followers.rows, Followers().rows, rows.keys, rows.ids, rows.gaps)


def random_tries(random: np.random.Generator, vocabulary: int) -> Tries:
    trees = {}
    for number in range(3):
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
            branches = np.array(tokens, np.int32), np.array(parents, np.int32), np.array(weights)
            if tokens:
                trees[number] = branches, float(total), 3 - number
    return make_tries(trees)


def grown_with(
    random: np.random.Generator, text: NDArray[np.int64], known: Known, tries: Tries, cost: NDArray[np.float64]
) -> Grown:
    guesses = random.integers(0, 5, 2).astype(np.int32), np.array([0.4, 2.0], np.float32)
    offsets = random.normal(size=(len(SOURCES), DEPTHS))
    return grow(
        text, known, tries, guesses, (1.0, 0.5), shipped().ensemble, offsets, 0b1111111, cost, len(cost) - 2, 0.12
    )
