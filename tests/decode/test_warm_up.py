"""Rehearsals: every drafter runs before it is timed, and nothing of it is left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from specds.decode.auto.cross_request import CrossRequest
from specds.decode.auto.drafter import Auto
from specds.decode.auto.ngrams import Followers, Likeliest
from specds.decode.contracts import Resources
from specds.decode.draft import Draft
from specds.decode.drafters import DRAFTERS
from specds.decode.engine import Engine
from specds.decode.method import Method
from specds.decode.pricing.budget import Adaptive, Fixed
from specds.decode.pricing.curve import CostCurve
from specds.decode.registry import load
from specds.decode.warm_up import warm_up
from specds.model import LanguageModel

from ..conftest import make_model

ALONE = [
    name for name in DRAFTERS if name not in ("none", "model") and not load(DRAFTERS, name, "drafter").store_required
]
CURVE = CostCurve((1, 65), (100,), np.array([[1.0, 1.01]]))


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return make_model()


class Watched:
    """Notes how large drafts are."""

    def __init__(self, drafter: Any) -> None:
        self._drafter, self.sizes = drafter, list[int]()
        self.needs, self.start, self.observe = drafter.needs, drafter.start, drafter.observe

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafter, name)

    def propose(self, budget: int) -> Draft:
        draft: Draft = self._drafter.propose(budget)
        self.sizes.append(len(draft))
        return draft


@pytest.mark.parametrize("make", [lambda: Fixed(8), lambda: Adaptive(CURVE)])
@pytest.mark.parametrize("name", ALONE)
def test_every_drafter_drafts_in_it(model: LanguageModel, name: str, make: Callable[[], Any]) -> None:
    drafter = Watched(Engine(model, Method(name, budget=8))._assembly.make_drafter())
    warm_up(drafter, make(), model)
    assert max(drafter.sizes) >= 1


def test_the_tables_of_auto_grow_in_it(model: LanguageModel) -> None:
    """Growing is compiled code, too."""
    shared = CrossRequest(CURVE)
    drafter = Auto(Auto.Options(), Resources(shared=shared))
    warm_up(drafter, Fixed(shared.most), model)
    assert len(shared.likeliest.rows.keys) > len(Likeliest().rows.keys)
    assert len(shared.answers.rows) > len(Followers().rows)


@pytest.mark.parametrize("name", ALONE)
def test_an_engine_has_run_its_drafter_before_the_first_prompt_and_learned_nothing(
    model: LanguageModel, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    warmed = []

    def watch(drafter: Any, budget: Any, model: LanguageModel) -> None:
        warm_up(drafter, budget, model)
        warmed.append((drafter, budget))

    monkeypatch.setattr("specds.decode.assembly.warm_up", watch)
    monkeypatch.setattr("specds.decode.pricing.measurement.known", lambda *_: CURVE)
    engine = Engine(model, Method(name))
    assert len(warmed) == 1
    assert warmed[0][1] is not engine._assembly.budget
    shared = engine._assembly.resources.shared
    if shared is not None:
        assert shared.terms.drafting == 0.0
        assert shared.draft_gains.observed == 0
        assert not shared.corrections.curvature.any()
