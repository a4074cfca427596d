"""What a pass costs: curves, those of a run's own passes, and curves that passes correct."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specds.decode.draft import Draft, chain
from specds.decode.pricing.budget import Adaptive
from specds.decode.pricing.curve import Corrected, CostCurve, Load, Passes, Prices, pass_costs
from specds.decode.pricing.parallel import choose_parallel

from .curves import FAIR


def test_the_curve_is_linear_between_what_was_measured_and_beyond() -> None:
    curve = CostCurve((1, 3, 5), (100, 200), np.array([[1.0, 2.0, 2.0], [2.0, 4.0, 6.0]]))
    assert curve.at(100).tolist() == [0, 1, 1.5, 2, 2, 2]
    assert curve.at(150).tolist() == [0, 1.5, 2.25, 3, 3.5, 4]
    assert curve.at(300).tolist() == [0, 3, 4.5, 6, 8, 10]
    assert curve.at(1).tolist() == [0, 1, 1.5, 2, 2, 2]


def test_the_passes_of_a_run_are_a_curve() -> None:
    """T(n, c) = a_n + 10 µs c, with noise, and now and then a pause of the machine."""
    rng = np.random.default_rng(0)
    rows = rng.choice([1, 1, 2, 5, 9], 2000)
    contexts = rng.integers(50, 900, 2000)
    level = {1: 0.010, 2: 0.011, 5: 0.012, 9: 0.016}
    seconds = np.array([level[n] for n in rows]) + 1e-5 * contexts
    seconds *= rng.normal(1.0, 0.02, 2000)
    seconds[rng.random(2000) < 0.01] = 5.0
    prompts = rng.integers(20, 800, 60)
    passes = Passes(rows, contexts, seconds, prompts, 1e-3 * prompts)
    curve = passes.curve()
    assert curve is not None
    assert curve.rows == (1, 2, 5, 9, 128)
    asked = np.array([1, 2, 5, 9, 1, 9]), np.array([100, 100, 500, 800, 800, 100])
    found = curve.predict(*asked)
    expected = [level[n] + 1e-5 * c for n, c in zip(*map(np.ndarray.tolist, asked), strict=True)]
    np.testing.assert_allclose(found, expected, rtol=0.04)
    assert curve.predict(np.array([128]), np.array([50]))[0] == pytest.approx(0.128, rel=0.05)
    # Row counts of few passes are left out; without plain ones, or of these alone, nothing is known.
    more = np.append(rows, 3), np.append(contexts, 3), np.append(seconds, 9.0)
    again = Passes(*more, prompts[:0], prompts[:0]).curve()
    assert again is not None
    assert again.rows == (1, 2, 5, 9)
    many = rows > 1
    for kept in (many, ~many):
        assert Passes(rows[kept], contexts[kept], seconds[kept], prompts, 1e-3 * prompts).curve() is None


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 9000), st.floats(0, 1e6)), max_size=80),
    st.lists(st.tuples(st.integers(1, 9000), st.floats(0, 1e6)), max_size=9),
)
def test_any_passes_are_a_sound_curve(passes: list[tuple[int, int, float]], asked: list[tuple[int, float]]) -> None:
    passes = [(1, 5, 1e-9), (2, 9, 1e-9)] * 10 + passes
    rows, contexts, seconds = (np.array(one) for one in zip(*passes, strict=True))
    prompts = np.array([tokens for tokens, _ in asked], np.int64), np.array([took for _, took in asked])
    curve = Passes(rows, contexts, seconds.astype(float), *prompts).curve()
    assert curve is not None
    assert list(curve.rows) == sorted(set(curve.rows))
    for context in (0, 77, 10_000):
        found = curve.at(context)
        assert np.isfinite(found).all()
        assert (np.diff(found) >= 0).all()


def test_a_cost_is_never_negative_however_noisy_the_measurement() -> None:
    curve = CostCurve((1, 2, 4), (64, 512, 2048), np.array([[10, 11, 12], [15, 15, 15], [11, 11, 12]]) / 1e3)
    for context in (1, 64, 300, 2048, 8000, 100_000):
        assert (curve.at(context)[1:] > 0).all()


ALONE = Load((99,), 0)


def learn(curve: Corrected, rows: int, seconds: float, load: Load = ALONE) -> None:
    """A pass over `rows` query tokens was priced, and took so long."""
    curve.costs(load, 64)
    curve.learn(load, rows, seconds)


def worth(curve: Prices, draft: Draft) -> int:
    """How many nodes of a draft are verified."""
    budget = Adaptive(curve)
    budget.prepare(ALONE)
    return len(budget.allocate([draft])[0])


def test_passes_correct_a_curve_that_was_measured_while_the_machine_was_busy() -> None:
    """The true curve is flat up to four rows; the kept one says that each row costs as much as the first."""
    kept = CostCurve((1, 2, 4, 8, 16), (100,), np.array([[1.0, 2.0, 4.0, 8.0, 16.0]]))
    curve = Corrected(kept)
    draft = chain(range(8), [0.6] * 8)
    assert worth(curve, draft) == 0
    for _ in range(200):
        learn(curve, 1, 0.5)
        learn(curve, 4, 0.6)
    now = curve.at(100)
    assert now[1] == pytest.approx(0.5, rel=0.05)
    assert now[4] == pytest.approx(0.6, rel=0.05)
    # Between them the correction is between theirs; beyond them it is that of the largest seen.
    assert now[1] <= now[2] <= now[3] <= now[4]
    assert now[16] == pytest.approx(16 * 0.6 / 4, rel=0.05)
    assert worth(curve, draft) >= 1


def test_more_rows_are_tried_before_they_are_ruled_out() -> None:
    """Memory is slow now: one row takes three times as long, and eight take no longer than that."""
    curve = Corrected(CostCurve((1, 2, 4, 8, 16), (100,), np.array([[1.0, 1.2, 1.5, 2.8, 6.0]])))
    for _ in range(200):
        learn(curve, 1, 3.0)
    now = curve.at(100)
    assert now[1] == pytest.approx(3.0, rel=0.05)
    assert now[2] == now[8] == pytest.approx(now[1], rel=0.01)
    assert now[16] == pytest.approx(6.0)
    # What was not seen for long is tried again.
    for _ in range(200):
        learn(curve, 8, 9.0)
    assert curve.at(100)[8] == pytest.approx(9.0, rel=0.1)
    for _ in range(600):
        learn(curve, 1, 3.0)
    assert curve.at(100)[8] == pytest.approx(now[1], rel=0.01)
    learn(curve, 8, 3.1)
    assert curve.at(100)[8] < 3.3


def test_the_prompts_pass_and_a_pause_of_the_machine_say_little() -> None:
    curve = Corrected(FAIR)
    before = curve.at(100)
    curve.learn(Load((), 97), 97, 50.0)
    learn(curve, 31, 50.0, Load((99,), 30))
    assert (curve.at(100) == before).all()
    for _ in range(50):
        learn(curve, 1, 1.0)
    learn(curve, 1, 1000.0)
    assert curve.at(100)[1] < 1.05
    learn(curve, 999, 1.0)  # more rows than the curve knows


@given(st.lists(st.tuples(st.integers(1, 70), st.floats(1e-6, 1e6)), max_size=60), st.integers(0, 5000))
def test_a_corrected_curve_is_a_curve(passes: list[tuple[int, float]], context: int) -> None:
    curve = Corrected(FAIR)
    for rows, seconds in passes:
        learn(curve, rows, seconds)
    found = curve.at(context)
    assert found[0] == 0 < found[1]
    assert np.isfinite(found).all()
    assert (np.diff(found) >= 0).all()


def made(levels: list[float], slope: float) -> CostCurve:
    """A curve of 1, 2, 4, … rows whose passes take `slope` more for each token of context."""
    rows = tuple(1 << place for place in range(len(levels)))
    behind = np.maximum.accumulate(levels)
    return CostCurve(rows, (100, 300), np.stack([behind, behind + 200 * slope]))


LEVELS = st.lists(st.floats(0.5, 20.0), min_size=2, max_size=7)
SLOPES = st.sampled_from([0.0, 1e-4, 1e-2])


@given(LEVELS, SLOPES, st.integers(100, 900), st.integers(0, 100))
def test_the_passes_of_one_request_cost_what_the_curve_says(
    levels: list[float], slope: float, context: int, most: int
) -> None:
    curve = made(levels, slope)
    cost, every = pass_costs(curve, Load([context], 0), most), curve.at(context)
    assert len(cost) == most + 2
    known = min(most + 2, len(every))
    assert cost[1:known] == pytest.approx(every[1:known])
    # Beyond what was measured it goes on in a straight line.
    assert np.diff(cost[len(every) - 1 :], 2) == pytest.approx(0, abs=1e-9)
    assert (np.diff(cost) >= 0).all()


@given(LEVELS, SLOPES, st.lists(st.integers(0, 900), min_size=1, max_size=9), st.integers(0, 200), st.integers(1, 90))
def test_more_of_anything_costs_more(
    levels: list[float], slope: float, contexts: list[int], prompt_rows: int, most: int
) -> None:
    for curve in (made(levels, slope), Corrected(made(levels, slope))):
        cost = curve.costs(Load(contexts, prompt_rows), most)
        assert len(cost) == most + 2
        assert cost[1] > 0
        assert (np.diff(cost) >= -1e-12).all()
        alone = pass_costs(curve, Load(contexts, 0), most)
        assert (alone[1:] <= pass_costs(curve, Load([*contexts, max(contexts)], 0), most)[1:] + 1e-12).all()
        longer = pass_costs(curve, Load([context + 500 for context in contexts], 0), most)
        assert (alone <= longer + 1e-12).all()
        # What the prompt's part takes by itself is left out: the rest is never dearer than a pass of its own.
        assert cost[1] <= alone[1] + prompt_rows * np.diff(alone).max(initial=0) + max(levels)


def test_each_request_looks_at_its_own_context() -> None:
    """Attention is paid for once a request, beyond the shortest context measured."""
    curve = made([1.0, 1.0, 1.0, 1.0], 1e-3)
    one, four = (float(pass_costs(curve, Load([300] * requests, 0), 0)[1]) for requests in (1, 4))
    assert one == pytest.approx(1.2)
    assert four == pytest.approx(1.8)
    assert float(pass_costs(curve, Load([100, 100, 100, 900], 0), 0)[1]) == pytest.approx(1.8, rel=0.01)


@given(LEVELS, SLOPES, st.integers(0, 2000), st.one_of(st.none(), st.integers(0, 200)))
def test_as_many_requests_at_once_as_make_most_tokens(
    levels: list[float], slope: float, context: int, most: int | None
) -> None:
    curve = made(levels, slope)
    chosen = choose_parallel(curve, context, most)
    limit = curve.rows[-1] if most is None else min(curve.rows[-1], max(most, 1))
    assert 1 <= chosen <= limit

    def speed(requests: int) -> float:
        return requests / float(pass_costs(curve, Load([context] * requests, 0), 0)[1])

    # Those that are chosen from are about half as many again each time.
    assert 1.04 * 1.5 * speed(chosen) >= max(speed(requests) for requests in range(1, limit + 1))


def test_requests_at_once_where_a_row_costs_nothing_and_where_it_costs_a_pass() -> None:
    assert choose_parallel(CostCurve((1, 128), (100,), np.array([[1.0, 1.01]])), 100) == 128
    assert choose_parallel(CostCurve((1, 128), (100,), np.array([[1.0, 1.01]])), 100, most=20) == 16
    assert choose_parallel(CostCurve((1, 128), (100,), np.array([[1.0, 128.0]])), 100) == 1
    assert choose_parallel(CostCurve((1, 16, 17, 64), (100,), np.array([[1.0, 1.0, 4.0, 16.0]])), 100) == 16
