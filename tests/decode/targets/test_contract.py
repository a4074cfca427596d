"""What every runtime promises, for every family of models that it runs."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from specds.decode.contracts import TOP, Activations, Captures, Forward, Item
from specds.decode.draft import chain
from specds.decode.targets import TARGETS, make_target
from specds.errors import CorruptStore, PromptError, UsageError
from specds.model import LanguageModel

from ...conftest import VOCABULARY, make_model
from ..drafts import build
from .passes import RUNTIMES, TREE, accept, close, logits_of, opened, prefill, show, step


@pytest.mark.parametrize(("runtime", "family"), RUNTIMES)
@pytest.mark.parametrize("length", [3, 30])
def test_a_tree_gives_what_its_branches_give(runtime: str, family: str, length: int) -> None:
    """Also beyond the sliding window, which is 12 in the families that have one."""
    model = make_model(family)
    prompt = np.random.default_rng(length).integers(5, VOCABULARY, length).tolist()
    draft = build(TREE)
    target = make_target(model, runtime)
    slot, first = prefill(target, prompt[:-1])
    assert close(first.logits[0], logits_of(model, prompt[:-1])[-1])
    rows = step(target, slot, prompt[-1], draft).logits
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
    slot, _ = prefill(target, prompt[:-1])
    text = list(prompt)
    for path, following in [((0, 2, 4, 6), 21), ((), 22), ((1, 3, 7), 23), ((0,), 24)]:
        step(target, slot, text[-1], draft)
        accept(target, slot, path)
        text += [*draft.tokens[list(path)].tolist(), following]
        plain = step(target, slot, text[-1])
        assert close(plain.logits[0], logits_of(model, text)[-1]), (family, path)
        accept(target, slot)
        assert list(slot.tokens) == text
        text += [30]


@pytest.mark.parametrize("runtime", TARGETS)
def test_what_is_not_committed_is_forgotten(runtime: str, tiny: LanguageModel) -> None:
    target = make_target(tiny, runtime)
    prompt = list(range(5, 66))
    slot, _ = prefill(target, prompt)
    step(target, slot, 9, build(TREE))
    target.layer_skip(slot, 9, 0, frozenset({1}))
    assert close(step(target, slot, 8).logits[0], logits_of(tiny, [*prompt, 8])[-1])
    target.commit(slot, [])
    assert list(slot.tokens) == prompt
    assert close(step(target, slot, 7).logits[0], logits_of(tiny, [*prompt, 7])[-1])


@pytest.mark.parametrize("runtime", TARGETS)
def test_a_pass_without_some_layers_looks_at_what_all_layers_left(runtime: str, tiny: LanguageModel) -> None:
    """Drafted token after token, over a page's end; the next pass knows nothing of it."""
    target = make_target(tiny, runtime, Captures(layer=2))
    prompt, drafted = np.random.default_rng(4).integers(5, VOCABULARY, 62).tolist(), [40, 41, 42, 43]
    slot, _ = prefill(target, prompt)
    layers, cache = tiny.decoder.layers, DynamicCache()
    with torch.inference_mode():
        tiny.network(torch.tensor([prompt]), past_key_values=cache)
        try:
            tiny.decoder.layers = torch.nn.ModuleList([layers[0], layers[2]])
            expected = [tiny.network(torch.tensor([[token]]), past_key_values=cache).logits[0, 0] for token in drafted]
        finally:
            tiny.decoder.layers = layers
    for ahead, token in enumerate(drafted):
        assert close(target.layer_skip(slot, token, ahead, frozenset({1})), expected[ahead])
    assert close(step(target, slot, 40).logits[0], logits_of(tiny, [*prompt, 40])[-1])


