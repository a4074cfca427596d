"""Prompts become answers: in which order, turn by turn, and while more of them are still on their way."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from specds.decode.answering import Answered
from specds.decode.engine import Engine
from specds.decode.method import Method
from specds.errors import InputError, PromptError, UsageError
from specds.model import LanguageModel
from specds.reading.ahead import Ahead
from specds.reading.prompts import BadRow, Message, Prompt
from specds.sampling import Sampling

from ..conftest import make_model
from .requests import watch

# Seconds after which something hangs that should not.
PATIENCE = 60


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return make_model(seed=3)


def say(words: str) -> tuple[Message, ...]:
    return ({"role": "user", "content": words},)


def words(first: int, count: int) -> str:
    return " ".join(f"w{(first * 7 + place * 3) % 100}" for place in range(count))


PROMPTS: list[Prompt | BadRow] = [
    Prompt("short", (say("w1 w2"),)),
    Prompt("talk", (say(words(1, 20)), say("w5 w6"), say(words(2, 9)))),
    BadRow("bad", PromptError("row 3 is not JSON", "mend it")),
    Prompt("too long", (say(words(3, 400)),)),
    Prompt("raw", (say(words(4, 60)),), raw=True),
    Prompt("grows too long", (say(words(5, 180)), say(words(6, 70)), say("w5"))),
    Prompt("talk again", (say(words(1, 20)), say("w5 w7"))),
    Prompt("nothing", (({"role": "user", "content": ""},),), raw=True),
    *(Prompt(f"more {number}", (say(words(number, 3)),)) for number in range(6)),
]
BROKEN = {"bad", "too long", "grows too long", "nothing"}


def told(answered: Answered) -> tuple[object, ...]:
    """What a user sees of it."""
    if answered.answer is None:
        return answered.prompt.id, str(answered.error)
    turns = [(turn.text, turn.tokens, turn.finish_reason, turn.prompt) for turn in answered.answer.turns]
    return answered.prompt.id, *turns


@pytest.mark.parametrize(("drafter", "temperature"), [("none", 0.0), ("auto", 0.8), ("model", 0.0)])
def test_answers_at_once_are_those_one_after_the_other(drafter: str, temperature: float, model: LanguageModel) -> None:
    sampling = Sampling(temperature, seed=4)
    expected = []
    for prompt in PROMPTS:
        expected += map(told, Engine(model, sampling=sampling, runtime="cpu").answers([prompt], 24))
    for parallel in (1, 3, 16):
        engine = Engine(model, Method(drafter), sampling, runtime="cpu")
        watched = watch(engine)
        ordered = list(engine.answers(PROMPTS, 24, parallel=parallel))
        assert [answered.number for answered in ordered] == list(range(len(PROMPTS)))
        assert list(map(told, ordered)) == expected
        assert {one.prompt.id for one in ordered if one.error is not None} == BROKEN
        assert not watched.slots
        as_they_end = list(engine.answers(Ahead(PROMPTS), 24, parallel=parallel, ordered=False))
        assert sorted(answered.number for answered in as_they_end) == list(range(len(PROMPTS)))
        assert sorted(map(told, as_they_end)) == sorted(expected)
        assert all(PROMPTS[answered.number] is answered.prompt for answered in as_they_end)


def test_answers_are_given_as_they_end_or_in_order(model: LanguageModel) -> None:
    """A talk of three turns ends after the short prompts that came with it; in order it goes before them."""
    prompts = [prompt for prompt in PROMPTS if prompt.id in ("talk", "more 1", "more 2")]
    engine = Engine(model, runtime="cpu")
    lengths = []
    for ordered in (False, True):
        given = list(engine.answers(prompts, 8, parallel=3, ordered=ordered))
        lengths.append([len(one.answer.turns) if one.answer else 0 for one in given])
    assert lengths == [[1, 1, 3], [3, 1, 1]]
    # The next turn goes before other prompts: what it follows is still there.
    one_by_one = list(engine.answers(prompts, 8, ordered=False))
    assert [answered.prompt.id for answered in one_by_one] == ["talk", "more 1", "more 2"]
    # What can be given in order is given before the rest is done.
    answers = engine.answers([prompts[1], prompts[0], prompts[2]], 8, parallel=1)
    watched = watch(engine)
    next(answers)
    assert len(watched.rows) <= 8


@pytest.mark.parametrize("ordered", [False, True])
def test_what_is_there_is_answered_while_the_rest_is_waited_for(ordered: bool, model: LanguageModel) -> None:
    more = threading.Event()

    def rows() -> Iterator[Prompt | BadRow]:
        yield from PROMPTS[:3]
        assert more.wait(PATIENCE), "what was there was not answered"
        yield from PROMPTS[3:]

    answers = Engine(model, runtime="cpu").answers(Ahead(rows()), 12, parallel=8, ordered=ordered)
    first = [next(answers) for _ in range(3)]
    assert {answered.prompt.id for answered in first} == {"short", "talk", "bad"}
    more.set()
    assert len(list(answers)) == len(PROMPTS) - 3


def test_whoever_comes_later_joins_those_who_write(model: LanguageModel) -> None:
    came, looked = threading.Event(), threading.Event()
    engine = Engine(model, runtime="cpu")
    watched = watch(engine)

    def rows() -> Iterator[Prompt | BadRow]:
        yield Prompt("first", (say("w1 w2"),))
        assert looked.wait(PATIENCE)
        yield Prompt("second", (say("w3 w4"),))
        came.set()

    class Looking(Ahead[Prompt | BadRow]):
        """Lets the second come while the first writes, and waits until it is there."""

        def take(self, wait: bool) -> Prompt | BadRow | None:
            if len(watched.rows) == 3:
                looked.set()
                assert came.wait(PATIENCE)
            return super().take(wait)

    ahead = Looking(rows())
    assert len(list(engine.answers(ahead, 12, parallel=4))) == 2
    assert max(map(len, watched.rows)) == 2


def test_a_source_that_breaks_is_heard_after_what_was_begun_is_answered(model: LanguageModel) -> None:
    def rows() -> Iterator[Prompt | BadRow]:
        yield from PROMPTS[:2]
        raise InputError("the file is cut", "copy it again")

    for source in (rows(), Ahead(rows())):
        engine = Engine(model, runtime="cpu")
        watched = watch(engine)
        given = []
        with pytest.raises(InputError, match="cut"):
            for answered in engine.answers(source, 12, parallel=8):
                given.append(told(answered))
        assert given == [told(one) for one in Engine(model, runtime="cpu").answers(PROMPTS[:2], 12)]
        assert not watched.slots


def test_an_interrupt_while_rows_are_read_is_not_put_off(model: LanguageModel) -> None:
    def rows() -> Iterator[Prompt | BadRow]:
        yield from PROMPTS[:2]
        raise KeyboardInterrupt

    engine = Engine(model, runtime="cpu")
    watched = watch(engine)
    with pytest.raises(KeyboardInterrupt):
        list(engine.answers(rows(), 12, parallel=8))
    assert len(watched.rows) <= 1
    assert not watched.slots


def test_whoever_stops_listening_leaves_nothing_behind(model: LanguageModel) -> None:
    engine = Engine(model, Method("model", budget=4, draft_model=make_model(seed=5)), runtime="cpu")
    watched = watch(engine)
    expected = [told(answered) for answered in engine.answers(PROMPTS, 12, parallel=4)]
    answers = engine.answers(PROMPTS, 12, parallel=4, ordered=False)
    next(answers)
    assert watched.slots
    answers.close()  # type: ignore[attr-defined]
    assert not watched.slots
    assert [told(answered) for answered in engine.answers(PROMPTS, 12, parallel=4)] == expected


def test_no_request_at_once_is_refused(model: LanguageModel) -> None:
    with pytest.raises(UsageError, match="0 requests at once"):
        list(Engine(model, runtime="cpu").answers(PROMPTS, 4, parallel=0))


def test_one_answer_raises_what_it_failed_with(model: LanguageModel) -> None:
    engine = Engine(model, runtime="cpu")
    with pytest.raises(PromptError, match="holds 256"):
        engine.answer(PROMPTS[3], 5)  # type: ignore[arg-type]
    assert len(engine.answer(PROMPTS[1], 5).turns) == 3  # type: ignore[arg-type]


def test_an_answer_does_not_hold_what_drafters_asked_of_its_passes(model: LanguageModel) -> None:
    """Answers that wait for their turn would keep the arrays of passes long done."""
    (answered,) = Engine(model, Method("auto", budget=8)).answers(PROMPTS[:1], 12)
    assert answered.answer is not None
    steps = answered.answer.turns[0].steps
    assert sum(len(step.tokens) for step in steps) == len(answered.answer.turns[0].tokens)
    assert not any(step.signals for step in steps)
