"""How much of a draft a step verifies."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specds.decode.contracts import Step
from specds.decode.counters import Counters
from specds.decode.draft import Draft, chain
from specds.decode.engine import Engine
from specds.decode.loop import decode
from specds.decode.pricing.budget import Adaptive, Fixed
from specds.decode.pricing.curve import CostCurve
from specds.decode.targets import make_target
from specds.decode.verifiers import make_verifier
from specds.model import LanguageModel
from specds.sampling import Sampling

from ...conftest import VOCABULARY, make_model
from ..drafts import Oracle, Wrong, drafts, is_valid
from .curves import FAIR, FREE, STEEP


def seen(draft: Draft, path: tuple[int, ...]) -> Step:
    return Step(1, 0, draft, path, tuple(range(len(path) + 1)), {}, 0.0, 0.0, 0.0, 0.0)


@settings(max_examples=200, deadline=None)
@given(drafts(), st.sampled_from([FAIR, FREE, STEEP]), st.integers(0, 5000))
def test_what_is_kept_is_the_best_part_of_the_draft(draft: Draft, curve: CostCurve, context: int) -> None:
    """Against every number of the likeliest nodes, by hand."""
    budget = Adaptive(curve)
    kept = budget.fit(draft, context)
    assert is_valid(kept)
    likely = sorted(draft.path_probability().clip(0, 0.98).tolist(), reverse=True)
    price = curve.at(context)

    def rate(nodes: int) -> float:
        return (1 + sum(likely[:nodes])) / price[nodes + 1]

    best = max(rate(nodes) for nodes in range(len(draft) + 1))
    assert rate(len(kept)) == pytest.approx(best, rel=0.02)


def test_free_rows_are_all_taken_and_expensive_ones_none() -> None:
    draft = chain(range(20), [0.9] * 20)
    assert len(Adaptive(FREE).fit(draft, 100)) == 20
    assert len(Adaptive(STEEP).fit(chain([1], [0.5]), 100)) == 0
    assert 3 < len(Adaptive(FAIR).fit(draft, 100)) < 20


def test_scores_that_expect_too_much_are_scaled_down_and_forgiven_in_time() -> None:
    budget = Adaptive(FAIR)
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
    budget = Adaptive(FAIR)
    draft = Draft(np.array([1, 2, 3, 4], np.int32), np.array([-1, -1, 0, 1], np.int32), np.full(4, 0.5, np.float32))
    for _ in range(50):
        budget.observe(seen(draft, (0, 2)))
    factors = budget.factors()
    assert factors[0] == pytest.approx(1.0, abs=0.05)  # one of two halves
    assert factors[1] == pytest.approx(2.0, abs=0.1)  # node 3 stood under a rejected one: the one half came true
    assert factors[2] == factors[1]  # nothing is known of it


@pytest.mark.parametrize("curve", [FAIR, STEEP])
def test_drafts_that_are_always_wrong_cost_next_to_nothing(curve: CostCurve) -> None:
    model = make_model(stop=False)
    expected = [step.tokens[0] for step in Engine(model).steps([9, 30, 12], 200)]
    steps = list(run(model, Wrong(expected, VOCABULARY), Adaptive(curve), 200))
    assert [token for step in steps for token in step.tokens] == expected
    # After a few wrong guesses nearly every step is plain.
    price = curve.at(100)
    spent = sum(price[len(step.draft) + 1] for step in steps)
    assert spent < 1.05 * price[1] * len(steps)
    assert sum(len(step.draft) > 0 for step in steps[20:]) < 0.2 * len(steps)


def test_drafts_that_are_always_right_are_taken_whole() -> None:
    model = make_model(stop=False)
    expected = [step.tokens[0] for step in Engine(model).steps([9, 30, 12], 200)]
    steps = list(run(model, Oracle(expected, VOCABULARY), Adaptive(FREE), 200))
    assert [token for step in steps for token in step.tokens] == expected
    assert Counters.of(steps).mat > 10


def run(model: LanguageModel, drafter: object, budget: Adaptive, length: int) -> object:
    target = make_target(model)
    return decode(
        target, drafter, make_verifier("greedy", Sampling()), [9, 30, 12], max_new_tokens=length, budget=budget
    )  # type: ignore[arg-type]


def test_a_fixed_budget_is_the_likeliest_nodes() -> None:
    draft = Draft(np.array([1, 2, 3], np.int32), np.array([-1, -1, 1], np.int32), np.array([0.1, 0.5, 0.9], np.float32))
    assert Fixed(2).fit(draft, 9).tokens.tolist() == [2, 3]
    assert len(Fixed(0).fit(draft, 9)) == 0