@pytest.mark.parametrize("runtime", TARGETS)
def test_hidden_states_are_the_final_normed_ones(runtime: str, tiny: LanguageModel) -> None:
    prompt = [7, 8, 9, 10, 11]
    draft = chain([12, 13], [0.5, 0.5])
    target = make_target(tiny, runtime, Captures(hidden=True))
    slot, first = prefill(target, prompt)
    second = step(target, slot, 14, draft)
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
    target = make_target(tiny, runtime)
    result = target.forward([Item.chain(opened(target, [5, 6, 7]), [5, 6, 7])])
    assert isinstance(result, Forward)
    assert result.hidden is None
    assert result.logits.shape == (1, VOCABULARY)


@pytest.mark.parametrize("runtime", TARGETS)
def test_only_rows_that_are_wanted_have_logits(runtime: str, tiny: LanguageModel) -> None:
    """None of the middle of a prompt, some of another's end, all of a draft."""
    target = make_target(tiny, runtime, Captures(hidden=True))
    prompts = [list(range(5, 85)), [9, 8, 7, 6], [20, 21], list(range(60, 5, -1))]
    slots = [opened(target, prompt) for prompt in prompts]
    wanted = [0, 3, 2, 0]
    result = target.forward(
        [Item.chain(slot, prompt, count) for slot, prompt, count in zip(slots, prompts, wanted, strict=True)]
    )
    assert result.logits.shape == (5, VOCABULARY)
    for number, (prompt, count) in enumerate(zip(prompts, wanted, strict=True)):
        rows = result.of(number)
        assert rows.hidden is not None
        assert rows.logits.shape == (count, VOCABULARY)
        assert rows.hidden.shape == (count, 32)
        if count:
            assert close(rows.logits, logits_of(tiny, prompt)[-count:])
    result = target.forward([Item.chain(slots[0], [5, 6], 0)])
    assert result.logits.shape == (0, VOCABULARY)


@pytest.mark.parametrize(("runtime", "family"), RUNTIMES)
def test_a_layer_and_the_likeliest_tokens_are_kept_of_the_whole_text(runtime: str, family: str) -> None:
    """Of a prompt in several chunks, of accepted branches, and of the part of a prompt that is not computed again."""
    model = make_model(family)
    target = make_target(model, runtime, Captures(layer=2, top=True))
    text = np.random.default_rng(3).integers(5, VOCABULARY, 140).tolist()
    slot, _ = prefill(target, text, every=True)
    check_captures(model, text, target.activations(slot))
    draft = build(TREE)
    for path, following in [((0, 2, 4, 6), 21), ((), 22), ((1, 3, 7), 23)]:
        last = 30 + following
        step(target, slot, last, draft)
        accept(target, slot, path)
        text += [last, *draft.tokens[list(path)].tolist()]
        check_captures(model, text, target.activations(slot, len(text) - len(path) - 1))
    for again in ([*text, 40, 41], [*text[:50], 42]):
        other, _ = prefill(target, again, every=True)
        check_captures(model, again, target.activations(other))


def check_captures(model: LanguageModel, text: list[int], result: Activations) -> None:
    """The last tokens of the text have these states and likeliest tokens, by an ordinary pass of the network."""
    with torch.inference_mode():
        output = model.network(torch.tensor([text]), output_hidden_states=True, use_cache=False)
    assert result.layer is not None
    assert result.top is not None
    rows = len(result.layer)
    assert result.layer.shape == (rows, 32)
    assert result.top.shape == (rows, TOP)
    expected = output.hidden_states[2][0, -rows:]
    assert torch.allclose(torch.from_numpy(result.layer.copy()), expected, atol=1e-4, rtol=1e-4)
    logits = output.logits[0, -rows:]
    best = torch.topk(logits, TOP, dim=-1).values
    assert torch.allclose(logits.gather(-1, torch.from_numpy(result.top.astype(np.int64))), best, atol=1e-3)


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
from tests.decode.targets.passes import prefill
model = make_model(vocab_size=262_144, hidden_size=16, max_position_embeddings=8192, tie_word_embeddings=True)
prompt = np.random.default_rng(0).integers(5, 100, 4096).tolist()
target = make_target(model, sys.argv[1], Captures(layer=1, top=True))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
slot, _ = prefill(target, prompt, every=True)
result = target.activations(slot)
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
    """Also where a prompt begins like one before, in whole or in part, and where it takes several chunks."""
    model = make_model(family)
    target = make_target(model, runtime)
    long = np.random.default_rng(2).integers(5, VOCABULARY, 250).tolist()
    for prompt in ([5, 6, 7], long, long[:100], [*long[:101], 7], [*long[:100], 8], long, [9]):
        slot, result = prefill(target, prompt)
        assert close(result.logits[0], logits_of(model, prompt)[-1])
        step(target, slot, 20, build(TREE))
        if len(prompt) % 2:
            accept(target, slot, (0, 2))
        target.close(slot)


