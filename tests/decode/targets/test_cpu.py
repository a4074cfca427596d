"""The CPU runtime: a row is the same bit by bit whatever stands beside it."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specds.decode.contracts import Captures, Forward, Item
from specds.decode.targets import make_target
from specds.decode.targets.cpu import CpuTarget
from specds.decode.targets.generic import HuggingFaceTarget
from specds.errors import UnsupportedModel
from specds.model import LanguageModel, load_model

from ...conftest import VOCABULARY, make_model
from ..drafts import build
from .mixtures import Alone, Mixture
from .passes import CPU, TREE, accept, close, logits_of, opened, prefill, show, step


@pytest.mark.parametrize("family", CPU)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_row_is_the_same_bit_by_bit_whatever_stands_beside_it(family: str, threads: int) -> None:
    """Alone, in a tree, after a prompt computed at once or in parts, on any number of threads."""
    model = make_model(family)
    prompt = np.random.default_rng(7).integers(5, VOCABULARY, 203).tolist()
    plain = CpuTarget(model, Captures(hidden=True), threads=1)
    slot, _ = prefill(plain, prompt)
    expected = []
    for token in (20, 9, 11, 13):
        expected.append(step(plain, slot, token))
        expected[-1] = Forward(expected[-1].logits.clone(), expected[-1].hidden)
        accept(plain, slot)
    target = CpuTarget(model, Captures(hidden=True), threads=threads)
    slot = opened(target, prompt)
    show(target, slot, prompt[:77])
    show(target, slot, prompt)
    result = step(target, slot, 20, build(TREE))  # its path 0, 2, 4 is 9, 11, 13
    for row, one in zip((0, 1, 3, 5), expected, strict=True):
        assert torch.equal(result.logits[row], one.logits[0])
        assert result.hidden is not None
        assert one.hidden is not None
        assert torch.equal(result.hidden[row], one.hidden[0])
    accept(target, slot, (0, 2))
    assert torch.equal(step(target, slot, 13, build([(-1, 3), (-1, 4)])).logits[0], expected[3].logits[0])


@cache
def model_of(family: str) -> LanguageModel:
    return make_model(family)


@cache
def alone(family: str) -> Alone:
    """The runtime itself, with one request in one pass on one thread."""

    def rows(text: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        target = CpuTarget(model_of(family), Captures(hidden=True, layer=2), memory=400_000, threads=1)
        slot = target.open(text, len(text))
        assert slot is not None
        result = target.forward([Item.chain(slot, text, len(text))])
        target.commit(slot, range(len(text)))
        layer = target.activations(slot).layer
        assert layer is not None
        assert result.hidden is not None
        return result.logits, result.hidden, torch.from_numpy(layer)

    return Alone(rows)


@settings(max_examples=40)
@given(st.sampled_from(CPU), st.integers(1, 3), st.booleans(), st.randoms(use_true_random=False))
def test_any_mixture_of_requests_gives_each_what_it_gets_alone(
    family: str, threads: int, top: bool, random: Random
) -> None:
    """Logits, hidden and captured states, bit by bit: prompts in chunks of any size, single tokens and trees, of
    requests that come, go and share beginnings, in any order, on one to three threads, where pages are scarce.
    """
    target = CpuTarget(model_of(family), Captures(hidden=True, layer=2, top=top), memory=400_000, threads=threads)
    Mixture(target, alone(family), torch.equal, random, top=top).run(passes=10)


@pytest.mark.parametrize("many", [1, 7, 31])
def test_the_number_of_requests_beside_one_does_not_show(many: int) -> None:
    """Of as many rows as there are lanes, less, and more; drafted and not."""
    model = make_model("qwen3")
    target = CpuTarget(model, threads=2)
    rng = np.random.default_rng(many)
    texts = rng.integers(5, VOCABULARY, (many + 1, 70)).tolist()
    texts = [text[: int(rng.integers(2, 70))] for text in texts]
    slots = []
    for text in texts:
        slot, _ = prefill(target, text[:-1])
        slots.append(slot)
    items = [
        Item.draft(slot, text[-1], build(TREE[: number % 9]))
        for number, (slot, text) in enumerate(zip(slots, texts, strict=True))
    ]
    order = rng.permutation(len(items)).tolist()
    together = target.forward([items[number] for number in order])
    rows = {number: together.of(place).logits.clone() for place, number in enumerate(order)}
    for number, item in enumerate(items):
        assert torch.equal(target.forward([item]).logits, rows[number])


def test_odd_sizes_are_packed_whole() -> None:
    """Heads, hidden size and vocabulary that are not multiples of a panel; weights that are not tied; biases."""
    model = make_model("llama", hidden_size=40, num_attention_heads=4, num_key_value_heads=4, intermediate_size=48,
                       vocab_size=131, attention_bias=True, tie_word_embeddings=False)  # fmt: skip
    for parameter in model.network.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter.data)
    target = make_target(model, "cpu")
    prompt = list(range(5, 45))
    slot, result = prefill(target, prompt)
    assert close(result.logits[0], logits_of(model, prompt)[-1])
    assert result.logits.shape == (1, 131)
    rows = step(target, slot, 9, build(TREE)).logits
    assert close(rows[5], logits_of(model, [*prompt, 9, 9, 11, 13])[-1])


def test_a_checkpoint_is_packed_without_loading_the_network(tiny_directory: Path) -> None:
    model = load_model(str(tiny_directory), device="cpu")
    target = make_target(model)
    assert isinstance(target, CpuTarget)
    assert model._network is None
    prompt = [5, 6, 7, 8]
    assert close(prefill(target, prompt)[1].logits[0], logits_of(model, prompt)[-1])


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("gemma", {}, "GemmaForCausalLM"),
        ("llama", {"hidden_act": "gelu"}, "activation"),
        ("llama", {"intermediate_size": 40}, "multiple"),
        ("llama", {"mlp_bias": True}, "biases"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}}, "dynamic"),
    ],
)
def test_what_the_cpu_runtime_cannot_run_goes_the_generic_way(family: str, changes: Any, reason: str) -> None:
    model = make_model(family, **changes)
    assert isinstance(make_target(model), HuggingFaceTarget)
    with pytest.raises(UnsupportedModel, match=reason):
        make_target(model, "cpu")
