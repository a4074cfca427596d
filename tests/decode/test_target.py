from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specds.decode.contracts import TOP, Activations, Captures, Forward
from specds.decode.draft import chain, empty
from specds.decode.targets import TARGETS, make_target
from specds.decode.targets.cpu import CpuTarget
from specds.decode.targets.generic import HuggingFaceTarget, check_tree_attention
from specds.errors import CorruptStore, UnsupportedModel, UsageError
from specds.model import LanguageModel, load_model, wrap_model

from ..conftest import FAMILIES, VOCABULARY, make_model
from .drafts import build

CPU = ("llama", "qwen2", "qwen3", "mistral")
RUNTIMES = [("generic", family) for family in FAMILIES] + [(name, family) for name in ("cpu", "cuda") for family in CPU]

TREE = [(-1, 9), (-1, 7), (0, 11), (1, 12), (2, 13), (0, 14), (4, 15), (3, 9)]


def logits_of(model: LanguageModel, tokens: list[int]) -> torch.Tensor:
    """All rows of logits of an ordinary pass, without a cache: the reference."""
    with torch.inference_mode():
        return model.network(torch.tensor([tokens]), use_cache=False).logits[0]


def close(one: torch.Tensor, other: torch.Tensor) -> bool:
    spread = float(other.max() - other.min())
    return float((one - other).abs().max()) < 2e-5 * spread + 1e-5


@pytest.mark.parametrize(("runtime", "family"), RUNTIMES)
@pytest.mark.parametrize("length", [3, 30])
def test_a_tree_gives_what_its_branches_give(runtime: str, family: str, length: int) -> None:
    """Also beyond the sliding window, which is 12 in the families that have one."""
    model = make_model(family)
    prompt = np.random.default_rng(length).integers(5, VOCABULARY, length).tolist()
    draft = build(TREE)
    target = make_target(model, runtime)
    assert close(target.prefill(prompt[:-1]).logits[0], logits_of(model, prompt[:-1])[-1])
    rows = target.forward(prompt[-1], draft).logits
    assert close(rows[0], logits_of(model, prompt)[-1])
    for node in range(len(draft)):
        branch = draft.tokens[draft.ancestors()[node]].tolist()
        assert close(rows[node + 1], logits_of(model, prompt + branch)[-1]), (family, node)


@pytest.mark.parametrize(("runtime", "family"), RUNTIMES)
def test_after_a_commit_the_cache_is_that_of_the_accepted_text(runtime: str, family: str) -> None:
    model = make_model(family)
    prompt = np.random.default_rng(1).integers(5, VOCABULARY, 14).tolist()
    draft = build(TREE)
    target = make_target(model, runtime)
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


@pytest.mark.parametrize("runtime", TARGETS)
def test_hidden_states_are_the_final_normed_ones(runtime: str, tiny: LanguageModel) -> None:
    prompt = [7, 8, 9, 10, 11]
    draft = chain([12, 13], [0.5, 0.5])
    target = make_target(tiny, runtime, Captures(hidden=True))
    first, second = target.prefill(prompt), target.forward(14, draft)
    with torch.inference_mode():
        output = tiny.network(torch.tensor([[*prompt, 14, 12, 13]]), output_hidden_states=True, use_cache=False)
    expected = output.hidden_states[-1][0]
    assert first.hidden is not None
    assert second.hidden is not None
    assert first.hidden.shape == (1, 32)
    assert torch.allclose(first.hidden[0], expected[4], atol=1e-5)
    assert torch.allclose(second.hidden, expected[5:], atol=1e-5)


@pytest.mark.parametrize("runtime", TARGETS)
def test_hidden_states_are_not_kept_unless_asked_for(runtime: str, tiny: LanguageModel) -> None:
    result = make_target(tiny, runtime).prefill([5, 6, 7])
    assert isinstance(result, Forward)
    assert result.hidden is None
    assert result.logits.shape == (1, VOCABULARY)


@pytest.mark.parametrize(("runtime", "family"), RUNTIMES)
def test_a_layer_and_the_likeliest_tokens_are_kept_of_the_whole_text(runtime: str, family: str) -> None:
    """Of a prompt in several chunks, of accepted branches, and of the part of a prompt that is not computed again."""
    model = make_model(family)
    target = make_target(model, runtime, Captures(layer=2, top=True))
    text = np.random.default_rng(3).integers(5, VOCABULARY, 140).tolist()
    target.prefill(text)
    check_captures(model, text, target.activations(), len(text))
    draft = build(TREE)
    for path, following in [((0, 2, 4, 6), 21), ((), 22), ((1, 3, 7), 23)]:
        last = 30 + following
        target.forward(last, draft)
        target.commit(path)
        text += [last, *draft.tokens[list(path)].tolist()]
        check_captures(model, text, target.activations(), len(path) + 1)
    for again in ([*text, 40, 41], [*text[:50], 42]):
        target.prefill(again)
        check_captures(model, again, target.activations(), len(again))


