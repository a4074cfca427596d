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
from specds.decode.loop import decode_one
from specds.decode.pricing.budget import Adaptive, Budget, Fixed, Terms, allocated
from specds.decode.pricing.curve import CostCurve, Load
from specds.decode.targets import make_target
from specds.decode.verifiers import make_verifier
from specds.model import LanguageModel
from specds.sampling import Sampling

from ...conftest import VOCABULARY, make_model
from ..drafts import Oracle, Wrong, drafts, is_valid
from .curves import FAIR, FREE, STEEP


def seen(draft: Draft, path: tuple[int, ...]) -> Step:
    return Step(1, 0, draft, path, tuple(range(len(path) + 1)), {}, 0.0, 0.0, 0.0, 0.0)


def fit(budget: Budget, draft: Draft, context: int = 100) -> Draft:
    """What is verified of the draft of one request behind so many tokens."""
    budget.prepare(Load([context], 0))
    (kept,) = budget.allocate([draft])
    return kept


@settings(max_examples=200, deadline=None)
@given(drafts(), st.sampled_from([FAIR, FREE, STEEP]), st.integers(0, 5000))
def test_what_is_kept_is_the_best_part_of_the_draft(draft: Draft, curve: CostCurve, context: int) -> None:
    """Against every number of the likeliest nodes, by hand."""
    budget = Adaptive(curve)
    kept = fit(budget, draft, context)
    assert is_valid(kept)
    likely = sorted(draft.path_probability().clip(0, 0.98).tolist(), reverse=True)
    price = curve.at(context)

    def rate(nodes: int) -> float:
        return (1 + sum(likely[:nodes])) / price[nodes + 1]

    best = max(rate(nodes) for nodes in range(len(draft) + 1))
    assert rate(len(kept)) == pytest.approx(best, rel=0.02)


@st.composite
def forests(draw: st.DrawFn) -> list[Draft]:
    """The drafts of one to three requests, of at most four nodes each."""
    found = []
    for _ in range(draw(st.integers(1, 3))):
        size = draw(st.integers(0, 4))
        parents = [draw(st.integers(-1, node - 1)) for node in range(size)]
        score = draw(st.lists(st.sampled_from([0.01, 0.2, 0.5, 0.7, 0.95, 1.0]), min_size=size, max_size=size))
        tokens = np.arange(size, dtype=np.int32)
        found.append(Draft(tokens, np.array(parents, np.int32), np.array(score, np.float32)))
    return found


@st.composite
def stairs(draw: st.DrawFn) -> np.ndarray:
    """float64[16]: what passes take, flat in places and steep in others; entry 0 is nothing."""
    rises = draw(st.lists(st.sampled_from([0.0, 0.0, 0.05, 0.3, 1.0, 4.0]), min_size=14, max_size=14))
    return np.array([0.0, 1.0, *(1.0 + np.cumsum(rises))])


def best_rate(forest: list[Draft], cost: np.ndarray) -> float:
    """Expected tokens per second of the best choice of nodes, each with its parent: every choice there is."""
    parents, chance, first = list[int](), list[float](), 0
    for draft in forest:
        parents += [first + parent if parent >= 0 else -1 for parent in draft.parents.tolist()]
        chance += draft.path_probability().tolist()
        first += len(draft)
    chosen = np.arange(1 << first)[:, None] >> np.arange(first) & 1
    for node, parent in enumerate(parents):
        if parent >= 0:
            chosen = chosen[chosen[:, node] <= chosen[:, parent]]
    counts = chosen.sum(1)
    within = counts <= len(cost) - 2
    return float(((len(forest) + chosen @ np.array(chance)) / cost[1:].take(counts, mode="clip"))[within].max())


def rate_of(kept: list[Draft], cost: np.ndarray) -> float:
    expected = len(kept) + sum(float(draft.path_probability().sum()) for draft in kept)
    return expected / float(cost[1 + sum(map(len, kept))])


@given(forests(), stairs(), st.integers(0, 14))
def test_the_nodes_of_all_requests_together_are_the_best_choice_there_is(
    forest: list[Draft], cost: np.ndarray, most: int
) -> None:
    cost = cost[: most + 2]
    chance = np.concatenate([draft.path_probability().astype(np.float64) for draft in forest])
    taken, first, kept = allocated(chance, cost, float(len(forest))), 0, []
    for draft in forest:
        own = np.flatnonzero(taken[first : first + len(draft)])
        assert all(parent < 0 or parent in own for parent in draft.parents[own])
        kept.append(draft.keep(own))
        first += len(draft)
    assert taken.sum() <= most
    assert rate_of(kept, cost) == pytest.approx(best_rate(forest, cost), rel=1e-5)


