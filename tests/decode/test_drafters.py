"""The contract that every registered drafter keeps, and what each proposes."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specds.datastore.build_dense import DenseOptions, build_dense
from specds.datastore.build_suffix import build_suffix
from specds.datastore.store import Store, open_store
from specds.decode.contracts import Resources, Signal, Step
from specds.decode.draft import Draft, empty
from specds.decode.drafters import DRAFTERS
from specds.decode.drafters.dresd import Dresd
from specds.decode.drafters.pld import PromptLookup
from specds.decode.drafters.rest import Rest
from specds.decode.engine import Engine
from specds.decode.method import Method
from specds.decode.registry import describe_options, load, parse_options
from specds.errors import MissingIndex, PromptError, UsageError
from specds.model import LanguageModel
from specds.sampling import Sampling

from ..conftest import VOCABULARY, fill, make_model
from .drafts import is_valid, path_to
from .test_loop import PROMPT, generate


def committed(tokens: list[int], hidden: np.ndarray | None = None) -> Step:
    signals = {} if hidden is None else {Signal.HIDDEN: hidden}
    return Step(1, 0, empty(), (), tuple(tokens), signals, 0.0, 0.0, 0.0, 0.0)


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return make_model(stop=False)


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory, model: LanguageModel) -> Store:
    """The model's own answers to prompts near those decoded below, with both indexes."""
    from specds.datastore.creation import create_store

    store = create_store(tmp_path_factory.mktemp("stores") / "own.ds", model.tokenizer)
    prompts = [[(token + shift) % VOCABULARY for token in PROMPT] for shift in range(0, 40, 2)] + [PROMPT[:-1]]
    store = fill(store, [(prompt, generate(model, prompt, 40)) for prompt in prompts])
    build_suffix(store)
    build_dense(open_store(store.path), model, DenseOptions(index="faiss", dims=16))
    return open_store(store.path)


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_every_drafter_is_lossless_deterministic_and_keeps_its_budget(
    name: str, temperature: float, model: LanguageModel, filled: Store
) -> None:
    found = load(DRAFTERS, name, "drafter")
    stores = [filled] if found.indexes else []
    sampling = Sampling(temperature, top_p=0.95 if temperature else 1.0, seed=4)
    for shift in (0, 1, 6):
        prompt = [(token + shift) % VOCABULARY for token in PROMPT]
        plain = [step.tokens for step in Engine(model, sampling=sampling).steps(prompt, 40)]
        for budget in (0, 1, 7, 64):
            engine = Engine(model, Method(name, stores=stores, budget=budget), sampling=sampling)
            first, second = list(engine.steps(prompt, 40)), list(engine.steps(prompt, 40))
            for steps in (first, second):
                assert [t for step in steps for t in step.tokens] == [t for tokens in plain for t in tokens]
                assert all(is_valid(step.draft) and len(step.draft) <= budget for step in steps)
                assert all(((step.draft.score > 0) & (step.draft.score <= 1)).all() for step in steps)
            assert [s.draft.tokens.tolist() for s in first] == [s.draft.tokens.tolist() for s in second]


@pytest.mark.parametrize("name", [name for name in DRAFTERS if name != "none"])
def test_every_drafter_saves_passes_where_the_text_is_known(name: str, model: LanguageModel, filled: Store) -> None:
    found = load(DRAFTERS, name, "drafter")
    engine = Engine(model, Method(name, stores=[filled] if found.indexes else [], budget=16))
    prompt = PROMPT
    if not found.indexes:
        # The answer stands in the prompt.
        prompt = [*generate(model, PROMPT, 30), *PROMPT]
    steps = list(engine.steps(prompt, 30))
    expected = 30 if not found.indexes else 22
    assert len(steps) < expected


@pytest.mark.parametrize("name", DRAFTERS)
def test_every_drafter_describes_itself(name: str) -> None:
    found = load(DRAFTERS, name, "drafter")
    assert found.summary
    assert all(help for _, _, help in describe_options(found.Options))
    defaults = parse_options(found.Options, {}, name)
    again = parse_options(found.Options, {k: str(v) for k, v in dataclasses.asdict(defaults).items()}, name)
    assert again == defaults
    with pytest.raises(UsageError, match="has no option"):
        parse_options(found.Options, {"nonsense": "1"}, name)


def test_options_are_checked() -> None:
    for settings_, message in (({"length": "ten"}, "'ten'"), ({"length": "0"}, "length is 0")):
        with pytest.raises(UsageError, match=message):
            parse_options(PromptLookup.Options, settings_, "pld")


def test_a_drafter_without_its_store_is_refused(model: LanguageModel, new_store: Callable[..., Store]) -> None:
    with pytest.raises(UsageError, match="none is given"):
        Engine(model, Method("rest"))
    with pytest.raises(MissingIndex, match="no dense index"):
        Engine(model, Method("dresd", stores=[new_store([([5], [6, 7])])]))


@pytest.mark.parametrize("tokens", [[], list(range(2, 100)) * 3])
def test_prompts_that_do_not_fit_are_refused(model: LanguageModel, tokens: list[int]) -> None:
    with pytest.raises(PromptError):
        Engine(model).steps(tokens, 5)


def reference_pld(tokens: list[int], options: PromptLookup.Options) -> list[int]:
    for size in range(options.max_ngram, options.min_ngram - 1, -1):
        for at in range(len(tokens) - size):
            if tokens[at : at + size] == tokens[len(tokens) - size :]:
                return tokens[at + size : at + size + options.length]
    return []


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 4), st.integers(1, 12))
def test_pld_copies_what_followed_the_earliest_longest_match(tokens: list[int], ngram: int, length: int) -> None:
    options = PromptLookup.Options(max_ngram=ngram, length=length)
    drafter = PromptLookup(options)
    drafter.start(tokens[:1])
    drafter.observe(committed(tokens[1:]))
    assert drafter.propose(100).tokens.tolist() == reference_pld(tokens, options)


