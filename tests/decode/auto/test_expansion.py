"""The merged tree: its choice against all subtrees, and its sources."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specds.decode.auto.acceptance import shipped
from specds.decode.auto.expansion import (
    DEPTHS,
    FEATURES,
    ORIGINS,
    SOURCES,
    SUFFIX,
    grow,
    log_odds,
)

from .growing import grown_with, random_known, random_tries


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 1 << 30), st.integers(2, 5), st.integers(4, 40))
def test_the_tree_chosen_is_the_best_of_all_subtrees(seed: int, vocabulary: int, length: int) -> None:
    random = np.random.default_rng(seed)
    text, known = random_known(random, vocabulary, length)
    tries = random_tries(random, vocabulary)
    # Prices that rise in steps, as those of a pass do: neither concave nor convex.
    cost = np.cumsum(random.random(34) * random.integers(0, 2, 34)) + 1.0
    state = random.bit_generator.state
    whole = grown_with(random, text, known, tries, np.ones(34))
    random.bit_generator.state = state
    chosen = grown_with(random, text, known, tries, cost)
    nodes = whole.order.tolist()
    if len(nodes) > 12:
        nodes = nodes[:12]
        cost = cost[:14]
        random.bit_generator.state = state
        chosen = grown_with(random, text, known, tries, cost)
    above = {node: int(whole.parents[node]) for node in nodes}
    best = 1.0 / cost[1]
    for subset in range(1 << len(nodes)):
        kept = {node for place, node in enumerate(nodes) if subset >> place & 1}
        if all(above[node] < 0 or above[node] in kept for node in kept) and len(kept) + 2 <= len(cost):
            best = max(best, (1.0 + sum(whole.path[node] for node in kept)) / cost[1 + len(kept)])
    gain = 1.0 + chosen.path[chosen.order[: chosen.chosen]].sum()
    assert gain == pytest.approx(chosen.expected)
    assert gain / cost[1 + chosen.chosen] == pytest.approx(best)
    assert (np.diff(chosen.path[chosen.order]) <= 1e-12).all()


def test_a_source_that_is_not_asked_proposes_nothing() -> None:
    random = np.random.default_rng(1)
    text, known = random_known(random, 4, 40)
    tries = random_tries(random, 4)
    guesses = np.array([3], np.int32), np.array([0.1], np.float32)
    seen = []
    for active in (0, 1, 1 << SUFFIX, 0b1111111):
        found = grow(
            text,
            known,
            tries,
            guesses,
            (1.0, 0.5),
            shipped().ensemble,
            np.zeros((len(SOURCES), DEPTHS)),
            active,
            np.ones(34),
            32,
            0.01,
        )
        assert (found.mask & ~active == 0).all()
        seen.append(int(np.bitwise_or.reduce(found.mask, initial=0)))
    assert seen[:2] == [0, 1]
    assert seen[3].bit_count() > 2


def test_sources_of_nodes_say_whether_they_were_copied() -> None:
    names = {origin.name: origin.retrieved for origin in ORIGINS}
    assert len(names) == 1 << len(SOURCES) == 128
    assert names["context"]
    assert names["context+recycling"]
    assert names["suffix"]
    assert names["dense"]
    assert not names["recycling"]
    assert not names["recycling+runners-up"]
    assert not names["model"]


def test_features_have_names_and_the_shipped_model_reads_them() -> None:
    ensemble = shipped().ensemble
    row = np.full(len(FEATURES), -1.0, np.float32)
    low = log_odds(ensemble, row)
    row[FEATURES.index("context order")] = row[FEATURES.index("context own order")] = 16
    row[FEATURES.index("context share")] = 0.95
    row[FEATURES.index("context count")] = 20
    row[FEATURES.index("context recent")] = row[FEATURES.index("agreement")] = 1
    row[FEATURES.index("recycling order")] = 3
    row[FEATURES.index("recycling rank")] = row[FEATURES.index("recycling gap")] = 0
    row[FEATURES.index("recycling lead")] = 8
    assert log_odds(ensemble, row) > max(low, 1.5)
