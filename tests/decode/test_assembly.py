"""From a method to what its requests are made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from specds.calibration.replay import Replay
from specds.decode import drafters
from specds.decode.assembly import check_method
from specds.decode.contracts import NO_RESOURCES, Drafter, Resources, Step
from specds.decode.counters import Counters
from specds.decode.draft import Draft, chain
from specds.decode.engine import Engine
from specds.decode.method import Method, parse_method, parse_methods
from specds.decode.registry import option
from specds.errors import UsageError

from ..calibration.test_replay import recorded
from ..conftest import make_model
from ..tools import Run
from .pricing.curves import FAIR

PROMPT = [9, 30, 12, 9, 30, 12, 9]


class Echo(Drafter):
    """A toy: what follows is what came `back` tokens ago. All that a new drafter has to say is said here."""

    @dataclass(frozen=True, slots=True)
    class Options:
        """Options of the toy."""

        back: int = option(3, "how many tokens ago", least=1)

    summary = "a toy"

    def __init__(self, options: Options, resources: Resources = NO_RESOURCES) -> None:
        self._back = options.back
        self._text: list[int] = []

    def start(self, prompt: Sequence[int]) -> None:
        self._text = list(prompt)

    def observe(self, step: Step) -> None:
        self._text += step.tokens

    def propose(self, budget: int) -> Draft:
        tokens = self._text[-self._back :][:budget]
        return chain(tokens, [0.5] * len(tokens))


@pytest.fixture
def echo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(drafters.DRAFTERS, "echo", f"{__name__}:Echo")


@pytest.mark.usefixtures("echo")
def test_a_drafter_is_one_class_and_one_registry_line(run_cli: Run, tiny_directory: Path) -> None:
    """Engine, methods, budgets, replay and the command line take a drafter that only the registry knows."""
    model = make_model()
    plain = list(Engine(model).steps(PROMPT, 40))
    for word in ("echo", "echo@4", "echo@4?back=2"):
        steps = list(Engine(model, parse_method(word)).steps(PROMPT, 40))
        assert [token for step in steps for token in step.tokens] == [step.tokens[0] for step in plain]
    assert any(len(step.draft) for step in steps)
    answer = recorded("p", PROMPT, plain, model)
    (row,) = Replay(model, parse_methods("echo"), curve=FAIR).of(answer)
    assert row.counters.tokens == Counters.of(plain).tokens
    listed = run_cli("drafters")
    assert "a toy" in listed.out
    assert "back=3" in listed.out
    found = run_cli(
        "decode", "-m", tiny_directory, "-p", "-", "-d", "echo", "--max-new-tokens", "8", stdin="w1 w2 w1\n"
    )
    assert found.code == 0, found
    assert found.records[0]["drafter"] == "echo"


@pytest.mark.usefixtures("echo")
@pytest.mark.parametrize(
    ("method", "says"),
    [
        (Method("nobody"), "no drafter 'nobody'"),
        (Method("echo", {"front": "1"}), "no option 'front'"),
        (Method("echo", {"back": "0"}), "back is 0"),
        (Method("echo", budget=-1), "--budget is -1"),
        (Method("echo", draft_model="skip:half"), "--draft-model is given"),
        (Method("rest"), "none is given"),
        (Method("echo", verifier="nobody"), "no verifier 'nobody'"),
        (Method("echo", verifier_options={"tau": "1"}), "no option 'tau'"),
    ],
)
def test_a_method_that_cannot_be_is_refused_without_a_model(method: Method, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        check_method(method)
