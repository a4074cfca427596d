"""Losslessness, on the embedded model: every drafter writes the text that transformers' own generate writes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specds.datastore.build_dense import build_dense
from specds.datastore.build_suffix import build_suffix
from specds.datastore.creation import create_store
from specds.datastore.store import Store, open_store
from specds.decode.contracts import Use
from specds.decode.counters import Counters
from specds.decode.drafters import DRAFTERS
from specds.decode.engine import Engine
from specds.decode.generation import GenerationOptions, generate
from specds.decode.method import Method
from specds.decode.registry import load
from specds.model import LanguageModel
from specds.reading.prompts import Prompt, read_prompts
from specds.sampling import Sampling

PROMPTS = [row for row in read_prompts([str(Path(__file__).parent / "prompts.jsonl")]) if isinstance(row, Prompt)]
LENGTH = 48


@pytest.fixture(scope="session")
def own_store(tmp_path_factory: pytest.TempPathFactory, smollm: LanguageModel) -> Store:
    """The model's answers to a third of the prompts, so that retrieval meets known and unknown text."""
    store = create_store(tmp_path_factory.mktemp("stores") / "own.ds", smollm.tokenizer)
    generate(store, Engine(smollm), PROMPTS[::3], GenerationOptions(max_new_tokens=LENGTH, parallel=8))
    build_suffix(open_store(store.path))
    build_dense(open_store(store.path), smollm)
    return open_store(store.path)


@pytest.fixture(scope="session")
def expected(smollm: LanguageModel) -> dict[str, list[int]]:
    """Greedy texts by `model.generate`, prompt by prompt."""
    texts = {}
    for prompt in PROMPTS:
        tokens = torch.tensor([smollm.tokenizer.chat(prompt.turns[0])])
        output = smollm.network.generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=LENGTH, do_sample=False
        )
        texts[prompt.id] = output[0, tokens.shape[1] :].tolist()
    return texts


# On the slower runtime those that ask something of it that no other does; the rest with `make test-all`.
ASKING = ("pld", "recycling", "respec", "adapld", "model", "dresd")
CASES = [pytest.param(name, "cpu", PROMPTS, id=f"{name}-cpu") for name in DRAFTERS] + [
    pytest.param(name, "generic", PROMPTS[::8], id=f"{name}-generic", marks=[] if name in ASKING else pytest.mark.slow)
    for name in DRAFTERS
]


@pytest.mark.parametrize(("name", "runtime", "prompts"), CASES)
def test_greedy_texts_are_those_of_generate(
    name: str,
    runtime: str,
    prompts: list[Prompt],
    smollm: LanguageModel,
    own_store: Store,
    expected: dict[str, list[int]],
) -> None:
    found = load(DRAFTERS, name, "drafter")
    draft_model = None
    if found.draft_model is Use.ALWAYS:
        # The target drafts for itself, which takes its time; without these layers it mostly agrees with itself.
        prompts, draft_model = prompts[::4], "skip:2-7"
    stores = [own_store] if found.indexes else []
    engine = Engine(smollm, Method(name, stores=stores, budget=8, draft_model=draft_model), runtime=runtime)
    total = Counters()
    for prompt in prompts:
        answer = engine.answer(prompt, LENGTH)
        assert list(answer.turns[0].tokens) == expected[prompt.id], (name, prompt.id)
        assert answer.turns[0].text == smollm.tokenizer.decode(expected[prompt.id])
        total += answer.counters
    # Drafts must have been at work for this to mean anything.
    assert (total.accepted > 2 * len(prompts)) == (name != "none")
    assert total.tokens == sum(len(expected[prompt.id]) for prompt in prompts)


@pytest.mark.parametrize(("temperature", "top_p"), [(0.7, 0.95), (1.0, 1.0)])
def test_sampled_texts_are_those_of_plain_sampling(
    temperature: float, top_p: float, smollm: LanguageModel, own_store: Store
) -> None:
    """For a prompt that the store knows, one that it does not, and one whose answer stands in it."""
    sampling = Sampling(temperature, top_p=top_p, seed=11)
    prompts = PROMPTS[::8]
    texts: dict[str, list[tuple[int, ...]]] = {}
    accepted: dict[str, int] = {}
    for name in DRAFTERS:
        stores = [own_store] if load(DRAFTERS, name, "drafter").indexes else []
        engine = Engine(smollm, Method(name, stores=stores, budget=8), sampling=sampling)
        assert engine.lossless
        answers = [engine.answer(prompt, 32) for prompt in prompts]
        texts[name] = [answer.turns[0].tokens for answer in answers]
        accepted[name] = sum(answer.counters.accepted for answer in answers)
    assert {name: text for name, text in texts.items() if text != texts["none"]} == {}
    # It was sampling, and drafts were at work.
    assert texts["none"][0] != Engine(smollm).answer(prompts[0], 32).turns[0].tokens
    assert {name for name, count in accepted.items() if count} == {*DRAFTERS} - {"none"}
