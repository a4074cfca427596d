"""Many requests at once, on the embedded model: every text is the one that its request gets alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from specds.decode.engine import Engine
from specds.decode.method import Method
from specds.model import LanguageModel
from specds.reading.prompts import Message, Prompt
from specds.sampling import Sampling

from .test_lossless import PROMPTS

_SYSTEM: Message = {"role": "system", "content": "You answer in one short sentence, and never in more than that."}
_CODE = "def total(prices, rate):\n    result = 0\n    for price in prices:\n        result += price * rate\n"


def said(text: str, *before: Message) -> tuple[Message, ...]:
    return *before, {"role": "user", "content": text}


def kinds() -> Iterator[Prompt]:
    """Questions, code, few-shot headers, text to be continued, turns, other scripts; some twice, some of one token."""
    yield from PROMPTS[::2]
    for number, place in enumerate(("Paris", "the Nile", "Mount Fuji", "the Baltic Sea")):
        yield Prompt(f"system-{number}", (said(f"Where is {place}?", _SYSTEM),))
        shots = "English: cat. French: chat. English: dog. French: chien. English: "
        yield Prompt(f"shots-{number}", (said(f"{shots}{place}. French:"),), raw=True)
    tails = (
        "    return result\n\nprint(",
        "    return round(result",
        "\n\ndef mean(prices):\n",
        "        print(",
        "    if",
    )
    for number, tail in enumerate(tails):
        yield Prompt(f"snippet-{number}", (said(_CODE + tail),), raw=True)
    yield Prompt("turns-0", (said("Name three colours."), said("And three more?"), said("Which one is the darkest?")))
    yield Prompt("turns-1", (said("Name three colours."), said("And three animals?")))
    yield Prompt("list", (said("1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23"),), raw=True)
    yield Prompt("one", (said("The"),), raw=True)
    yield Prompt("script", (said("Übersetze ins Deutsche: 今日は天気がいい。 مرحبا 🌍"),))
    yield Prompt("long", (said("Sum this up: " + "The river rose and the bridge was closed. " * 40),))
    yield Prompt("again", PROMPTS[0].turns)
    yield Prompt("json", (said('{"name": "Ada", "born": 1815, "works": ["notes", "'),), raw=True)


MANY = list(kinds())


def texts(engine: Engine, prompts: list[Prompt], length: int, parallel: int) -> dict[str, list[tuple[int, ...]]]:
    found = {}
    for answered in engine.answers(prompts, length, parallel=parallel, ordered=False):
        assert answered.answer is not None, answered.error
        found[answered.prompt.id] = [turn.tokens for turn in answered.answer.turns]
    return found


@pytest.mark.parametrize(
    ("prompts", "length"),
    [pytest.param(MANY[::5], 16, id="some"), pytest.param(MANY, 64, id="all", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_texts_are_those_of_each_request_alone(
    temperature: float, prompts: list[Prompt], length: int, smollm: LanguageModel
) -> None:
    assert len({prompt.id for prompt in MANY}) == len(MANY) >= 32
    sampling = Sampling(temperature, seed=7)
    plain = Engine(smollm, sampling=sampling, runtime="cpu")
    expected = {id: one for prompt in prompts for id, one in texts(plain, [prompt], length, 1).items()}
    engine = Engine(smollm, Method("auto"), sampling, runtime="cpu")
    assert texts(engine, prompts[::-1], length, 16) == expected
    assert texts(plain, prompts, length, 16) == expected
