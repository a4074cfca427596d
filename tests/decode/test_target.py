from __future__ import annotations

import numpy as np
import pytest
import torch

from specds.decode.contracts import Forward
from specds.decode.draft import chain, empty
from specds.decode.target import HuggingFaceTarget, check_tree_attention
from specds.errors import CorruptStore, UnsupportedModel
from specds.model import LanguageModel, wrap_model

from ..conftest import FAMILIES, VOCABULARY, make_model
from .drafts import build

TREE = [(-1, 9), (-1, 7), (0, 11), (1, 12), (2, 13), (0, 14), (4, 15), (3, 9)]


def logits_of(model: LanguageModel, tokens: list[int]) -> torch.Tensor:
    """All rows of logits of an ordinary pass, without a cache: the reference."""
    with torch.inference_mode():
        return model.network(torch.tensor([tokens]), use_cache=False).logits[0]


def close(one: torch.Tensor, other: torch.Tensor) -> bool:
    spread = float(other.max() - other.min())
    return float((one - other).abs().max()) < 2e-5 * spread + 1e-5


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("length", [3, 30])
def test_a_tree_gives_what_its_branches_give(family: str, length: int) -> None:
    """Also beyond the sliding window, which is 12 in the families that have one."""
    model = make_model(family)
    prompt = np.random.default_rng(length).integers(5, VOCABULARY, length).tolist()
    draft = build(TREE)
    target = HuggingFaceTarget(model)
    assert close(target.prefill(prompt[:-1]).logits[0], logits_of(model, prompt[:-1])[-1])
    rows = target.forward(prompt[-1], draft).logits
    assert close(rows[0], logits_of(model, prompt)[-1])
    for node in range(len(draft)):
        branch = draft.tokens[draft.ancestors()[node]].tolist()
        assert close(rows[node + 1], logits_of(model, prompt + branch)[-1]), (family, node)


@pytest.mark.parametrize("family", FAMILIES)
def test_after_a_commit_the_cache_is_that_of_the_accepted_text(family: str) -> None:
    model = make_model(family)
    prompt = np.random.default_rng(1).integers(5, VOCABULARY, 14).tolist()
    draft = build(TREE)
    target = HuggingFaceTarget(model)
    target.prefill(prompt[:-1])
    text = list(prompt)
    for path, following in [((0, 2, 4, 6), 21), ((), 22), ((1, 3, 7), 23), ((0,), 24)]:
        target.forward(text[-1], draft)
        target.commit(path)
        text += [*draft.tokens[list(path)].tolist(), following]
        plain = target.forward(text[-1], empty())
        assert close(plain.logits[0], logits_of(model, text)[-1]), (family, path)
        target.commit(())
        text += [30]


def test_hidden_states_are_the_final_normed_ones(tiny: LanguageModel) -> None:
    prompt = [7, 8, 9, 10, 11]
    draft = chain([12, 13], [0.5, 0.5])
    target = HuggingFaceTarget(tiny, hidden=True)
    first, second = target.prefill(prompt), target.forward(14, draft)
    with torch.inference_mode():
        output = tiny.network(torch.tensor([[*prompt, 14, 12, 13]]), output_hidden_states=True, use_cache=False)
    expected = output.hidden_states[-1][0]
    assert first.hidden is not None
    assert second.hidden is not None
    assert first.hidden.shape == (1, 32)
    assert torch.allclose(first.hidden[0], expected[4], atol=1e-5)
    assert torch.allclose(second.hidden, expected[5:], atol=1e-5)


def test_hidden_states_are_not_kept_unless_asked_for(tiny: LanguageModel) -> None:
    result = HuggingFaceTarget(tiny).prefill([5, 6, 7])
    assert isinstance(result, Forward)
    assert result.hidden is None
    assert result.logits.shape == (1, VOCABULARY)


def test_one_target_serves_request_after_request(tiny: LanguageModel) -> None:
    target = HuggingFaceTarget(tiny)
    for prompt in ([5, 6, 7], list(range(5, 105)), [9]):
        assert close(target.prefill(prompt).logits[0], logits_of(tiny, prompt)[-1])
        target.forward(20, build(TREE))


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


def test_a_model_with_a_window_that_its_attention_does_not_have_is_found_out() -> None:
    """Its family is in no test, its configuration promises a window, and its own masks have none."""
    model = make_model("llama")
    model.network.config.sliding_window = 12
    with pytest.raises(UnsupportedModel, match="other logits"):
        check_tree_attention(model)
    model.network.config.sliding_window = None
    model.network.config.window_size = 12
    with pytest.raises(UnsupportedModel, match="limited by window_size"):
        check_tree_attention(model)


@pytest.mark.parametrize("token", [VOCABULARY, 65_535, -1])
def test_a_draft_of_tokens_that_the_model_does_not_have_is_refused(token: int, tiny: LanguageModel) -> None:
    target = HuggingFaceTarget(tiny)
    target.prefill([5, 6])
    with pytest.raises(CorruptStore, match="token ids"):
        target.forward(7, chain([8, token], [0.5, 0.5]))


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
