"""A replay of the embedded model's answers counts what decoding counts, drafter by drafter."""

from __future__ import annotations

from importlib.resources import files

import pytest

from specds.calibration.answers import Recorded
from specds.calibration.replay import replay
from specds.datastore.build_dense import build_dense
from specds.datastore.build_suffix import build_suffix
from specds.datastore.creation import create_store
from specds.datastore.store import Store, open_store
from specds.decode.drafters import DRAFTERS
from specds.decode.engine import Engine
from specds.decode.generation import GenerationOptions, generate
from specds.decode.method import Method
from specds.decode.registry import load
from specds.model import LanguageModel
from specds.reading.prompts import Prompt, read_prompts

LENGTH, BUDGET = 24, 20


ROWS = read_prompts([str(files("specds.cli") / "demo" / "corpus.jsonl")])
PROMPTS = [row for row in ROWS if isinstance(row, Prompt)]


@pytest.fixture(scope="module")
def half_store(tmp_path_factory: pytest.TempPathFactory, smollm: LanguageModel) -> Store:
    """The model's answers to every second prompt."""
    store = create_store(tmp_path_factory.mktemp("stores") / "half.ds", smollm.tokenizer)
    generate(store, Engine(smollm), PROMPTS[::2], GenerationOptions(max_new_tokens=LENGTH, parallel=10))
    build_suffix(open_store(store.path))
    build_dense(open_store(store.path), smollm)
    return open_store(store.path)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in DRAFTERS if name != "model"])
def test_a_replay_of_forty_prompts_is_exact(name: str, smollm: LanguageModel, half_store: Store) -> None:
    prompts = [smollm.tokenizer.chat(list(prompt.turns[0])) for prompt in PROMPTS]
    assert len(prompts) >= 40
    stores = [half_store] if load(DRAFTERS, name, "drafter").indexes else []
    engine = Engine(smollm, Method(name, stores=stores, budget=BUDGET))
    measured = [list(engine.steps(prompt, LENGTH)) for prompt in prompts]
    answers = []
    for prompt, steps in zip(prompts, measured, strict=True):
        tokens = tuple(token for step in steps for token in step.tokens)
        answers.append(Recorded("", 0, tuple(prompt), tokens, tokens[-1] in smollm.stop_tokens, LENGTH))
    method = Method(name, name, tuple(str(store.path) for store in stores))
    for steps, row in zip(measured, replay(smollm, [method], answers, budget=BUDGET), strict=True):
        assert [step.tokens for step in steps] == [step.tokens for step in row.steps]
        assert [step.draft.tokens.tolist() for step in steps] == [step.draft.tokens.tolist() for step in row.steps]
        assert [step.accepted for step in steps] == [step.accepted for step in row.steps]