@given(forests(), stairs(), st.sampled_from([0, 40]))
def test_a_budget_takes_the_best_part_of_all_requests_by_what_the_pass_costs(
    forest: list[Draft], cost: np.ndarray, prompt_rows: int
) -> None:
    curve = CostCurve(tuple(range(1, 16)), (100,), cost[None, 1:])
    load = Load([100] * len(forest), prompt_rows)
    for budget in (Adaptive(curve), Adaptive(curve, Terms(np.ones(16)), 14)):
        budget.prepare(load)
        kept = budget.allocate([Draft(one.tokens, one.parents, one.score.clip(0, 0.98)) for one in forest])
        priced = curve.costs(load, 14)
        assert all(map(is_valid, kept))
        best, plain = best_rate(forest, priced), len(forest) / float(priced[1])
        if len(forest) > 1 and not any(map(len, kept)):
            assert best <= 1.09 * plain  # of many requests drafts must be worth more than the curve may be wrong by
        else:
            assert rate_of(kept, priced) == pytest.approx(best, rel=0.03)


def test_drafts_shrink_as_others_fill_the_pass() -> None:
    """A flat pass of 16 query tokens: one request has them to itself, sixteen have one each."""
    curve = CostCurve((1, 16, 17, 64), (100,), np.array([[1.0, 1.1, 2.0, 8.0]]))
    draft = chain(range(20), [0.8] * 20)
    sizes = []
    for requests in (1, 2, 4, 8, 16):
        budget = Adaptive(curve)
        budget.prepare(Load([100] * requests, 0))
        sizes.append([len(kept) for kept in budget.allocate([draft] * requests)])
    assert sizes[0] == [15]
    assert [sum(one) + len(one) for one in sizes] == [16] * 5
    assert sizes[-1] == [0] * 16


def test_a_drafter_that_weighs_its_drafts_is_told_what_others_take() -> None:
    terms = Terms(np.ones(65))
    budget = Adaptive(FAIR, terms, 63)
    budget.prepare(Load([100], 0))
    assert (terms.gain, len(terms.cost)) == (1.0, 65)
    assert terms.cost[1:].tolist() == pytest.approx(FAIR.at(100)[1:65].tolist())
    draft = chain(range(4), [0.95] * 4)
    for _ in range(50):
        budget.prepare(Load([100] * 3, 0))
        budget.allocate([draft] * 3)
    budget.prepare(Load([100] * 3, 0))
    # The two others have eight nodes, nearly four tokens each besides their own.
    assert 3 < terms.gain < 3 + 8
    assert terms.cost[1] > FAIR.at(100)[3] + 0.3
    assert len(terms.cost) == 65
    for _ in range(80):
        budget.allocate([chain((), ())] * 3)
    budget.prepare(Load([100] * 3, 0))
    assert terms.gain == pytest.approx(3.0, abs=1e-3)


def test_free_rows_are_all_taken_and_expensive_ones_none() -> None:
    draft = chain(range(20), [0.9] * 20)
    assert len(fit(Adaptive(FREE), draft, 100)) == 20
    assert len(fit(Adaptive(STEEP), chain([1], [0.5]), 100)) == 0
    assert 3 < len(fit(Adaptive(FAIR), draft, 100)) < 20


def test_scores_that_expect_too_much_are_scaled_down_and_forgiven_in_time() -> None:
    budget = Adaptive(FAIR)
    draft = chain([1, 2, 3], [0.9, 0.9, 0.9])
    kept = [len(fit(budget, draft, 100))]
    for _ in range(20):
        budget.learn(seen(draft, ()))
        kept.append(len(fit(budget, draft, 100)))
    assert kept[0] == 3
    assert kept[-1] == 0
    for _ in range(300):
        budget.learn(seen(Draft(*(one[:0] for one in (draft.tokens, draft.parents, draft.score))), ()))
    assert len(fit(budget, draft, 100)) > 0
    for _ in range(20):
        budget.learn(seen(draft, (0, 1, 2)))
    assert len(fit(budget, draft, 100)) == 3


def test_only_nodes_whose_parent_was_accepted_are_judged() -> None:
    budget = Adaptive(FAIR)
    draft = Draft(np.array([1, 2, 3, 4], np.int32), np.array([-1, -1, 0, 1], np.int32), np.full(4, 0.5, np.float32))
    for _ in range(50):
        budget.learn(seen(draft, (0, 2)))
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
    return decode_one(
        target, drafter, make_verifier("greedy", Sampling()), [9, 30, 12], max_new_tokens=length, budget=budget
    )  # type: ignore[arg-type]


def test_a_fixed_budget_is_the_likeliest_nodes() -> None:
    draft = Draft(np.array([1, 2, 3], np.int32), np.array([-1, -1, 1], np.int32), np.array([0.1, 0.5, 0.9], np.float32))
    assert fit(Fixed(2), draft, 9).tokens.tolist() == [2, 3]
    assert len(fit(Fixed(0), draft, 9)) == 0
