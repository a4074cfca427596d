from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specds.datastore.build_dense import DenseOptions, build_dense
from specds.datastore.build_suffix import build_suffix
from specds.datastore.creation import create_store
from specds.datastore.store import Store, open_store
from specds.decode.contracts import Step
from specds.decode.counters import Counters
from specds.decode.drafters import DRAFTERS
from specds.decode.drafters.none import Null
from specds.decode.engine import Engine
from specds.decode.loop import decode_one
from specds.decode.method import Method
from specds.decode.pricing.budget import Fixed
from specds.decode.registry import load
from specds.decode.targets import TARGETS
from specds.decode.targets.generic import HuggingFaceTarget
from specds.decode.verifiers import make_verifier
from specds.model import LanguageModel
from specds.sampling import Sampling

from ..conftest import STOP, VOCABULARY, fill, make_model
from .drafts import Mixed, Oracle, Scripted, Wrong
from .requests import Arriving, Asked, Watched, memory_of, watch

PROMPT = [9, 30, 12, 5, 77, 64, 9, 30]


class CountingTarget(HuggingFaceTarget):
    """Counts forward passes of the network itself."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__(model)
        self.passes = 0
        model.network.register_forward_pre_hook(self._count)

    def _count(self, *arguments: object) -> None:
        self.passes += 1


def generate(model: LanguageModel, prompt: list[int], length: int) -> list[int]:
    """What transformers itself generates: the independent reference."""
    output = model.network.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=length,
        do_sample=False,
    )
    return output[0, len(prompt) :].tolist()


def run(model: LanguageModel, drafter: object, prompt: list[int], length: int, budget: int = 12) -> list[Step]:
    steps = decode_one(
        HuggingFaceTarget(model),
        drafter,  # type: ignore[arg-type]
        make_verifier("greedy", Sampling()),
        prompt,
        max_new_tokens=length,
        budget=Fixed(budget),
        stop_tokens=model.stop_tokens,
    )
    return list(steps)


def text(steps: list[Step]) -> list[int]:
    return [token for step in steps for token in step.tokens]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "phi3", "neox"])
@pytest.mark.parametrize("kind", [Oracle, Wrong, Mixed])
def test_any_draft_gives_the_text_of_generate(family: str, kind: type[Scripted]) -> None:
    """40 tokens cross the sliding window of 12 of the families that have one."""
    model = make_model(family, stop=False)
    for seed in range(3):
        prompt = [(token + 7 * seed) % VOCABULARY for token in PROMPT]
        expected = generate(model, prompt, 40)
        assert text(run(model, Null(Null.Options()), prompt, 40)) == expected
        drafter = kind(expected, VOCABULARY, seed)  # type: ignore[call-arg]
        assert text(run(model, drafter, prompt, 40)) == expected


def stopping_text(model: LanguageModel) -> tuple[list[int], list[int]]:
    """A prompt whose answer ends with a stop token after a few others."""
    for number in range(2000):
        prompt = [5 + number % 120, 5 + number * 7 % 120]
        expected = generate(model, prompt, 24)
        if expected[-1] == STOP and len(expected) >= 5:
            return prompt, expected
    raise AssertionError("no prompt of this model stops")


def test_a_stop_token_inside_an_accepted_block_ends_the_text(tiny: LanguageModel) -> None:
    prompt, expected = stopping_text(tiny)
    # The draft goes on after the stop token, with what the model would say next.
    beyond = [*expected, 20, 21, 22, 23]
    steps = run(tiny, Oracle(beyond, VOCABULARY), prompt, 60, budget=64)
    assert text(steps) == expected
    assert len(steps) == 2
    assert steps[-1].accepted == len(steps[-1].tokens)


@pytest.mark.parametrize("length", [1, 2, 3, 7, 13])
def test_max_new_tokens_inside_a_block_is_kept_exactly(length: int) -> None:
    model = make_model(stop=False)
    expected = generate(model, PROMPT, 40)
    steps = run(model, Oracle(expected, VOCABULARY), PROMPT, length)
    assert text(steps) == expected[:length]
    # Nothing is drafted that could not be committed.
    assert all(int(step.draft.depths().max(initial=0)) < length for step in steps)


def test_a_prompt_of_one_token() -> None:
    model = make_model(stop=False)
    expected = generate(model, [9], 20)
    assert text(run(model, Mixed(expected, VOCABULARY), [9], 20)) == expected


def test_a_budget_of_nothing_is_plain_decoding() -> None:
    model = make_model(stop=False)
    expected = generate(model, PROMPT, 12)
    steps = run(model, Oracle(expected, VOCABULARY), PROMPT, 12, budget=0)
    assert text(steps) == expected
    assert all(len(step.draft) == 0 for step in steps)


def test_requests_that_are_stepped_side_by_side_do_not_mix_their_texts(tiny: LanguageModel) -> None:
    engine = Engine(tiny, Method("pld"))
    prompts = [9, 30, 12], [50, 60]
    alone = [text(list(engine.steps(prompt, 10))) for prompt in prompts]
    told: tuple[list[Step], list[Step]] = [], []
    begun = [engine.steps(prompt, 10) for prompt in prompts]
    for _ in range(10):
        for steps, rest in zip(told, begun, strict=True):
            steps += islice(rest, 1)
    assert [text(steps) for steps in told] == alone
    abandoned = engine.steps([50, 60], 10)
    next(abandoned)
    assert text(list(engine.steps([9, 30, 12], 10))) == alone[0]


class Places:
    """Notes the furthest position that a network is asked about."""

    def __init__(self, model: LanguageModel) -> None:
        self.furthest = -1
        self._hook = model.network.register_forward_pre_hook(self._note, with_kwargs=True)

    def __enter__(self) -> Places:
        return self

    def __exit__(self, *exception: object) -> None:
        self._hook.remove()

    def _note(self, network: object, arguments: object, named: dict[str, torch.Tensor]) -> None:
        self.furthest = max(self.furthest, int(named["position_ids"].max()))


CONTEXT = 64
LENGTHS = (20, 50, 60, 62, 63)


@pytest.fixture(scope="module")
def confined() -> LanguageModel:
    """A model with a short context and so few tokens that it repeats itself, and a prompt lookup is often right."""
    return make_model(seed=2, stop=False, vocab_size=16, max_position_embeddings=CONTEXT)


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory, confined: LanguageModel) -> Store:
    """A store with the model's own texts up to the end of its context, and both indexes."""
    store = create_store(tmp_path_factory.mktemp("crowded") / "own.ds", confined.tokenizer)
    prompts = [long_prompt(length, seed) for length in LENGTHS for seed in range(3)]
    fill(store, [(prompt, generate(confined, prompt, CONTEXT - len(prompt))) for prompt in prompts])
    build_suffix(open_store(store.path))
    build_dense(open_store(store.path), confined, DenseOptions(index="faiss", dims=16))
    return open_store(store.path)