def check_captures(model: LanguageModel, text: list[int], result: Activations, rows: int) -> None:
    """The last rows of the text have these states and likeliest tokens, by an ordinary pass of the network."""
    with torch.inference_mode():
        output = model.network(torch.tensor([text]), output_hidden_states=True, use_cache=False)
    assert result.layer is not None
    assert result.top is not None
    assert result.layer.shape == (len(text), 32)
    assert result.top.shape == (len(text), TOP)
    expected = output.hidden_states[2][0, -rows:]
    assert torch.allclose(torch.from_numpy(result.layer[-rows:].copy()), expected, atol=1e-4, rtol=1e-4)
    logits = output.logits[0, -rows:]
    best = torch.topk(logits, TOP, dim=-1).values
    assert torch.allclose(logits.gather(-1, torch.from_numpy(result.top[-rows:].astype(np.int64))), best, atol=1e-3)


@pytest.mark.parametrize("runtime", TARGETS)
def test_embeddings_are_the_models_own(runtime: str, tiny: LanguageModel) -> None:
    tokens = np.array([5, 90, 5, VOCABULARY - 1])
    with torch.inference_mode():
        expected = tiny.network.get_input_embeddings()(torch.from_numpy(tokens))
    assert np.allclose(make_target(tiny, runtime).embed(tokens), expected.numpy())


def test_a_layer_that_the_model_does_not_have_is_refused(tiny: LanguageModel) -> None:
    with pytest.raises(UsageError, match="layer 9 is asked for, and tiny has 3"):
        make_target(tiny, "generic", Captures(layer=9))


_LONG = """
import resource, sys
import numpy as np
from specds.decode.contracts import Captures
from specds.decode.targets import make_target
from tests.conftest import make_model
model = make_model(vocab_size=262_144, hidden_size=16, max_position_embeddings=8192, tie_word_embeddings=True)
prompt = np.random.default_rng(0).integers(5, 100, 4096).tolist()
target = make_target(model, sys.argv[1], Captures(layer=1, top=True))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
target.prefill(prompt)
result = target.activations()
assert result.top.shape == (4096, 8) and result.layer.shape == (4096, 16)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)
"""


@pytest.mark.parametrize(
    "runtime", ["cpu", *(pytest.param(name, marks=pytest.mark.slow) for name in ("cuda", "generic"))]
)
def test_a_long_prompt_never_stands_in_memory_times_the_vocabulary(runtime: str) -> None:
    """4,096 tokens and a vocabulary of 262,144 are 4 GB of logits; a few hundred MB are allowed."""
    done = subprocess.run(
        [sys.executable, "-c", _LONG, runtime],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "2"},
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 700, f"{done.stdout} MB"


@pytest.mark.parametrize(("runtime", "family"), RUNTIMES)
def test_one_target_serves_request_after_request(runtime: str, family: str) -> None:
    """Also where a prompt begins like the one before, in whole or in part, and where it takes several chunks."""
    model = make_model(family)
    target = make_target(model, runtime)
    long = np.random.default_rng(2).integers(5, VOCABULARY, 250).tolist()
    for prompt in ([5, 6, 7], long, long[:100], [*long[:101], 7], [*long[:100], 8], long, [9]):
        assert close(target.prefill(prompt).logits[0], logits_of(model, prompt)[-1])
        target.forward(20, build(TREE))
        if len(prompt) % 2:
            target.commit((0, 2))


@pytest.mark.parametrize("runtime", TARGETS)
def test_a_common_beginning_is_not_computed_twice(runtime: str, tiny: LanguageModel) -> None:
    target = make_target(tiny, runtime)
    rows = []
    run = target._run  # type: ignore[attr-defined]
    target._run = lambda tokens, *rest, **more: (rows.append(len(tokens)), run(tokens, *rest, **more))[1]  # type: ignore[attr-defined]
    first = list(range(5, 60))
    target.prefill(first)
    target.forward(7, build([(-1, 9), (0, 10)]))
    target.commit((0, 1))
    rows.clear()
    target.prefill([*first, 7, 9, 10, 11, 12])  # the turn after
    target.prefill([*first[:30], 3])  # another prompt with the same system prompt
    target.prefill([*first[:30], 3])
    assert rows == [2, 1, 1]


