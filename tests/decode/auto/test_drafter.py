"""Drafter auto: what it makes of good sources and of adversarial ones."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from specds.datastore.suffix import SuffixIndex
from specds.decode.auto.cross_request import CrossRequest
from specds.decode.auto.drafter import Auto
from specds.decode.auto.features import SOURCES
from specds.decode.contracts import Resources
from specds.decode.draft import Draft
from specds.decode.engine import Engine
from specds.decode.method import Method
from specds.decode.pricing.curve import CostCurve
from specds.errors import UsageError

from ...conftest import make_model
from ..test_loop import PROMPT
from .simulation import Documents, Simulation, index_of

# A row costs a tenth of a pass, as on a CPU.
FAIR = CostCurve((1, 65), (100,), np.array([[1.0, 7.4]]))


def drive(
    text: list[int], prompt: int, shared: CrossRequest, indexes: Sequence[SuffixIndex] = (), session: str = "auto"
) -> list[tuple[Draft, int]]:
    """A new request through a text."""
    drafter = Auto(Auto.Options(session=session), Resources(indexes, shared=shared))
    return Simulation(drafter, shared, text, prompt).run()


def near_misses(text: list[int], random: np.random.Generator) -> Documents:
    """Documents that hold every token of a text, each followed by what does not follow it there.

    Longer contexts would overlap, and tell the truth in their middle.
    """
    return [([token], [int(wrong) for wrong in random.integers(20_000, 30_000, 6)]) for token in text]


@pytest.mark.parametrize("kind", ["nothing", "random", "foreign", "near misses", "frequent misses"])
def test_adversarial_datastores_are_soon_drafted_from_no_more(kind: str) -> None:
    random = np.random.default_rng(3)
    text = [int(token) for token in random.permutation(20_000)[:160]]
    documents: dict[str, Documents] = {
        "random": [([1], [int(token) for token in random.integers(0, 20_000, 500)]) for _ in range(40)],
        "foreign": [([1], [int(token) for token in random.integers(30_000, 40_000, 500)]) for _ in range(40)],
        "near misses": near_misses(text, random),
        "frequent misses": [one for one in near_misses(text, random) for _ in range(5)],
    }
    indexes = [] if kind == "nothing" else [index_of(documents[kind])]
    drafts = [draft for draft, _ in drive(text, 8, CrossRequest(FAIR), indexes)]
    assert len(drafts) > 140
    rows = [1 + len(draft) for draft in drafts]
    assert max(rows[32:]) <= 2
    assert np.mean(rows[32:]) <= 1.2


def test_a_good_store_beside_an_adversarial_one_still_serves() -> None:
    random = np.random.default_rng(5)
    text = [int(token) for token in random.integers(0, 20_000, 200)]
    steps = []
    for bad in (False, True):
        indexes = [index_of(near_misses(text, random))] if bad else []
        indexes.append(index_of([(text[:4], text[4:])]))
        steps.append(len(drive(text, 8, CrossRequest(FAIR), indexes)))
    assert steps[0] < 40
    assert steps[1] < 2 * steps[0] + 20


def test_a_source_that_was_wrong_is_drafted_from_again_when_it_is_right() -> None:
    random = np.random.default_rng(4)
    foreign = [int(token) for token in random.integers(0, 20_000, 80)]
    truth = [int(token) for token in random.integers(0, 20_000, 400)]
    index = index_of([*near_misses(foreign, random), (truth[:2], truth[2:])])
    steps = drive(foreign + truth, 8, CrossRequest(FAIR), [index])
    assert sum(accepted for _, accepted in steps) > 150


def test_earlier_answers_of_a_run_are_drafted_from_where_requests_share_what_they_learn() -> None:
    random = np.random.default_rng(6)
    text = [int(token) for token in random.permutation(20_000)[:80]]

    def steps_of_the_second(shared: CrossRequest, session: str) -> int:
        found = 0
        for _ in range(2):
            found = len(drive(text, 8, shared, session=session))
        return found

    alone = steps_of_the_second(CrossRequest(FAIR), "no")
    assert alone > 60
    assert steps_of_the_second(CrossRequest(FAIR), "auto") < 0.6 * alone
    assert steps_of_the_second(CrossRequest(), "yes") < alone / 2
    assert steps_of_the_second(CrossRequest(), "auto") == steps_of_the_second(CrossRequest(), "no")
    with pytest.raises(UsageError, match="session is 'maybe'"):
        Auto(Auto.Options(session="maybe"))


def test_drafts_of_a_budget_depend_on_the_request_alone_and_name_their_sources() -> None:
    model = make_model(stop=False)
    engine = Engine(model, Method("auto", budget=8))
    first = [step.draft for step in engine.steps(PROMPT, 40)]
    list(engine.steps(PROMPT[::-1], 40))
    second = [step.draft for step in engine.steps(PROMPT, 40)]
    assert [draft.tokens.tolist() for draft in first] == [draft.tokens.tolist() for draft in second]
    names = {name for draft in first if draft.origin is not None for name in draft.origin.names()}
    assert {part for name in names for part in name.split("+")} <= set(SOURCES)
    steps = list(Engine(model, Method("auto", {"without": "recycling+alternatives"}, budget=8)).steps(PROMPT, 40))
    origins = [step.draft.origin for step in steps if step.draft.origin is not None]
    assert {name for origin in origins for name in origin.names()} == {"context"}
    assert all("tree" in step.asked for step in steps[1:-1])
    with pytest.raises(UsageError, match="no source 'nobody'"):
        Engine(model, Method("auto", {"without": "nobody"}))


def test_a_draft_model_is_a_source_like_others() -> None:
    model = make_model(stop=False)
    plain = [token for step in Engine(model).steps(PROMPT, 30) for token in step.tokens]
    for budget in (6, None):
        engine = Engine(model, Method("auto", budget=budget, draft_model="skip:1"))
        steps = list(engine.steps(PROMPT, 30))
        assert [token for step in steps for token in step.tokens] == plain
        assert any("model" in step.asked for step in steps)


def test_where_a_pass_takes_less_than_drafting_nothing_is_drafted() -> None:
    curve = CostCurve((1, 65), (100,), np.array([[1e-7, 7e-7]]))
    random = np.random.default_rng(6)
    text = [int(token) for token in random.integers(0, 50, 30)] * 30
    text[2::4] = [int(token) for token in random.integers(0, 50, len(text[2::4]))]
    asked = []
    for prices in (FAIR, curve):
        found = drive(text, 30, CrossRequest(prices))
        asked.append(sum(len(draft) > 0 for draft, _ in found) / len(found))
    assert asked[0] > 0.5
    assert asked[1] < 0.25
