"""Who is answered when: room, requests that fail, beginnings that requests share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

import numpy as np
import pytest
import torch

from specds.decode.contracts import Forward, Item
from specds.decode.engine import Engine
from specds.decode.method import Method
from specds.decode.pricing.curve import CostCurve
from specds.decode.request import Listed, Request
from specds.errors import ModelError, PromptError
from specds.model import LanguageModel
from specds.sampling import Sampling

from ..conftest import make_model
from .requests import Arriving, Asked, Watched, memory_of, watch

BAD = 99
PAGE = 64


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    """It has a context of a thousand tokens."""
    return make_model(max_position_embeddings=1024, stop=False)


@pytest.fixture(scope="module")
def broken() -> LanguageModel:
    """A model that says what is not a number wherever one token stands."""
    model = make_model(stop=False)
    with torch.no_grad():
        model.network.get_input_embeddings().weight[BAD] = torch.nan
        model.network.lm_head.weight[BAD] = 0.0  # nobody picks it
    return model


def numbers(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(2, 90, length).tolist())


def alone(engine: Callable[[], Engine], asked: Asked) -> tuple[int, ...]:
    """What a request gets that has an engine to itself."""
    steps = engine().steps(asked.tokens, asked.length, sample=asked.sample)
    return tuple(token for step in steps for token in step.tokens)


METHODS = [
    ("none", "auto", 0.0),
    ("auto", "auto", 0.0),
    ("adapld", "auto", 0.8),
    ("pld", "csd", 0.8),
    ("pld", "fly", 0.0),
]


@pytest.mark.parametrize(("drafter", "verifier", "temperature"), METHODS)
def test_a_request_that_is_not_numbers_fails_alone(
    drafter: str, verifier: str, temperature: float, broken: LanguageModel
) -> None:
    def engine() -> Engine:
        return Engine(broken, Method(drafter, budget=6, verifier=verifier), Sampling(temperature), runtime="cpu")

    header = numbers(30)
    asked = [Asked((*header, 5, 6), 12), Asked((*header, BAD, 6), 12), Asked((7, 8), 12), Asked((BAD,), 3)]
    arriving = Arriving(engine(), asked)
    watched = watch(arriving.engine)
    arriving.run(4)
    assert set(arriving.errors) == {1, 3}
    assert all(isinstance(error, ModelError) for error in arriving.errors.values())
    assert not watched.slots
    if verifier == "auto":
        for number in (0, 2):
            assert arriving.text(number) == alone(engine, asked[number])
    assert len(arriving.text(0)) == len(arriving.text(2)) == 12


def test_a_draft_model_that_fails_fails_its_own_request_alone(model: LanguageModel, broken: LanguageModel) -> None:
    def engine() -> Engine:
        return Engine(model, Method("model", budget=4, draft_model=broken), runtime="cpu")

    asked = [Asked((5, 6), 20), Asked((BAD, 6), 20), Asked((7, 8), 20), Asked((9, BAD), 1)]
    arriving = Arriving(engine(), asked)
    watched = watch(arriving.engine)
    arriving.run(3)
    assert set(arriving.errors) == {1}
    assert not watched.slots
    for number in (0, 2, 3):
        assert arriving.text(number) == alone(engine, asked[number])


def test_requests_wait_for_memory_and_only_what_never_fits_fails(model: LanguageModel) -> None:
    """Four pages: two requests of two pages at once, one of four by itself, none of five."""
    asked = [Asked(numbers(length, seed), 20) for seed, length in enumerate((90, 100, 230, 3, 250, 80, 4, 900))]
    engine = Engine(model, runtime="cpu", kv_memory=memory_of(model, 4))
    arriving = Arriving(engine, asked)
    watched = watch(engine)
    arriving.run(8)
    assert {number: type(error) for number, error in arriving.errors.items()} == {4: PromptError, 7: PromptError}
    assert all("--kv-memory" in error.hint for error in arriving.errors.values())
    assert not watched.slots
    assert 2 <= watched.most <= 4
    for number in {*range(8)} - set(arriving.errors):
        assert arriving.text(number) == alone(lambda: Engine(model, runtime="cpu"), asked[number])
    # Whoever waits keeps its place: nobody overtakes the long one.
    first = {number: steps[0].forward_pass for number, steps in arriving.steps.items() if steps}
    assert [first[number] for number in sorted(first)] == sorted(first.values())


def test_memory_that_another_loop_holds_is_not_waited_for(model: LanguageModel) -> None:
    """Nobody would give it back: the one who waits is the one who must."""
    engine = Engine(model, runtime="cpu", kv_memory=memory_of(model, 4))
    first = engine.steps(numbers(150), 60)
    next(first)
    with pytest.raises(PromptError, match="beside what others hold"):
        list(engine.steps(numbers(150, 1), 60))
    first.close()
    assert len(list(engine.steps(numbers(150, 1), 60))) == 60


class Hopeless(Listed):
    """Requests that cannot begin, without end."""

    def __init__(self) -> None:
        super().__init__(())
        self.taken = 0

    def take(self, wait: bool) -> Request | None:
        self.taken += 1
        return Request.failed(PromptError("the prompt has no tokens"))


def test_requests_that_all_fail_are_told_a_few_at_a_time(model: LanguageModel) -> None:
    """A stream of them that never ends must not be taken in whole before the first is told."""
    requests = Hopeless()
    told = Engine(model, runtime="cpu").decode(requests, 4)
    for _ in range(10):
        assert next(told).error is not None
    assert requests.taken <= 14


class Interrupted(Watched):
    """Somebody presses a key in the middle of a pass."""

    left = 6

    def forward(self, items: Sequence[Item]) -> Forward:
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt
        return super().forward(items)


def test_whatever_ends_a_run_gives_all_slots_back(model: LanguageModel) -> None:
    engine = Engine(model, Method("pld", budget=4), runtime="cpu", kv_memory=memory_of(model, 8))
    asked = [Asked(numbers(40, seed), 40) for seed in range(6)]
    target = engine._target
    engine._target = watched = Interrupted(target)
    with pytest.raises(KeyboardInterrupt):
        Arriving(engine, asked).run(4)
    assert not watched.slots
    engine._target = closed = Watched(target)
    running = engine.decode(Arriving(engine, asked), 4)
    for _ in range(7):
        next(running)
    assert len(closed.slots) == 4
    running.close()
    assert not closed.slots
    # All pages are free again: a request that needs every one of them is answered.
    assert len({token for step in engine.steps(numbers(8 * PAGE - 50), 40) for token in step.tokens}) > 1


def reading(engine: Engine, asked: list[Asked], parallel: int) -> int:
    """Query tokens of prompts that were computed."""
    watched = watch(engine)
    arriving = Arriving(engine, asked)
    arriving.run(parallel)
    assert not arriving.errors
    later = sum(1 + len(step.draft) for steps in arriving.steps.values() for step in steps[1:])
    return watched.computed - later


@pytest.mark.parametrize("parallel", [1, 3, 8])
@pytest.mark.parametrize("header", [30, 300])
def test_a_common_beginning_is_computed_once(header: int, parallel: int, model: LanguageModel) -> None:
    """By requests at once, and by those that come after; with what drafters look at, too."""
    asked = [Asked((*numbers(header), number, *numbers(9, number)), 6) for number in range(100, 108)]
    for drafter in ("none", "adapld"):
        engine = Engine(model, Method(drafter, budget=4), runtime="cpu")
        assert reading(engine, asked, parallel) == header + 8 * 10
        # What was computed in one run serves the next.
        assert reading(engine, [Asked((*numbers(header), 109), 6)], 1) == 1


@pytest.mark.parametrize("parallel", [1, 4])
def test_samples_of_one_prompt_compute_it_once(parallel: int, model: LanguageModel) -> None:
    engine = Engine(model, sampling=Sampling(0.8), runtime="cpu")
    asked = [Asked(numbers(200), 6, sample) for sample in range(5)]
    # Of each one more the last token, whose logits are asked for.
    assert reading(engine, asked, parallel) == 200 + 4


def test_a_turn_computes_what_is_new_in_it(model: LanguageModel) -> None:
    asked = [Asked(numbers(100, seed), 30) for seed in (0, 1)]
    asked += [Asked(numbers(12, 9), 30, after=0), Asked(numbers(13, 9), 30, after=1), Asked(numbers(3), 5, after=2)]
    # The last token of an answer was committed and not looked at.
    new = 100 + 100 + (1 + 12) + (1 + 13) + (1 + 3)
    assert reading(Engine(model, runtime="cpu"), asked, 2) == new


def test_what_is_shared_is_given_up_where_the_memory_is_needed(model: LanguageModel) -> None:
    """Many beginnings one after the other in room for few: each text is what it is with all the room there is."""
    random = Random(3)
    headers = [numbers(random.randrange(20, 130), seed) for seed in range(6)]
    asked = [Asked((*random.choice(headers), *numbers(random.randrange(1, 9), seed)), 20) for seed in range(24)]
    engine = Engine(model, Method("adapld", budget=4), runtime="cpu", kv_memory=memory_of(model, 7))
    arriving = Arriving(engine, asked)
    arriving.run(5)
    assert not arriving.errors
    for number, one in enumerate(asked):
        assert arriving.text(number) == alone(lambda: Engine(model, runtime="cpu"), one)


def test_prompts_are_read_beside_steps(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long prompt that comes does not stop those who write: each pass has a step of theirs and a part of it."""
    monkeypatch.setattr(
        "specds.decode.pricing.measurement.known", lambda *_: CostCurve((1, 65), (100,), np.array([[1.0, 7.4]]))
    )
    engine = Engine(model, Method("pld"), runtime="cpu")
    chunk, watched = engine._target.chunk, watch(engine)
    asked = [Asked(numbers(20), 30), Asked(numbers(5 * chunk, 1), 4)]
    arriving = Arriving(engine, asked)
    arriving.run(2)
    came, answered = 0, arriving.steps[1][0].forward_pass
    assert answered >= 5
    wrote = {step.forward_pass for step in arriving.steps[0][1:]}
    assert wrote >= set(range(came + 1, answered))
    assert max(map(sum, watched.rows)) <= chunk + 2 + 64
