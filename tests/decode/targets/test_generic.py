"""The generic runtime: every tested family in mixtures of requests, and models that it cannot run."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
import torch

from specds.decode.contracts import Captures, Item
from specds.decode.targets.generic import HuggingFaceTarget, check_tree_attention
from specds.decode.targets.pages import PAGE
from specds.errors import UnsupportedModel
from specds.model import wrap_model

from ...conftest import FAMILIES, VOCABULARY, make_model
from .mixtures import Mixture, by_network
from .passes import close, logits_of, opened, prefill


@pytest.mark.parametrize(("family", "top"), [(family, number % 2 == 0) for number, family in enumerate(FAMILIES)])
def test_any_mixture_of_requests_gives_each_what_the_network_says(family: str, top: bool) -> None:
    """Soft caps, mixed kinds of attention and windows beside each other included, in scarce pages."""
    model = make_model(family)
    target = HuggingFaceTarget(model, Captures(hidden=True, layer=2, top=top), memory=600_000)
    Mixture(target, by_network(model), near, Random(family), top=top).run(passes=10)


def near(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 0.02), (torch.bfloat16, 0.15)])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_padding_makes_no_nans_in_narrow_types(family: str, dtype: torch.dtype, tolerance: float) -> None:
    """The lowest number of float16, twice, is no number any more."""
    model = make_model(family)
    model.network.to(dtype)
    target = HuggingFaceTarget(model)
    texts = [list(range(5, 5 + length)) for length in (1, 3, 20, 41)]
    slots = [opened(target, text) for text in texts]
    for slot, text in zip(slots, texts, strict=True):
        if len(text) > 1:
            target.forward([Item.chain(slot, text[:-2] or text[:-1])])
            target.commit(slot, range(max(1, len(text) - 2)))
    items = [Item.chain(slot, text[len(slot) :]) for slot, text in zip(slots, texts, strict=True)]
    result = target.forward(items)
    for number, text in enumerate(texts):
        found, expected = result.of(number).logits[-1].float(), logits_of(model, text)[-1].float()
        assert float((found - expected).abs().max()) < tolerance * float(expected.max() - expected.min())


def test_nothing_is_padded_to_a_long_prompt() -> None:
    """Requests that take a token each would be hundreds of cells each beside one."""
    model = make_model()
    target = HuggingFaceTarget(model)
    cells: list[int] = []
    slots = [prefill(target, [number + 5])[0] for number in range(9)]
    prompt = np.random.default_rng(0).integers(5, VOCABULARY, 200).tolist()
    items = [Item.chain(slot, [60]) for slot in slots]
    items.insert(4, Item.chain(opened(target, prompt), prompt))
    items.append(Item.chain(opened(target, [90, 8, 9]), [90, 8, 9]))
    network = model.network
    hook = network.register_forward_pre_hook(
        lambda *given: cells.append(given[2]["input_ids"].numel()), with_kwargs=True
    )
    result = target.forward(items)
    hook.remove()
    assert sorted(cells) == [10 * 3, 200]
    assert close(result.of(4).logits[0], logits_of(model, prompt)[-1])
    assert close(result.of(10).logits[0], logits_of(model, [90, 8, 9])[-1])
    assert close(result.of(3).logits[0], logits_of(model, [8, 60])[-1])


def test_requests_whose_pages_stand_side_by_side_are_told_apart() -> None:
    """Each of exactly a page, one behind the other in memory."""
    model = make_model()
    target = HuggingFaceTarget(model)
    texts = np.random.default_rng(0).integers(5, VOCABULARY, (3, PAGE)).tolist()
    slots = [opened(target, text, 0) for text in texts]
    for slot, text in zip(slots, texts, strict=True):
        target.forward([Item.chain(slot, text[:-1])])
        target.commit(slot, range(PAGE - 1))
    result = target.forward([Item.chain(slot, text[-1:]) for slot, text in zip(slots, texts, strict=True)])
    for number, text in enumerate(texts):
        assert close(result.of(number).logits[0], logits_of(model, text)[-1])


def test_models_without_a_cache_to_cut_are_refused() -> None:
    from transformers import AutoModelForCausalLM, BloomConfig, MambaConfig

    for config, reason in (
        (MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2), "layers of kind"),
        (BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4), "no position ids"),
    ):
        network = AutoModelForCausalLM.from_config(config)
        model = wrap_model(network, make_model().tokenizer, name="other", fingerprint="other")
        with pytest.raises(UnsupportedModel, match=reason):
            HuggingFaceTarget(model)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_probe_passes_every_family_and_leaves_its_window(family: str) -> None:
    model = make_model(family)
    window = getattr(model.network.config, "sliding_window", None)
    check_tree_attention(model)
    assert getattr(model.network.config, "sliding_window", None) == window


def test_windows_of_families_that_no_test_knows_are_checked() -> None:
    model = make_model("llama")
    model.architecture = "NewForCausalLM"
    model.network.config.sliding_window = 12  # promised, and its own masks have none
    with pytest.raises(UnsupportedModel, match="other logits"):
        check_tree_attention(model)
    model.network.config.sliding_window = None
    model.network.config.window_size = 12
    with pytest.raises(UnsupportedModel, match="limited by window_size"):
        check_tree_attention(model)


def test_a_model_that_ignores_positions_is_found_out() -> None:
    model = make_model("neox")
    check_tree_attention(model)
    inner = model.network.gpt_neox.rotary_emb
    forward = inner.forward

    def without_positions(x: torch.Tensor, position_ids: torch.Tensor) -> object:
        return forward(x, torch.arange(position_ids.shape[1])[None] + position_ids[:, :1])

    inner.forward = without_positions
    with pytest.raises(UnsupportedModel, match="other logits"):
        check_tree_attention(model)


def test_a_model_that_takes_the_first_lines_positions_for_all_is_found_out() -> None:
    model = make_model("neox")
    inner = model.network.gpt_neox.rotary_emb
    forward = inner.forward
    inner.forward = lambda x, position_ids: forward(x, position_ids[:1].expand_as(position_ids))
    with pytest.raises(UnsupportedModel, match="other logits"):
        check_tree_attention(model)