def long_prompt(length: int, seed: int) -> list[int]:
    return [(5 + 7 * seed + 7 * (number % 9)) % 16 for number in range(length)]


@pytest.mark.parametrize("runtime", TARGETS)
@pytest.mark.parametrize("name", DRAFTERS)
def test_a_text_that_fills_the_context_is_that_of_generate(
    name: str, runtime: str, confined: LanguageModel, crowded: Store
) -> None:
    """Drafts go as far as the last position and never beyond it."""
    stores = [crowded] if load(DRAFTERS, name, "drafter").indexes else []
    total, in_last = Counters(), 0
    for budget in (3, 64):
        engine = Engine(confined, Method(name, stores=stores, budget=budget), runtime=runtime)
        for length in LENGTHS:
            for seed in range(3):
                prompt = long_prompt(length, seed)
                with Places(confined) as places:
                    steps = list(engine.steps(prompt, 10 * CONTEXT))
                assert text(steps) == generate(confined, prompt, CONTEXT - length), (length, seed, budget)
                # The last token is committed and not looked at.
                assert runtime != "generic" or places.furthest == CONTEXT - 2
                total += Counters.of(steps)
                in_last += steps[-1].accepted
    if name != "none":
        assert total.accepted > 50
        # Some text ended inside an accepted block.
        assert in_last > 0


