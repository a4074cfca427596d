"""The CPU runtime's own functions against numpy, and the vectors' against the scalars'."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from specds.decode.targets.elementwise import exponential, soften
from specds.decode.targets.microkernel import LANES, address, exponentials, gate, largest
from specds.jit import compiled

blocks = st.integers(1, 4).map(lambda count: count * LANES)
numbers = arrays(np.float32, blocks, elements=st.floats(-200, 87, width=32))


@compiled
def _one_by_one(values: Any) -> None:
    for place in range(len(values)):
        values[place] = exponential(values[place])


@compiled
def _together(values: Any, less: float) -> None:
    exponentials(address(values, 0), len(values) // LANES, less)


@compiled
def _largest(values: Any) -> float:
    return largest(address(values, 0), len(values) // LANES)


@compiled
def _gate(values: Any, out: Any) -> None:
    gate(address(values, 0), address(out, 0))


@given(numbers)
def test_exponentials_are_the_same_bits_one_by_one_and_together(values: np.ndarray) -> None:
    one, all_at_once = values.copy(), values.copy()
    _one_by_one(one)
    _together(all_at_once, np.float32(0))
    assert (one.view(np.int32) == all_at_once.view(np.int32)).all()
    exact = np.exp(np.maximum(values, -87).astype(np.float64))
    assert (np.abs(one - exact) <= 3e-7 * exact).all()


@given(numbers)
def test_the_largest_of_some_blocks(values: np.ndarray) -> None:
    assert _largest(values) == values.max()


@given(arrays(np.float32, 2 * LANES, elements=st.floats(-100, 100, width=32)))
def test_the_gate_is_silu_times_the_other_half(values: np.ndarray) -> None:
    out = np.empty(LANES, np.float32)
    _gate(values, out)
    gated, other = values[:LANES].astype(np.float64), values[LANES:].astype(np.float64)
    np.testing.assert_allclose(out, gated / (1 + np.exp(-gated)) * other, rtol=1e-6, atol=1e-30)


@given(arrays(np.float32, st.integers(1, 70), elements=st.floats(-50, 50, width=32)))
def test_softmax(scores: np.ndarray) -> None:
    exact = np.exp(scores.astype(np.float64) - scores.max())
    soften(scores)
    np.testing.assert_allclose(scores, exact / exact.sum(), atol=1e-6)


def test_what_is_no_number_is_not_hidden() -> None:
    values = np.zeros(LANES, np.float32)
    values[3] = np.nan
    _together(values, np.float32(0))
    assert np.isnan(values[3])
    assert (np.delete(values, 3) == 1).all()
    both, out = np.full(2 * LANES, np.nan, np.float32), np.zeros(LANES, np.float32)
    _gate(both, out)
    assert np.isnan(out).all()