@given(st.lists(st.integers(0, 3), min_size=4, max_size=40))
@settings(max_examples=60)
def test_pld_proposes_what_transformers_prompt_lookup_proposes(tokens: list[int]) -> None:
    from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

    theirs = PromptLookupCandidateGenerator(
        eos_token_id=None, num_output_tokens=10, max_matching_ngram_size=3, max_length=1000, vocab_size=10
    )
    ids = torch.tensor([tokens])
    candidates, _ = theirs.get_candidates(ids)
    drafter = PromptLookup(PromptLookup.Options())
    drafter.start(tokens)
    assert drafter.propose(100).tokens.tolist() == candidates[0, len(tokens) :].tolist()


def test_pld_scores_are_shares_of_the_matches_that_agree() -> None:
    drafter = PromptLookup(PromptLookup.Options(max_ngram=1))
    drafter.start([9, 1, 5, 9, 1, 6, 9, 2, 9])
    draft = drafter.propose(3)
    assert draft.tokens.tolist() == [1, 5, 9]
    assert draft.score.tolist() == pytest.approx([2 / 4, 1 / 3, 1 / 2])


def reference_rest(documents: list[list[int]], context: list[int], options: Rest.Options) -> Counter[tuple[int, ...]]:
    """All continuations of the longest suffix that occurs with one, counted by every prefix."""
    for length in range(min(options.max_match, len(context)), options.min_match - 1, -1):
        found: Counter[tuple[int, ...]] = Counter()
        for document in documents:
            for at in range(len(document) - length):
                if document[at : at + length] == context[len(context) - length :]:
                    follows = document[at + length : at + length + options.length]
                    found.update(tuple(follows[:end]) for end in range(1, len(follows) + 1))
        if found:
            return found
    return Counter()


def test_rest_drafts_the_counted_continuations(new_store: Callable[..., Store]) -> None:
    random = np.random.default_rng(0)
    documents = [random.integers(5, 9, random.integers(2, 60)).tolist() for _ in range(30)]
    store = new_store([(document[:1], document[1:]) for document in documents])
    build_suffix(store)
    index = open_store(store.path).suffix_index()
    for nodes in (8, 64):
        options = Rest.Options(nodes=nodes)
        drafter = Rest(options, Resources((index,)))
        for _ in range(60):
            context = random.integers(5, 9, 12).tolist()
            drafter.start(context)
            draft = drafter.propose(1000)
            counted = reference_rest(documents, context, options)
            best = sorted(counted, key=lambda path: (-counted[path], len(path), path))[:nodes]
            assert [path_to(draft, node) for node in range(len(draft))] == best
    assert Rest(Rest.Options(), Resources((index,))).propose(10).tokens.tolist() == []


def test_rest_takes_the_store_with_the_longer_match(new_store: Callable[..., Store]) -> None:
    indexes = []
    for documents in ([([5], [6, 7, 20, 21])], [([5], [5, 6, 7, 30, 31]), ([9], [6, 7, 40])]):
        store = new_store(documents)
        build_suffix(store)
        indexes.append(open_store(store.path).suffix_index())
    for order in (indexes, indexes[::-1]):
        drafter = Rest(Rest.Options(), Resources(order))
        drafter.start([5, 5, 6, 7])
        assert drafter.propose(10).tokens.tolist() == [30, 31]


def states(model: LanguageModel, tokens: list[int]) -> np.ndarray:
    with torch.inference_mode():
        output = model.network(torch.tensor([tokens]), output_hidden_states=True, use_cache=False)
    hidden: np.ndarray = output.hidden_states[-1][0].numpy()
    return hidden


def test_dresd_drafts_what_followed_the_nearest_states_and_the_picked_token(
    model: LanguageModel, filled: Store
) -> None:
    index = filled.dense_index(model.fingerprint)
    options = Dresd.Options(drafts=4, length=6, neighbours=50)
    drafter = Dresd(options, Resources(dense=(index,)))
    (part,) = index.parts
    stream = part.tokens.astype(np.int64)
    ends = np.flatnonzero(stream == 65535)
    documents = [piece[piece != 65535].tolist() for piece in np.split(stream, ends)]
    hidden_states = [states(model, document)[:-1] for document in documents if document]
    keys = part.normalizer.keys(np.concatenate(hidden_states))
    prompt = [(token + 1) % VOCABULARY for token in PROMPT]
    hidden = states(model, prompt)[-1:]
    nearest = np.argsort(-(keys @ part.normalizer.keys(hidden)[0]), kind="stable")[:50]
    positions = np.asarray(part.positions).astype(np.int64)
    picked = int(stream[positions[nearest[0]]])
    expected: set[tuple[int, ...]] = set()
    drafts: list[tuple[int, ...]] = []
    for row in nearest:
        follows = stream[positions[row] : positions[row] + 7].tolist()
        follows = follows[: follows.index(65535)] if 65535 in follows else follows
        draft = tuple(follows[1:])
        if follows[0] == picked and draft and draft not in drafts and len(drafts) < 4:
            drafts.append(draft)
            expected |= {draft[:end] for end in range(1, len(draft) + 1)}
    drafter.start(prompt)
    drafter.observe(committed([picked], hidden))
    proposed: Draft = drafter.propose(1000)
    assert {path_to(proposed, node) for node in range(len(proposed))} == expected
    # A token that no neighbour has next leaves nothing to draft.
    unseen: Any = next(t for t in range(VOCABULARY) if t not in {int(stream[p]) for p in positions[nearest]})
    drafter.observe(committed([unseen], hidden))
    assert len(drafter.propose(1000)) == 0