@pytest.mark.parametrize("kind", [Oracle, Wrong, Mixed])
def test_every_step_is_one_forward_pass_and_tokens_add_up(kind: type[Scripted]) -> None:
    model = make_model(stop=False)
    expected = generate(model, PROMPT, 30)
    target = CountingTarget(model)
    drafter = kind(expected, VOCABULARY)
    steps = list(
        decode_one(target, drafter, make_verifier("greedy", Sampling()), PROMPT, max_new_tokens=30, budget=Fixed(12))
    )  # type: ignore[arg-type]
    assert target.passes == len(steps)
    assert [step.index for step in steps] == list(range(len(steps)))
    assert [step.position for step in steps] == [
        len(PROMPT) + sum(len(before.tokens) for before in steps[:number]) for number in range(len(steps))
    ]
    counters = Counters.of(steps)
    assert counters.mat * counters.steps == pytest.approx(counters.tokens)
    assert counters.tokens == 30
    # Each step commits what was accepted and one token of the target's own.
    assert all(len(step.tokens) == len(step.path) + 1 for step in steps)
    assert drafter.observed == steps[:-1]


def test_an_oracle_needs_few_passes_and_a_wrong_drafter_as_many_as_plain_decoding() -> None:
    model = make_model(stop=False)
    expected = generate(model, PROMPT, 40)
    assert len(run(model, Oracle(expected, VOCABULARY), PROMPT, 40, budget=12)) == 1 + 3
    wrong = run(model, Wrong(expected, VOCABULARY), PROMPT, 40, budget=12)
    assert len(wrong) == 40
    assert Counters.of(wrong).accepted == 0


def test_the_budget_bounds_the_rows_of_every_step() -> None:
    model = make_model(stop=False)
    expected = generate(model, PROMPT, 30)
    steps = run(model, Wrong(expected, VOCABULARY), PROMPT, 30, budget=5)
    assert max(len(step.draft) for step in steps) == 5


HEADERS = np.random.default_rng(8).integers(2, 40, (2, 260)).tolist()
MIXED = ("none", "auto", "pld", "sam", "recycling", "adapld", "respec", "model")


@pytest.fixture(scope="module")
def roomy() -> LanguageModel:
    """A model with a context of a thousand tokens that stops now and then, and repeats itself."""
    return make_model(seed=3, vocab_size=40, max_position_embeddings=1024)


@st.composite
def mixtures(draw: st.DrawFn) -> list[Asked]:
    """Requests with prompts of 1 to 300 tokens, many of which begin alike; some go on where others ended."""
    found: list[Asked] = []
    for number in range(draw(st.integers(2, 9))):
        header = HEADERS[draw(st.integers(0, 1))][: draw(st.sampled_from([0, 0, 1, 63, 64, 65, 130, 260]))]
        rest = np.random.default_rng(draw(st.integers(0, 3))).integers(2, 40, draw(st.integers(1, 40))).tolist()
        after = draw(st.one_of(st.none(), st.integers(0, number - 1))) if number else None
        tokens = tuple(rest) if after is not None else (*header, *rest)
        found.append(Asked(tokens, draw(st.integers(1, 40)), draw(st.integers(0, 2)), after))
    return found


def check_trace(arriving: Arriving, watched: Watched, chunk: int, parallel: int) -> None:
    """Steps add up to texts and passes: no request twice in one, and nothing in one that no step says."""
    writes: dict[int, int] = {}
    requests: dict[int, int] = {}
    for number, steps in arriving.steps.items():
        assert [step.index for step in steps] == list(range(len(steps)))
        position = len(arriving.prompts[number])
        passes = [step.forward_pass for step in steps]
        assert passes == sorted(set(passes))
        for step in steps:
            assert step.position == position
            position += len(step.tokens)
            requests[step.forward_pass] = requests.get(step.forward_pass, 0) + 1
            if step.index:
                assert step.pass_tokens == sum(watched.rows[step.forward_pass])
                writes[step.forward_pass] = writes.get(step.forward_pass, 0) + 1 + len(step.draft)
    read = [sum(rows) - writes.get(place, 0) for place, rows in enumerate(watched.rows)]
    assert min(read) >= 0
    assert max(read) <= chunk
    assert max(requests.values()) <= parallel
    assert watched.most <= parallel
    assert sum(read) <= sum(map(len, arriving.prompts.values()))