@pytest.mark.parametrize("runtime", TARGETS)
@pytest.mark.parametrize("done", [False, True])
def test_a_common_beginning_is_not_computed_twice(runtime: str, done: bool, tiny: LanguageModel) -> None:
    """Whether the request that computed it is done or still being answered."""
    target = make_target(tiny, runtime)
    first = np.random.default_rng(0).integers(5, VOCABULARY, 150).tolist()
    slot, _ = prefill(target, first)
    step(target, slot, 7, build([(-1, 9), (0, 10)]))
    accept(target, slot, (0, 1))
    if done:
        target.close(slot)
    known = [*first, 7, 9, 10]
    for prompt, held in (
        ([*known, 11, 12], len(known)),  # the turn after
        ([*first[:30], 3], 30),  # another prompt with the same system prompt
        ([*first[:30], 3, 4], 31),
        (first[:65], 64),
        (first[:64], 63),
        ([*first[:128], 4], 128),
    ):
        slot = opened(target, prompt)
        assert len(slot.tokens) == held
        assert close(show(target, slot, prompt).logits[0], logits_of(tiny, prompt)[-1])
        step(target, slot, 9, build(TREE))
        accept(target, slot, (1, 3))  # what it goes on with is nobody else's
        if done:
            target.close(slot)


@pytest.mark.parametrize(("runtime", "pages"), [("cpu", 5), ("generic", 8), ("cuda", 8)])
def test_requests_wait_where_the_memory_is_taken(runtime: str, pages: int, tiny: LanguageModel) -> None:
    """3 layers of 2 key-value heads of 8 numbers are 24,576 bytes for 64 tokens; cpu pads values to 16."""
    target = make_target(tiny, runtime, memory=200_000)
    prompts = np.random.default_rng(0).integers(5, VOCABULARY, (pages, 50)).tolist()
    slots = [target.open(prompt, 64) for prompt in prompts]
    assert None not in slots
    assert target.open([5, 6], 7) is None
    for number, prompt in enumerate(prompts):
        assert close(show(target, slots[number], prompt).logits[0], logits_of(tiny, prompt)[-1])
    assert target.open(prompts[0], 52) is None
    target.close(slots[3])
    assert target.open([5, 6], 65) is None
    again, result = prefill(target, [9, 8, 7, 6], room=60)
    assert close(result.logits[0], logits_of(tiny, [9, 8, 7, 6])[-1])
    for number in (0, 1, 2, 4):
        shown = step(target, slots[number], 7).logits[0]
        assert close(shown, logits_of(tiny, [*prompts[number], 7])[-1])
    with pytest.raises(PromptError, match="pages of the key-value cache"):
        target.open([5, 6], pages * 64 + 1)
    for slot in (*slots[:3], *slots[4:], again):
        target.close(slot)
    whole = np.random.default_rng(1).integers(5, VOCABULARY, pages * 64 - 1).tolist()
    assert close(prefill(target, whole, room=1)[1].logits[0], logits_of(tiny, whole)[-1])


