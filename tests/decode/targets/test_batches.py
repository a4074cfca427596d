"""Which items share a call."""

from __future__ import annotations

from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from specds.decode.targets.batches import shared_calls


def cost(calls: list[list[int]], sizes: list[int], price: float) -> float:
    return sum(1 + price * len(call) * max(sizes[item] for item in call) for call in calls)


@settings(max_examples=50)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=5), st.sampled_from([0.01, 0.1, 0.3, 1.0]))
def test_calls_cost_least(sizes: list[int], price: float) -> None:
    """Against all ways to put the items into calls."""
    calls = shared_calls(sizes, price)
    assert sorted(item for call in calls for item in call) == list(range(len(sizes)))
    assert all(call == sorted(call) for call in calls)
    least = min(
        cost([[item for item in range(len(sizes)) if place[item] == call] for call in set(place)], sizes, price)
        for place in product(range(len(sizes)), repeat=len(sizes))
    )
    assert abs(cost(calls, sizes, price) - least) < 1e-9
