"""Measuring a target, and keeping what was measured."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from specds.decode.contracts import Forward, Item
from specds.decode.engine import Engine
from specds.decode.method import Method
from specds.decode.pricing import measurement
from specds.decode.targets import make_target
from specds.model import LanguageModel

from ...conftest import VOCABULARY
from .curves import FAIR, FREE


@pytest.mark.parametrize("runtime", ["generic", "cpu"])
def test_measuring_leaves_the_target_as_it_was(runtime: str, tiny: LanguageModel) -> None:
    target = make_target(tiny, runtime)
    prompt = [5, 6, 7, 8, 9]

    def said() -> torch.Tensor:
        slot = target.open(prompt, 20)
        assert slot is not None
        logits = target.forward([Item.chain(slot, prompt)]).logits.clone()
        target.close(slot)
        return logits

    before = said()
    curve = measurement.measure(target, vocabulary=VOCABULARY, rows=[1, 4, 16], contexts=[8, 64], repeats=2)
    assert curve.rows == (1, 4, 16)
    assert curve.seconds.shape == (2, 3)
    assert (np.diff(curve.seconds, axis=1) >= 0).all()
    assert (curve.seconds > 0).all()
    np.testing.assert_allclose(said(), before, atol=1e-5)


def test_a_curve_is_kept_and_what_is_not_a_curve_is_not_used(tmp_path: Path) -> None:
    path = tmp_path / "profiles" / "one.json"
    assert measurement.load(path) is None
    measurement.save(FAIR, path)
    again = measurement.load(path)
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
        assert measurement.load(path) is None, change
    for text in ("", "[1]", "null", "[" * 100_000, "\0"):
        path.write_text(text)
        assert measurement.load(path) is None


def test_an_engine_takes_the_curve_that_was_kept(tiny: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(measurement, "quick", lambda *rest: asked.append(rest) or FREE)
    monkeypatch.setattr(measurement, "load", lambda path: None)
    monkeypatch.setattr(measurement, "save", lambda curve, path: None)
    Engine(tiny, Method("none"))
    Engine(tiny, Method("pld", budget=4))
    assert not asked
    Engine(tiny, Method("pld"))
    assert len(asked) == 1
    monkeypatch.setattr(measurement, "load", lambda path: FREE)
    Engine(tiny, Method("pld"))
    assert len(asked) == 1


@dataclass
class Place:
    """A slot that holds so many tokens."""

    tokens: list[int]


class Sluggish:
    """A target whose first pass takes for ever, as where something is compiled."""

    chunk = 8192

    def __init__(self, clock: list[float]) -> None:
        self.clock, self.passes = clock, 0

    def open(self, prompt: Sequence[int], length: int) -> Place:
        return Place([])

    def close(self, slot: Place) -> None: ...

    def commit(self, slot: Place, rows: Sequence[int]) -> None:
        slot.tokens += rows

    def forward(self, items: Sequence[Item]) -> Forward:
        (item,) = items
        if not item.slot.tokens:
            self.clock[0] += 100.0
        else:
            self.passes += 1
            self.clock[0] += 50.0 if self.passes == 1 else 0.5 + 0.01 * (len(item.tokens) - 1)
        return Forward(torch.zeros(1, 1))


def test_a_slow_start_is_not_taken_for_a_slow_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(measurement.time, "perf_counter", lambda: clock[0])
    curve = measurement.quick(Sluggish(clock), 100, 8192)  # type: ignore[arg-type]
    assert curve.rows[-1] >= 16  # whatever it takes
    assert curve.seconds[0, 0] == pytest.approx(0.5)
