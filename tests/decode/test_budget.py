"""What a step may cost: the curve, and the choice made by it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specds.decode import cost
from specds.decode.budget import Auto, Fixed
from specds.decode.contracts import Forward, Step
from specds.decode.cost import Corrected, CostCurve
from specds.decode.counters import Counters
from specds.decode.draft import Draft, chain
from specds.decode.engine import Engine
from specds.decode.loop import decode
from specds.decode.targets import make_target
from specds.decode.verifiers import make_verifier
from specds.model import LanguageModel
from specds.sampling import Sampling

from ..conftest import VOCABULARY, make_model
from .drafts import Oracle, Wrong, drafts
from .test_draft import is_valid

# A row costs a tenth of a pass, as on a CPU; next to nothing, as on a GPU; or the second one as much as the first.
FAIR = CostCurve((1, 65), (100,), np.array([[1.0, 7.4]]))
FREE = CostCurve((1, 65), (100,), np.array([[1.0, 1.01]]))
STEEP = CostCurve((1, 2, 65), (100,), np.array([[1.0, 2.0, 5.0]]))


def seen(draft: Draft, path: tuple[int, ...]) -> Step:
    return Step(1, 0, draft, path, tuple(range(len(path) + 1)), {}, 0.0, 0.0, 0.0, 0.0)


@settings(max_examples=200, deadline=None)
@given(drafts(), st.sampled_from([FAIR, FREE, STEEP]), st.integers(0, 5000))
def test_what_is_kept_is_the_best_part_of_the_draft(draft: Draft, curve: CostCurve, context: int) -> None:
    """Against every number of the likeliest nodes, by hand."""
    budget = Auto(curve)
    kept = budget.fit(draft, context)
    assert is_valid(kept)
    likely = sorted(draft.path_probability().clip(0, 0.98).tolist(), reverse=True)
    price = curve.at(context)

    def rate(nodes: int) -> float:
        return (1 + sum(likely[:nodes])) / price[nodes + 1]

    best = max(rate(nodes) for nodes in range(len(draft) + 1))
    assert rate(len(kept)) == pytest.approx(best, rel=0.02)


def test_free_rows_are_all_taken_and_dear_ones_none() -> None:
    draft = chain(range(20), [0.9] * 20)
    assert len(Auto(FREE).fit(draft, 100)) == 20
    assert len(Auto(STEEP).fit(chain([1], [0.5]), 100)) == 0
    assert 3 < len(Auto(FAIR).fit(draft, 100)) < 20


def test_scores_that_promise_too_much_are_believed_less_and_forgiven_in_time() -> None:
    budget = Auto(FAIR)
    draft = chain([1, 2, 3], [0.9, 0.9, 0.9])
    kept = [len(budget.fit(draft, 100))]
    for _ in range(20):
        budget.observe(seen(draft, ()))
        kept.append(len(budget.fit(draft, 100)))
    assert kept[0] == 3
    assert kept[-1] == 0
    for _ in range(300):
        budget.observe(seen(Draft(*(one[:0] for one in (draft.tokens, draft.parents, draft.score))), ()))
    assert len(budget.fit(draft, 100)) > 0
    for _ in range(20):
        budget.observe(seen(draft, (0, 1, 2)))
    assert len(budget.fit(draft, 100)) == 3


def test_only_nodes_whose_parent_was_accepted_are_judged() -> None:
    budget = Auto(FAIR)
    draft = Draft(np.array([1, 2, 3, 4], np.int32), np.array([-1, -1, 0, 1], np.int32), np.full(4, 0.5, np.float32))
    for _ in range(50):
        budget.observe(seen(draft, (0, 2)))
    worth = budget.worth()
    assert worth[0] == pytest.approx(1.0, abs=0.05)  # one of two halves
    assert worth[1] == pytest.approx(2.0, abs=0.1)  # node 3 stood under a rejected one: the one half came true
    assert worth[2] == worth[1]  # nothing is known of it


@pytest.mark.parametrize("curve", [FAIR, STEEP])
def test_drafts_that_are_always_wrong_cost_next_to_nothing(curve: CostCurve) -> None:
    model = make_model(stop=False)
    expected = [step.tokens[0] for step in Engine(model).steps([9, 30, 12], 200)]
    steps = list(run(model, Wrong(expected, VOCABULARY), Auto(curve), 200))
    assert [token for step in steps for token in step.tokens] == expected
    # After a few wrong guesses nearly every step is plain.
    price = curve.at(100)
    spent = sum(price[len(step.draft) + 1] for step in steps)
    assert spent < 1.05 * price[1] * len(steps)
    assert sum(len(step.draft) > 0 for step in steps[20:]) < 0.2 * len(steps)


def test_drafts_that_are_always_right_are_taken_whole() -> None:
    model = make_model(stop=False)
    expected = [step.tokens[0] for step in Engine(model).steps([9, 30, 12], 200)]
    steps = list(run(model, Oracle(expected, VOCABULARY), Auto(FREE), 200))
    assert [token for step in steps for token in step.tokens] == expected
    assert Counters.of(steps).mat > 10


def run(model: LanguageModel, drafter: object, budget: Auto, length: int) -> object:
    target = make_target(model)
    return decode(
        target, drafter, make_verifier("greedy", Sampling()), [9, 30, 12], max_new_tokens=length, budget=budget
    )  # type: ignore[arg-type]


def test_a_fixed_budget_is_the_likeliest_nodes() -> None:
    draft = Draft(np.array([1, 2, 3], np.int32), np.array([-1, -1, 1], np.int32), np.array([0.1, 0.5, 0.9], np.float32))
    assert Fixed(2).fit(draft, 9).tokens.tolist() == [2, 3]
    assert len(Fixed(0).fit(draft, 9)) == 0


def test_the_curve_is_linear_between_what_was_measured_and_beyond() -> None:
    curve = CostCurve((1, 3, 5), (100, 200), np.array([[1.0, 2.0, 2.0], [2.0, 4.0, 6.0]]))
    assert curve.at(100).tolist() == [0, 1, 1.5, 2, 2, 2]
    assert curve.at(150).tolist() == [0, 1.5, 2.25, 3, 3.5, 4]
    assert curve.at(300).tolist() == [0, 3, 4.5, 6, 8, 10]
    assert curve.at(1).tolist() == [0, 1, 1.5, 2, 2, 2]


@pytest.mark.parametrize("runtime", ["generic", "cpu"])
def test_measuring_leaves_the_target_as_it_was(runtime: str, tiny: LanguageModel) -> None:
    target = make_target(tiny, runtime)
    prompt = [5, 6, 7, 8, 9]
    before = target.prefill(prompt).logits.clone()
    curve = cost.measure(target, vocabulary=VOCABULARY, rows=[1, 4, 16], contexts=[8, 64], repeats=2)
    assert curve.rows == (1, 4, 16)
    assert curve.seconds.shape == (2, 3)
    assert (np.diff(curve.seconds, axis=1) >= 0).all()
    assert (curve.seconds > 0).all()
    np.testing.assert_allclose(target.prefill(prompt).logits, before, atol=1e-5)


def test_a_curve_is_kept_and_what_is_none_is_not_believed(tmp_path: Path) -> None:
    path = tmp_path / "profiles" / "one.json"
    assert cost.load(path) is None
    cost.save(FAIR, path)
    again = cost.load(path)
    assert again is not None
    assert (again.rows, again.contexts, again.seconds.tolist()) == (FAIR.rows, FAIR.contexts, FAIR.seconds.tolist())
    good = json.loads(path.read_text())
    for change in (
        {"format": "another"},
        {"rows": [2, 65]},
        {"rows": [1, 1 << 40]},
        {"rows": [65, 1]},
        {"seconds": [[1.0]]},
        {"seconds": [[1.0, float("nan")]]},
        {"seconds": [[0.0, 1.0]]},
        {"contexts": []},
        {"contexts": "x"},
    ):
        path.write_text(json.dumps({**good, **change}))
        assert cost.load(path) is None, change
    for text in ("", "[1]", "null", "[" * 100_000, "\0"):
        path.write_text(text)
        assert cost.load(path) is None


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
    passes = cost.Passes(rows, contexts, seconds, prompts, 1e-3 * prompts)
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
    again = cost.Passes(*more, prompts[:0], prompts[:0]).curve()
    assert again is not None
    assert again.rows == (1, 2, 5, 9)
    many = rows > 1
    for kept in (many, ~many):
        assert cost.Passes(rows[kept], contexts[kept], seconds[kept], prompts, 1e-3 * prompts).curve() is None


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 9000), st.floats(0, 1e6)), max_size=80),
    st.lists(st.tuples(st.integers(1, 9000), st.floats(0, 1e6)), max_size=9),
)
def test_any_passes_are_a_sound_curve(passes: list[tuple[int, int, float]], asked: list[tuple[int, float]]) -> None:
    passes = [(1, 5, 1e-9), (2, 9, 1e-9)] * 10 + passes
    rows, contexts, seconds = (np.array(one) for one in zip(*passes, strict=True))
    prompts = np.array([tokens for tokens, _ in asked], np.int64), np.array([took for _, took in asked])
    curve = cost.Passes(rows, contexts, seconds.astype(float), *prompts).curve()
    assert curve is not None
    assert list(curve.rows) == sorted(set(curve.rows))
    for context in (0, 77, 10_000):
        found = curve.at(context)
        assert np.isfinite(found).all()
        assert (np.diff(found) >= 0).all()


def test_an_engine_takes_the_curve_that_was_kept(tiny: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(cost, "quick", lambda *rest: asked.append(rest) or FREE)
    monkeypatch.setattr(cost, "load", lambda path: None)
    monkeypatch.setattr(cost, "save", lambda curve, path: None)
    Engine(tiny, "none")
    Engine(tiny, "pld", budget=4)
    assert not asked
    Engine(tiny, "pld")
    assert len(asked) == 1
    monkeypatch.setattr(cost, "load", lambda path: FREE)
    Engine(tiny, "pld")
    assert len(asked) == 1


class Sluggish:
    """A target whose first pass takes for ever, as where something is compiled."""

    def __init__(self, clock: list[float]) -> None:
        self.clock, self.passes = clock, 0

    def prefill(self, tokens: object) -> None:
        self.clock[0] += 100.0

    def forward(self, last: int, draft: Draft) -> object:
        self.passes += 1
        self.clock[0] += 50.0 if self.passes == 1 else 0.5 + 0.01 * len(draft)
        return Forward(torch.zeros(1, 1))


def test_a_slow_start_is_not_taken_for_a_slow_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(cost.time, "perf_counter", lambda: clock[0])
    curve = cost.quick(Sluggish(clock), 100, 8192)  # type: ignore[arg-type]
    assert curve.rows[-1] >= 16  # whatever it takes
    assert curve.seconds[0, 0] == pytest.approx(0.5)


def test_a_cost_is_never_negative_however_noisy_the_measurement() -> None:
    curve = CostCurve((1, 2, 4), (64, 512, 2048), np.array([[10, 11, 12], [15, 15, 15], [11, 11, 12]]) / 1e3)
    for context in (1, 64, 300, 2048, 8000, 100_000):
        assert (curve.at(context)[1:] > 0).all()


def passed(rows: int, seconds: float, index: int = 1) -> Step:
    draft = chain(range(rows - 1), [0.5] * (rows - 1))
    return Step(index, 100, draft, (), (0,), {}, 0.0, seconds, 0.0, 0.0)


def test_passes_correct_a_curve_that_was_measured_while_the_machine_was_busy() -> None:
    """The true curve is flat up to four rows; the kept one says that each row costs as much as the first."""
    kept = CostCurve((1, 2, 4, 8, 16), (100,), np.array([[1.0, 2.0, 4.0, 8.0, 16.0]]))
    curve = Corrected(kept)
    draft = chain(range(8), [0.6] * 8)
    assert len(Auto(curve).fit(draft, 100)) == 0
    for _ in range(200):
        curve.observe(passed(1, 0.5))
        curve.observe(passed(4, 0.6))
    now = curve.at(100)
    assert now[1] == pytest.approx(0.5, rel=0.05)
    assert now[4] == pytest.approx(0.6, rel=0.05)
    # Between them the correction is between theirs; beyond them it is that of the largest seen.
    assert now[1] <= now[2] <= now[3] <= now[4]
    assert now[16] == pytest.approx(16 * 0.6 / 4, rel=0.05)
    assert len(Auto(curve).fit(draft, 100)) >= 1


def test_more_rows_are_tried_before_they_are_ruled_out() -> None:
    """Memory is slow now: one row takes three times as long, and eight take no longer than that."""
    curve = Corrected(CostCurve((1, 2, 4, 8, 16), (100,), np.array([[1.0, 1.2, 1.5, 2.8, 6.0]])))
    for _ in range(200):
        curve.observe(passed(1, 3.0))
    now = curve.at(100)
    assert now[1] == pytest.approx(3.0, rel=0.05)
    assert now[2] == now[8] == pytest.approx(now[1], rel=0.01)
    assert now[16] == pytest.approx(6.0)
    # What was not seen for long is tried again.
    for _ in range(200):
        curve.observe(passed(8, 9.0))
    assert curve.at(100)[8] == pytest.approx(9.0, rel=0.1)
    for _ in range(600):
        curve.observe(passed(1, 3.0))
    assert curve.at(100)[8] == pytest.approx(now[1], rel=0.01)
    curve.observe(passed(8, 3.1))
    assert curve.at(100)[8] < 3.3


def test_the_prompts_pass_and_a_pause_of_the_machine_say_little() -> None:
    curve = Corrected(FAIR)
    before = curve.at(100)
    curve.observe(passed(1, 50.0, index=0))
    assert (curve.at(100) == before).all()
    for _ in range(50):
        curve.observe(passed(1, 1.0))
    curve.observe(passed(1, 1000.0))
    assert curve.at(100)[1] < 1.05
    curve.observe(passed(999, 1.0))  # more rows than the curve knows


@given(st.lists(st.tuples(st.integers(1, 70), st.floats(1e-6, 1e6)), max_size=60), st.integers(0, 5000))
def test_a_corrected_curve_is_a_curve(passes: list[tuple[int, float]], context: int) -> None:
    curve = Corrected(FAIR)
    for rows, seconds in passes:
        curve.observe(passed(rows, seconds))
    found = curve.at(context)
    assert found[0] == 0 < found[1]
    assert np.isfinite(found).all()
    assert (np.diff(found) >= 0).all()
