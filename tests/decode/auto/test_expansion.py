"""The merged tree: its choice against all subtrees, and the sources that are asked."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specds.decode.auto.acceptance import shipped
from specds.decode.auto.expansion import Limits, grow
from specds.decode.auto.features import SOURCES
from specds.decode.auto.probability import DEPTHS

from .growing import ALL, grown_with, random_known


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 1 << 30), st.integers(2, 5), st.integers(4, 40))
def test_the_tree_chosen_is_the_best_of_all_subtrees(seed: int, vocabulary: int, length: int) -> None:
    random = np.random.default_rng(seed)
    text, known = random_known(random, vocabulary, length)
    # Prices that rise in steps, as those of a pass do: neither concave nor convex.
    cost = np.cumsum(random.random(34) * random.integers(0, 2, 34)) + 1.0
    state = random.bit_generator.state
    whole = grown_with(random, text, known, np.ones(34))
    random.bit_generator.state = state
    chosen = grown_with(random, text, known, cost)
    nodes = whole.order.tolist()
    if len(nodes) > 12:
        nodes = nodes[:12]
        cost = cost[:14]
        random.bit_generator.state = state
        chosen = grown_with(random, text, known, cost)
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
    random = np.random.default_rng(3)
    seen = 0
    for _ in range(4):
        text, known = random_known(random, 4, 40)
        for active in (0, *(1 << source for source in range(len(SOURCES))), ALL):
            offsets = np.zeros((len(SOURCES), DEPTHS))
            limits = Limits(np.ones(34), 32, 0.01)
            grown = grow(text, known._replace(active=active), shipped().ensemble, offsets, limits)
            assert (grown.sources & ~active == 0).all()
            seen |= int(np.bitwise_or.reduce(grown.sources, initial=0)) if active != ALL else 0
    assert seen == ALL