def drafted(step: Step) -> tuple[object, ...]:
    return step.draft.tokens.tolist(), step.draft.parents.tolist(), step.draft.score.tolist(), step.path


@settings(max_examples=8, deadline=None)
@given(st.data())
@pytest.mark.parametrize("name", MIXED)
def test_texts_of_many_requests_are_those_of_each_alone(name: str, roomy: LanguageModel, data: st.DataObject) -> None:
    """Whatever arrives when, at any temperature: the texts of plain decoding, each on an engine of its own."""
    sampling = Sampling(data.draw(st.sampled_from([0.0, 0.8])), seed=1)
    asked, parallel = data.draw(mixtures()), data.draw(st.integers(1, 8))
    budget = data.draw(st.sampled_from([3, 16] if name != "auto" else [None, 12]))
    # Room for the longest text there can be, or for all.
    memory = data.draw(st.sampled_from([None, memory_of(roomy, 18)]))
    engine = Engine(roomy, Method(name, budget=budget), sampling, runtime="cpu", kv_memory=memory)
    watched, chunk = watch(engine), engine._target.chunk
    late = data.draw(st.randoms(use_true_random=False))
    arriving = Arriving(engine, asked, lambda: late.random() < 0.3)
    arriving.run(parallel)
    assert not arriving.errors
    assert not watched.slots
    for number, prompt in arriving.prompts.items():
        plain = Engine(roomy, sampling=sampling, runtime="cpu")
        alone = text(list(plain.steps(prompt, asked[number].length, sample=asked[number].sample)))
        assert list(arriving.text(number)) == alone
        if budget is not None:
            # Drafts, too, depend on nothing but the request.
            again = Engine(roomy, Method(name, budget=budget), sampling=sampling, runtime="cpu")
            steps = again.steps(prompt, asked[number].length, sample=asked[number].sample)
            assert [drafted(step) for step in arriving.steps[number]] == [drafted(step) for step in steps]
    check_trace(arriving, watched, chunk, parallel)


def test_a_place_that_becomes_free_is_taken_at_once(roomy: LanguageModel) -> None:
    """Short and long answers: as long as somebody waits, all places are in use."""
    engine = Engine(roomy, runtime="cpu")
    watched = watch(engine)
    asked = [Asked((5 + number, 9, 30), 4 if number % 2 else 30) for number in range(12)]
    arriving = Arriving(engine, asked)
    arriving.run(4)
    steps = [step for steps in arriving.steps.values() for step in steps]
    begun = sorted(steps[0].forward_pass for steps in arriving.steps.values())
    assert [len(rows) for rows in watched.rows[: begun[-1]]] == [4] * begun[-1]
    assert len(watched.rows) < 0.5 * len(steps)


@pytest.mark.parametrize("runtime", ["generic", "cuda"])
@pytest.mark.parametrize("name", ["none", "auto", "adapld"])
def test_other_runtimes_answer_many_requests_as_each_alone(name: str, runtime: str, roomy: LanguageModel) -> None:
    """Prompts of one chunk and of more, some of which begin alike; near ties do not happen to these."""
    prompts = [(*HEADERS[0], *HEADERS[1], *HEADERS[0][:90], 5), (7, 8), (*HEADERS[0], 9), (*HEADERS[0], 10), (2,) * 70]
    engine = Engine(roomy, Method(name, budget=6), runtime=runtime)
    arriving = Arriving(engine, [Asked(prompt, 20) for prompt in prompts])
    watched, chunk = watch(engine), engine._target.chunk
    arriving.run(4)
    for number, prompt in enumerate(prompts):
        alone = Engine(roomy, runtime=runtime)
        assert list(arriving.text(number)) == text(list(alone.steps(prompt, 20)))
    assert len(prompts[0]) > chunk
    check_trace(arriving, watched, chunk, 4)
