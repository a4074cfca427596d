"""Whoever makes a method look better than it is, is found out."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specds.calibration.bench.contenders import Ours, Peer, Worker
from specds.calibration.bench.results import read_rows
from specds.decode.contracts import NO_RESOURCES, Drafter, Forward, Item, NoOptions, Resources, Signal, Step
from specds.decode.draft import Draft, chain, empty
from specds.decode.drafters import DRAFTERS
from specds.decode.engine import Engine
from specds.decode.method import Method
from specds.decode.prompt import hold
from specds.decode.request import Request, Source
from specds.model import LanguageModel
from specds.sampling import Sampling

from .conftest import Bench, ours


class Honest(Drafter):
    """Proposes nothing."""

    needs = frozenset({Signal.EMBEDDING})

    def __init__(self, options: NoOptions, resources: Resources = NO_RESOURCES) -> None:
        self.target: Any = None
        self.text: list[int] = []

    def start(self, prompt: Sequence[int]) -> None:
        self.text = [*prompt]

    def propose(self, budget: int) -> Draft:
        return empty()

    def observe(self, step: Step) -> None:
        self.text += step.tokens
        if step.index == 0:
            # What is handed over for embeddings is a method of the target, and so the target itself.
            self.target = step.signals[Signal.EMBEDDING].__self__


class Forger(Honest):
    """Makes the target see another token as its likeliest."""

    def observe(self, step: Step) -> None:
        super().observe(step)
        if step.index or getattr(self.target, "forged", False):
            return
        forward = self.target.forward

        def forged(items: Sequence[Item]) -> Forward:
            result: Forward = forward(items)
            if items[0].tokens[0] % 3 == 0:
                best = int(result.logits[0].argmax())
                result.logits[0, best] -= 1000.0
            return result

        self.target.forward, self.target.forged = forged, True


class Clairvoyant(Honest):
    """Asks the target itself what it will say, in passes that no step counts."""

    def propose(self, budget: int) -> Draft:
        ahead: list[int] = []
        slot = hold(self.target, self.text[:-1], len(self.text) + budget)
        for _ in range(min(budget, 3)):
            logits = self.target.forward([Item.chain(slot, [self.text[-1], *ahead])]).logits
            ahead.append(int(logits[0].argmax()))
        self.target.close(slot)
        return chain(np.array(ahead, np.int32), [0.9] * len(ahead))


class Sleeper(Honest):
    """Works where no step's clock runs."""

    def __init__(self, options: NoOptions, resources: Resources = NO_RESOURCES) -> None:
        super().__init__(options, resources)
        time.sleep(0.05)


class Ponderer(Honest):
    """As slow, but where the clock runs: that is not cheating."""

    def start(self, prompt: Sequence[int]) -> None:
        super().start(prompt)
        time.sleep(0.05)


class Merging(Engine):
    """Reports two steps as one."""

    def decode(self, requests: Source, parallel: int = 1) -> Iterator[Request]:
        held: Step | None = None
        index = 0
        for request in super().decode(requests, parallel):
            step = request.step
            assert step is not None
            if held is None and not request.done:
                held = step
                continue
            told = step if held is None else replace(held, tokens=(*held.tokens, *step.tokens))
            request.step = replace(told, index=index)
            yield request
            request.step, held, index = step, None, index + 1


