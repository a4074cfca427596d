"""Draft models: a network beside the target, or the target with layers left out."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from specds.calibration.skipping import choose_skip
from specds.decode.contracts import Item, Slot, Target
from specds.decode.counters import Counters
from specds.decode.draft_model import parse_skip
from specds.decode.engine import Engine
from specds.decode.method import Method
from specds.decode.pricing.curve import CostCurve
from specds.decode.prompt import hold
from specds.decode.targets import make_target
from specds.errors import UsageError
from specds.model import LanguageModel
from specds.sampling import Sampling

from ..conftest import make_model
from .drafts import build
from .targets.passes import CPU, TREE, close

PROMPT = [9, 30, 12, 5, 77, 64, 9, 30]
SKIP = frozenset({1, 2})


def skipping(target: Target, slot: Slot, tokens: list[int]) -> list[torch.Tensor]:
    """Layer-skip forwards of tokens one after the other."""
    return [target.layer_skip(slot, token, ahead, SKIP).clone() for ahead, token in enumerate(tokens)]


def over_tree(target: Target, slot: Slot, last: int) -> torch.Tensor:
    """Logits over a tree behind a token."""
    return target.forward([Item.draft(slot, last, build(TREE))]).logits


@pytest.mark.parametrize("family", CPU)
def test_all_runtimes_leave_the_same_layers_out(family: str) -> None:
    """After a prompt, after a commit, and beyond a sliding window."""
    model = make_model(family, num_hidden_layers=5)
    targets = [make_target(model, runtime) for runtime in ("generic", "cpu", "cuda")]
    prompt = np.random.default_rng(0).integers(5, 100, 30).tolist()
    slots = [(target, hold(target, prompt, 100)) for target in targets]
    for last, rows in [(7, (0, 1, 3)), (8, (0,)), (9, (0, 2, 4))]:
        expected, *others = [skipping(target, slot, [last, 20, 21]) for target, slot in slots]
        for found in others:
            assert all(close(one, other) for one, other in zip(found, expected, strict=True))
        for target, slot in slots:
            over_tree(target, slot, last)
            target.commit(slot, rows)


@pytest.mark.parametrize("runtime", ["generic", "cpu", "cuda"])
def test_a_layer_skip_forward_is_the_model_without_these_layers_and_leaves_nothing_in_the_cache(runtime: str) -> None:
    model = make_model(num_hidden_layers=4)
    target, untouched = make_target(model, runtime), make_target(model, runtime)
    slot, other = (hold(one, PROMPT, 50) for one in (target, untouched))
    whole = target.layer_skip(slot, 40, 0, frozenset()).clone()
    short = target.layer_skip(slot, 40, 0, SKIP).clone()
    skipping(target, slot, [41, 42, 43])
    plain = over_tree(target, slot, 40).clone()
    assert close(plain, over_tree(untouched, other, 40))
    assert close(whole, plain[0])
    assert not close(short, plain[0])
    # The layers that are left out might as well be anything: with other weights there the logits are the same.
    with torch.no_grad():
        before = target.layer_skip(slot, 44, 0, SKIP).clone()
        for layer in SKIP:
            for parameter in model.network.model.layers[layer].parameters():
                parameter.mul_(3.0)
    if runtime == "generic":  # the others have packed the weights
        assert close(target.layer_skip(slot, 44, 0, SKIP), before)
        one = target.forward([Item.chain(slot, [44])]).logits[0]
        assert not close(one, untouched.layer_skip(other, 44, 0, SKIP))


@pytest.mark.parametrize("runtime", ["generic", "cpu", "cuda"])
@pytest.mark.parametrize(("verifier", "temperature"), [("auto", 0.0), ("auto", 0.8), ("rejection", 0.8), ("csd", 0.8)])
def test_a_draft_model_that_is_the_target_is_always_right(runtime: str, verifier: str, temperature: float) -> None:
    """Also when both draw: with the target's noise the same tokens, with noise of its own tokens that p = q accepts."""
    model = make_model(stop=False)
    engine = Engine(
        model,
        Method("model", budget=4, verifier=verifier, draft_model=model),
        sampling=Sampling(temperature),
        runtime=runtime,
    )
    steps = list(engine.steps(PROMPT, 31))
    assert [step.accepted for step in steps[1:]] == [4] * 6
    assert all(step.draft.q is None for step in steps) == (verifier == "auto")