@pytest.mark.parametrize("family", CPU)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_row_is_the_same_bit_by_bit_whatever_stands_beside_it(family: str, threads: int) -> None:
    """Alone, in a tree, after a prompt computed at once or in parts, on any number of threads."""
    model = make_model(family)
    prompt = np.random.default_rng(7).integers(5, VOCABULARY, 203).tolist()
    plain = CpuTarget(model, Captures(hidden=True), threads=1)
    plain.prefill(prompt)
    expected = []
    for token in (20, 9, 11, 13):
        expected.append(plain.forward(token, empty()))
        expected[-1] = Forward(expected[-1].logits.clone(), expected[-1].hidden)
        plain.commit(())
    target = CpuTarget(model, Captures(hidden=True), threads=threads)
    target.prefill(prompt[:77])
    target.prefill(prompt)
    result = target.forward(20, build(TREE))  # its path 0, 2, 4 is 9, 11, 13
    for row, one in zip((0, 1, 3, 5), expected, strict=True):
        assert torch.equal(result.logits[row], one.logits[0])
        assert result.hidden is not None
        assert one.hidden is not None
        assert torch.equal(result.hidden[row], one.hidden[0])
    target.commit((0, 2))
    assert torch.equal(target.forward(13, build([(-1, 3), (-1, 4)])).logits[0], expected[3].logits[0])


def test_odd_sizes_are_packed_whole() -> None:
    """Heads, hidden size and vocabulary that are not multiples of a panel; weights that are not tied; biases."""
    model = make_model("llama", hidden_size=40, num_attention_heads=4, num_key_value_heads=4, intermediate_size=48,
                       vocab_size=131, attention_bias=True, tie_word_embeddings=False)  # fmt: skip
    for parameter in model.network.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter.data)
    target = make_target(model, "cpu")
    prompt = list(range(5, 45))
    assert close(target.prefill(prompt).logits[0], logits_of(model, prompt)[-1])
    assert target.prefill(prompt).logits.shape == (1, 131)
    rows = target.forward(9, build(TREE)).logits
    assert close(rows[5], logits_of(model, [*prompt, 9, 9, 11, 13])[-1])


def test_a_checkpoint_is_packed_without_loading_the_network(tiny_directory: Path) -> None:
    model = load_model(str(tiny_directory), device="cpu")
    target = make_target(model)
    assert isinstance(target, CpuTarget)
    assert model._network is None
    prompt = [5, 6, 7, 8]
    assert close(target.prefill(prompt).logits[0], logits_of(model, prompt)[-1])


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


@pytest.mark.parametrize("runtime", TARGETS)
def test_a_window_that_the_models_own_code_ignores_is_ignored(runtime: str) -> None:
    """Mistral's weights saved as a Llama's: the configuration still says sliding_window."""
    model = make_model("llama")
    model.network.config.sliding_window = 12
    target = make_target(model, runtime)
    prompt = np.random.default_rng(0).integers(5, VOCABULARY, 40).tolist()
    assert close(target.prefill(prompt).logits[0], logits_of(model, prompt)[-1])
    assert close(target.forward(9, build(TREE)).logits[0], logits_of(model, [*prompt, 9])[-1])


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


def test_two_targets_of_a_model_do_not_disturb_each_other() -> None:
    """One grows, the other is made and used meanwhile."""
    model = make_model("llama", max_position_embeddings=2048)
    prompt = np.random.default_rng(0).integers(5, VOCABULARY, 900).tolist()
    for runtime in TARGETS:
        first = make_target(model, runtime)
        first.prefill(prompt[:700])
        second = make_target(model, runtime)
        second.prefill([5, 6, 7])
        assert close(first.prefill(prompt).logits[0], logits_of(model, prompt)[-1])


def test_quantised_weights_go_the_generic_way() -> None:
    model = make_model("llama")
    model.config.quantization_config = {"quant_method": "fp8"}
    for runtime in ("cpu", "cuda"):
        with pytest.raises(UnsupportedModel, match="quantised"):
            make_target(model, runtime)
    del model.config.quantization_config


@pytest.mark.parametrize("runtime", TARGETS)
@pytest.mark.parametrize("token", [VOCABULARY, 65_535, -1])
def test_a_draft_of_tokens_that_the_model_does_not_have_is_refused(
    token: int, runtime: str, tiny: LanguageModel
) -> None:
    target = make_target(tiny, runtime)
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