class Skimming(Engine):
    """Leaves out every other step, so that it seems to have made fewer."""

    def decode(self, requests: Source, parallel: int = 1) -> Iterator[Request]:
        for request in super().decode(requests, parallel):
            step = request.step
            assert step is not None
            if step.index % 2 == 0 or request.done:
                request.step = replace(step, index=step.index // 2)
                yield request
                request.step = step


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    for cheat in (Honest, Forger, Clairvoyant, Sleeper, Ponderer):
        monkeypatch.setitem(DRAFTERS, cheat.__name__.lower(), f"{__name__}:{cheat.__name__}")


def kinds(summary: dict[str, Any], method: str) -> set[str]:
    assert summary["valid"] == (not summary["problems"])
    return {one["kind"] for one in summary["problems"] if one["method"] == method}


def test_who_does_not_cheat_is_not_accused(run_bench: Bench) -> None:
    summary = run_bench("none,honest,pld@4,ponderer")
    assert summary["problems"] == []
    assert summary["groups"][0]["methods"]["ponderer"]["drafting"]["value"] > 0.5


def test_a_changed_token_is_found_with_its_place_and_gap(run_bench: Bench) -> None:
    summary = run_bench("none,forger,honest")
    assert kinds(summary, "forger") == {"text"}
    assert {one["method"] for one in summary["problems"]} == {"forger"}
    rows = {(row["method"], row["prompt"]): row for row in read_rows(summary["path"])}
    for one in summary["differences"]:
        plain, other = (rows[name, one["prompt"]]["tokens"][0] for name in ("none", "forger"))
        at = one["differs_at"]
        assert plain[:at] == other[:at]
        assert plain[at] != other[at]
        assert one["gap"] > 1e-3
        assert not one["near_tie"]


def test_what_is_no_further_than_the_near_tie_is_reported_and_excused(run_bench: Bench) -> None:
    summary = run_bench("none,forger", near_tie=100.0)
    assert summary["valid"]
    assert summary["differences"]
    assert all(one["near_tie"] and 0 < one["gap"] < 100 for one in summary["differences"])


def test_a_changed_token_is_found_above_temperature_0(run_bench: Bench) -> None:
    sampling = Sampling(temperature=0.8, top_k=20, seed=3)
    summary = run_bench("none,forger,honest", sampling=sampling)
    assert {one["method"] for one in summary["problems"]} == {"forger"}
    assert kinds(summary, "forger") == {"text"}


def test_passes_that_no_step_counts_are_found(run_bench: Bench) -> None:
    summary = run_bench("none,clairvoyant@8")
    assert kinds(summary, "clairvoyant@8") == {"steps"}
    assert "passes" in summary["problems"][0]["text"]
    # It is the right text, and would have looked like three tokens for one pass.
    assert summary["groups"][0]["methods"]["clairvoyant@8"]["mat"]["value"] > 2
    assert summary["differences"] == []


@pytest.mark.parametrize("engine", [Merging, Skimming])
def test_steps_that_do_not_fit_the_passes_are_found(
    engine: type[Engine], run_bench: Bench, tiny: LanguageModel
) -> None:
    summary = run_bench([*ours(tiny, "none"), Ours("cheat", engine(tiny, Method("pld", budget=4)))])
    assert "steps" in kinds(summary, "cheat")
    assert {one["method"] for one in summary["problems"]} == {"cheat"}
    assert any("passes" in one["text"] for one in summary["problems"])


def test_time_that_no_step_counts_is_found(run_bench: Bench) -> None:
    summary = run_bench("none,sleeper")
    assert kinds(summary, "sleeper") == {"time"}
    # The speed that is shown holds all of the time.
    assert summary["groups"][0]["methods"]["sleeper"]["seconds"] >= 3 * 0.05


_PEER = """
import json, sys, time
for line in sys.stdin:
    request = json.loads(line)
    time.sleep(0.05)
    answer = {"id": request["id"], "tokens": [5] * request["max_new_tokens"], "lossless": LOSSLESS, "seconds": SECONDS}
    print(json.dumps(answer), flush=True)
"""


@pytest.mark.parametrize(
    ("lossless", "seconds", "found"), [(False, 0.05, set()), (False, 0.001, {"time"}), (True, 0.05, {"text"})]
)
def test_a_peer_is_held_to_what_it_says(
    lossless: bool, seconds: float, found: set[str], run_bench: Bench, tiny: LanguageModel, tmp_path: Path
) -> None:
    program = tmp_path / "peer.py"
    program.write_text(_PEER.replace("LOSSLESS", str(lossless)).replace("SECONDS", str(seconds)))
    worker = Worker([sys.executable, str(program)], tmp_path / "log", 30)
    peer = Peer("other", worker, tiny)
    try:
        summary = run_bench([*ours(tiny, "none"), peer])
    finally:
        peer.close()
    assert kinds(summary, "other") == found
    (shown,) = [one for one in summary["methods"] if one["name"] == "other"]
    assert shown == {"name": "other", "peer": True, "lossless": lossless}
    figures = summary["groups"][0]["methods"]["other"]
    assert figures["mat"] is None
    assert figures["same"] == 0
    assert (figures["log_p"] is None) == lossless  # lossy texts are rated