class Rows:
    """Notes the query tokens of each pass of a network."""

    def __init__(self, model: LanguageModel) -> None:
        self.counts: list[int] = []
        model.network.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, network: object, arguments: object, named: dict[str, torch.Tensor]) -> None:
        self.counts.append(named["input_ids"].numel())


def test_what_was_drafted_and_taken_is_not_computed_again() -> None:
    model, other = make_model(stop=False), make_model(stop=False, seed=1)
    engine = Engine(model, Method("model", {"gamma": "3"}, budget=8, draft_model=other), runtime="generic")
    passes = Rows(other)
    list(engine.steps(PROMPT, 20))
    # The prompt with the first token, then at each step at most what was accepted and the target's own token.
    assert passes.counts[0] == len(PROMPT) + 1
    assert max(passes.counts[1:]) <= 4


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_any_draft_model_keeps_the_text(temperature: float) -> None:
    model = make_model(stop=False, num_hidden_layers=6)
    sampling = Sampling(temperature, seed=2)
    plain = [step.tokens[0] for step in Engine(model, sampling=sampling).steps(PROMPT, 40)]
    for draft in (make_model(stop=False, seed=5), "skip:half", "skip:2", "skip:1-2,4", None):
        engine = Engine(model, Method("model", budget=5, draft_model=draft), sampling=sampling)
        steps = list(engine.steps(PROMPT, 40))
        assert [token for step in steps for token in step.tokens] == plain
        assert Counters.of(steps).drafted > 50
    assert Counters.of(steps).accepted > 0


def test_it_stops_drafting_where_it_is_unsure() -> None:
    model = make_model(stop=False)
    sure = Engine(model, Method("model", {"least": "0.1"}, budget=6, draft_model=model))
    steps = list(sure.steps(PROMPT, 60))
    assert len({len(step.draft) for step in steps}) > 2
    assert all((step.draft.score >= 0.1).all() for step in steps)


def test_layers_are_read_and_checked() -> None:
    assert parse_skip("skip:3,5-7", 30) == {3, 5, 6, 7}
    assert parse_skip("skip:half", 8) == {1, 3, 5}
    for bad in ("skip:", "skip:0", "skip:29", "skip:x", "skip:3-", "skip:7-5", "skip:-3", "skip:²"):
        with pytest.raises(UsageError):
            parse_skip(bad, 30)


def test_a_draft_model_of_other_tokens_is_refused() -> None:
    model = make_model()
    with pytest.raises(UsageError, match=r"has 60 tokens of its own tokenizer, and tiny 128"):
        Engine(model, Method("model", draft_model=make_model(vocab_size=60)))


def test_the_search_leaves_out_the_layer_that_does_least(tiny: LanguageModel) -> None:
    model = make_model(num_hidden_layers=6, stop=False)
    with torch.no_grad():
        for name in ("self_attn.o_proj", "mlp.down_proj"):  # layer 3 adds next to nothing
            model.network.model.layers[3].get_submodule(name).weight.mul_(1e-4)
    target = make_target(model, "cpu")
    curve = CostCurve((1, 2, 4, 8, 16), (8,), np.array([[1.0, 1.0, 1.0, 1.0, 1.0]]))
    found = choose_skip(target, [PROMPT, PROMPT[::-1]], 12, 6, curve)
    first = next(one for one in found if len(one.skip) == 1)
    assert first.skip == {3}
    assert first.agreement == 1.0
    assert first.name == "skip:3"
    assert parse_skip(found[0].name, 6) == found[0].skip
    assert found == sorted(found, key=lambda one: -one.speed)