@pytest.mark.parametrize("runtime", TARGETS)
def test_a_request_that_is_no_numbers_leaves_the_others_alone(runtime: str) -> None:
    """Beside it in a pass, and in the pages that it had."""
    model = make_model()
    with torch.no_grad():
        model.network.get_input_embeddings().weight[99] = torch.nan
    target = make_target(model, runtime, memory=300_000)
    rng = np.random.default_rng(0)
    bad = [*rng.integers(5, 90, 20).tolist(), 99, 5, 6]
    texts = rng.integers(5, 90, (3, 50)).tolist()
    texts = [texts[0], texts[1][:9], texts[2][:1]]
    slots = [opened(target, text, 6) for text in (bad, *texts)]
    for slot, text in zip(slots, (bad, *texts), strict=True):
        target.forward([Item.chain(slot, text[:-1])]) if len(text) > 1 else None
        target.commit(slot, range(len(text) - 1))
    for turn in range(3):
        items = [Item.draft(slots[0], bad[-1], build(TREE))]
        items += [
            Item.draft(slot, text[-1], build(TREE)) if (number + turn) % 2 else Item.chain(slot, text[-1:])
            for number, (slot, text) in enumerate(zip(slots[1:], texts, strict=True))
        ]
        result = target.forward(items)
        assert result.of(0).logits.isnan().any()
        for number, text in enumerate(texts):
            assert close(result.of(number + 1).logits[0], logits_of(model, text)[-1])
            target.commit(slots[number + 1], [0])
            text.append(40 + turn)
        target.commit(slots[0], [0])
    target.close(slots[0])
    for seed in range(12):
        text = np.random.default_rng(100 + seed).integers(5, 90, 30).tolist()
        slot, result = prefill(target, text, room=1)
        assert close(result.logits[0], logits_of(model, text)[-1])
        both = target.forward([Item.chain(slot, [7]), Item.chain(slots[1], texts[0][-1:])])
        assert close(both.of(0).logits[0], logits_of(model, [*text, 7])[-1])
        assert close(both.of(1).logits[0], logits_of(model, texts[0])[-1])
        target.close(slot)


@pytest.mark.parametrize("runtime", TARGETS)
def test_a_window_that_the_models_own_code_ignores_is_ignored(runtime: str) -> None:
    """Mistral's weights saved as a Llama's: the configuration still says sliding_window."""
    model = make_model("llama")
    model.network.config.sliding_window = 12
    target = make_target(model, runtime)
    prompt = np.random.default_rng(0).integers(5, VOCABULARY, 40).tolist()
    slot, result = prefill(target, prompt)
    assert close(result.logits[0], logits_of(model, prompt)[-1])
    assert close(step(target, slot, 9, build(TREE)).logits[0], logits_of(model, [*prompt, 9])[-1])


def test_two_targets_of_a_model_do_not_disturb_each_other() -> None:
    """One grows, the other is made and used meanwhile."""
    model = make_model("llama", max_position_embeddings=2048)
    prompt = np.random.default_rng(0).integers(5, VOCABULARY, 900).tolist()
    for runtime in TARGETS:
        first = make_target(model, runtime)
        slot = opened(first, prompt)
        show(first, slot, prompt[:700])
        prefill(make_target(model, runtime), [5, 6, 7])
        assert close(show(first, slot, prompt).logits[0], logits_of(model, prompt)[-1])


@pytest.mark.parametrize("runtime", TARGETS)
@pytest.mark.parametrize("token", [VOCABULARY, 65_535, -1])
def test_a_draft_of_tokens_that_the_model_does_not_have_is_refused(
    token: int, runtime: str, tiny: LanguageModel
) -> None:
    target = make_target(tiny, runtime)
    slot, _ = prefill(target, [5, 6])
    with pytest.raises(CorruptStore, match="token ids"):
        step(target, slot, 7, chain([8, token], [0.5, 0.5]))
    # The request can go on without it.
    assert close(step(target, slot, 7).logits[0], logits_of(tiny, [5, 6, 7])[-1])
