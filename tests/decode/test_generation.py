"""Generation: the model's own text, whole, once, whatever interrupts it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from specds.datastore.build_suffix import build_suffix
from specds.datastore.corpus import read_documents
from specds.datastore.creation import create_store
from specds.datastore.store import open_store
from specds.decode.engine import Engine
from specds.decode.generation import GenerationOptions, generate
from specds.decode.method import Method
from specds.errors import ForeignTokenizer, PromptError, StoreLocked, UsageError
from specds.model import LanguageModel
from specds.reading.prompts import BadRow, Prompt
from specds.sampling import Sampling
from specds.tokenizer import wrap_tokenizer

from ..conftest import NewStore, make_model, make_tokenizer
from ..tools import corpus_of, strays


def prompt(name: str, *turns: str, raw: bool = False) -> Prompt:
    return Prompt(name, tuple(({"role": "user", "content": turn},) for turn in turns), raw)


def words(count: int, seed: int) -> str:
    return " ".join(f"w{number}" for number in np.random.default_rng(seed).integers(0, 120, count))


PROMPTS = [prompt(str(number), words(3 + 5 * (number % 4), number)) for number in range(11)]


def by_hand(model: LanguageModel, tokens: list[int], most: int) -> list[int]:
    """Greedy decoding with nothing but forward passes."""
    out: list[int] = []
    with torch.inference_mode():
        while len(out) < most:
            out.append(int(model.network(torch.tensor([tokens + out])).logits[0, -1].argmax()))
            if out[-1] in model.stop_tokens:
                break
    return out


@pytest.mark.parametrize(("parallel", "drafter"), [(1, "none"), (4, "pld"), (64, "auto")])
def test_greedy_responses_are_the_models_own(
    parallel: int, drafter: str, new_store: NewStore, tiny: LanguageModel
) -> None:
    store = new_store()
    options = GenerationOptions(max_new_tokens=12, parallel=parallel, save_every=3)
    report = generate(store, Engine(tiny, Method(drafter)), PROMPTS, options)
    documents = list(read_documents(open_store(store.path)))
    assert len(documents) == report.documents == len(PROMPTS)
    for asked, document in zip(PROMPTS, documents, strict=True):
        tokens = tiny.tokenizer.chat(list(asked.turns[0]))
        assert document.prompt.tolist() == tokens
        assert document.response.tolist() == by_hand(tiny, tokens, 12)
        reference = tiny.network.generate(
            torch.tensor([tokens]), attention_mask=torch.ones(1, len(tokens)), max_new_tokens=12, do_sample=False
        )
        assert document.response.tolist() == reference[0, len(tokens) :].tolist()
    assert report.tokens == sum(len(document.response) for document in documents)


def test_a_stop_token_ends_a_response_and_is_kept(new_store: NewStore) -> None:
    """Where others go on beside it, too."""
    model = make_model(seed=2)
    store = new_store()
    generate(store, Engine(model), PROMPTS, GenerationOptions(max_new_tokens=60, parallel=16))
    responses = [document.response.tolist() for document in read_documents(open_store(store.path))]
    ended = [response for response in responses if 1 in response]
    assert ended, "the seed gives no stop token: choose another"
    assert len(ended) < len(responses)
    assert all(response.index(1) == len(response) - 1 for response in ended)
    assert all(len(response) == 60 for response in responses if 1 not in response)


def test_the_checkpoints_own_generation_settings_do_not_bend_the_text(new_store: NewStore) -> None:
    """Qwen ships a repetition penalty, others suppress tokens; `specds decode` knows of neither."""
    model = make_model()
    settings = model.network.generation_config
    settings.repetition_penalty = 1.8
    settings.no_repeat_ngram_size = 2
    settings.suppress_tokens = [7, 9]
    settings.do_sample, settings.temperature, settings.top_k = True, 3.0, 5
    settings.min_new_tokens = 30
    store = new_store()
    generate(store, Engine(model), PROMPTS, GenerationOptions(max_new_tokens=40))
    for document in read_documents(open_store(store.path)):
        assert document.response.tolist() == by_hand(model, document.prompt.tolist(), 40)


@pytest.mark.parametrize("sampling", [Sampling(0.9, seed=5), Sampling(1.3, top_k=7, seed=1), Sampling(0.7, top_p=0.8)])
def test_sampled_responses_are_what_decode_writes(sampling: Sampling, new_store: NewStore, tiny: LanguageModel) -> None:
    """Noise is keyed by seed, prompt and position, so two ways of generating draw the same text."""
    store = new_store()
    options = GenerationOptions(max_new_tokens=15, parallel=4)
    generate(store, Engine(tiny, Method("auto"), sampling=sampling), PROMPTS, options)
    engine = Engine(tiny, Method("pld"), sampling=sampling)
    for asked, document in zip(PROMPTS, read_documents(open_store(store.path)), strict=True):
        assert document.response.tolist() == list(engine.answer(asked, 15).turns[0].tokens)


def test_samples_of_a_prompt_differ_and_each_can_be_drawn_again(new_store: NewStore, tiny: LanguageModel) -> None:
    sampling = Sampling(1.0, seed=3)
    store = new_store()
    engine = Engine(tiny, sampling=sampling)
    report = generate(store, engine, PROMPTS[:2], GenerationOptions(samples=4, max_new_tokens=10, parallel=3))
    assert report.documents == 8
    documents = list(read_documents(open_store(store.path)))
    for number, document in enumerate(documents):
        steps = engine.steps(document.prompt.tolist(), 10, sample=number % 4)
        assert document.response.tolist() == [token for step in steps for token in step.tokens]
    assert len({tuple(document.response) for document in documents}) == 8


def test_a_prompt_that_stands_twice_is_sampled_twice(new_store: NewStore, tiny: LanguageModel) -> None:
    store = new_store()
    options, engine = GenerationOptions(max_new_tokens=10, parallel=3), Engine(tiny, sampling=Sampling(1.0))
    twice = [PROMPTS[0], PROMPTS[1], PROMPTS[0]]
    assert generate(store, engine, twice, options).documents == 3
    responses = [tuple(response) for _, response in corpus_of(store.path).values()]
    assert len(set(responses)) == 3
    assert generate(store, engine, twice, options).present == 3


def test_other_options_are_other_work_the_same_are_done(new_store: NewStore, tiny: LanguageModel) -> None:
    store = new_store()
    some = GenerationOptions(max_new_tokens=6)
    assert generate(store, Engine(tiny), PROMPTS, some).documents == 11
    before = corpus_of(store.path)
    again = generate(store, Engine(tiny), PROMPTS, some)
    assert (again.documents, again.present) == (0, 11)
    assert corpus_of(store.path) == before
    assert generate(store, Engine(tiny), PROMPTS, GenerationOptions(max_new_tokens=7)).documents == 11
    assert generate(store, Engine(tiny, sampling=Sampling(1.0)), PROMPTS, some).documents == 11
    assert generate(store, Engine(tiny), PROMPTS, GenerationOptions(source="b", max_new_tokens=6)).documents == 11
    assert generate(store, Engine(make_model(seed=9)), PROMPTS, some).documents == 11
    assert len(corpus_of(store.path)) == 55


def test_more_prompts_later_add_only_theirs(new_store: NewStore, tiny: LanguageModel) -> None:
    one, two = new_store(), new_store()
    options = GenerationOptions(max_new_tokens=6, parallel=4, save_every=4)
    generate(one, Engine(tiny), PROMPTS[:6], options)
    report = generate(one, Engine(tiny), PROMPTS, options)
    assert (report.documents, report.present) == (5, 6)
    generate(two, Engine(tiny), PROMPTS, options)
    assert corpus_of(one.path) == corpus_of(two.path)


def test_what_was_saved_in_parts_is_put_together_into_one_file(new_store: NewStore, tiny: LanguageModel) -> None:
    store = new_store()
    generate(store, Engine(tiny), PROMPTS, GenerationOptions(max_new_tokens=4, save_every=2))
    assert len(open_store(store.path).manifest.corpus) == 1
    assert strays(store.path) == []
    shard = open_store(store.path).manifest.corpus[0]
    assert (shard.origin, shard.model and shard.model.fingerprint) == ("generated", tiny.fingerprint)
    assert shard.sampling["max_new_tokens"] == 4


def test_turns_see_the_answers_before_them(new_store: NewStore, tiny: LanguageModel) -> None:
    asked = [prompt("a", "w1 w2", "w3", "w4 w5"), prompt("b", "w6"), prompt("c", "w7", "w8")]
    store = new_store()
    report = generate(store, Engine(tiny), asked, GenerationOptions(max_new_tokens=5, parallel=3))
    assert report.documents == 6
    documents = {
        (tuple(document.prompt.tolist()), tuple(document.response.tolist()))
        for document in read_documents(open_store(store.path))
    }
    engine = Engine(tiny)
    expected = set()
    for one in asked:
        history = []
        for turn, answer in zip(one.turns, engine.answer(one, 5).turns, strict=True):
            history += turn
            expected.add((tuple(tiny.tokenizer.chat(history)), answer.tokens))
            history.append({"role": "assistant", "content": answer.text})
    assert documents == expected


def test_raw_text_is_continued_without_the_template(new_store: NewStore, tiny: LanguageModel) -> None:
    store = new_store()
    generate(store, Engine(tiny), [prompt("r", "w1 w2 w3", raw=True)], GenerationOptions(max_new_tokens=5))
    (document,) = read_documents(open_store(store.path))
    assert document.prompt.tolist() == tiny.tokenizer.encode("w1 w2 w3")


def test_long_prompts_keep_their_end(new_store: NewStore, tiny: LanguageModel) -> None:
    long = prompt("long", words(50, 1))
    store = new_store()
    report = generate(store, Engine(tiny), [long], GenerationOptions(max_new_tokens=5, max_prompt_tokens=20))
    (document,) = read_documents(open_store(store.path))
    assert report.truncated == 1
    assert document.prompt.tolist() == tiny.tokenizer.chat(list(long.turns[0]))[-20:]


def test_a_prompt_that_fills_the_context_still_gets_an_answer(new_store: NewStore, tiny: LanguageModel) -> None:
    store = new_store()
    generate(store, Engine(tiny), [prompt("long", words(400, 1))], GenerationOptions(max_new_tokens=50))
    (document,) = read_documents(open_store(store.path))
    assert len(document.prompt) == tiny.context_length - 1
    assert len(document.response) == 1


def test_a_long_prompt_does_not_cut_its_neighbours_answers(new_store: NewStore, tiny: LanguageModel) -> None:
    model = make_model(stop=False)
    long, short = prompt("long", words(240, 0)), prompt("short", words(5, 1))
    store = new_store()
    generate(store, Engine(model), [long, short], GenerationOptions(max_new_tokens=40, parallel=2))
    asked, other = read_documents(open_store(store.path))
    assert len(asked.prompt) + len(asked.response) == model.context_length
    assert other.response.tolist() == by_hand(model, other.prompt.tolist(), 40)


def test_strict_stops_at_a_prompt_that_the_template_refuses(new_store: NewStore, tiny: LanguageModel) -> None:
    bad = Prompt("bad", (({"role": "user", "content": ""},),), raw=True)
    with pytest.raises(PromptError, match="no tokens"):
        generate(new_store(), Engine(tiny), [PROMPTS[0], bad], GenerationOptions(max_new_tokens=3), strict=True)


def test_files_of_two_commands_are_not_put_together(
    new_store: NewStore, tiny: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = new_store()
    options = GenerationOptions(max_new_tokens=5, save_every=2)
    for number, count in (("one", 6), ("two", 11)):
        monkeypatch.setattr("sys.argv", ["specds", "generate", number])
        generate(store, Engine(tiny), PROMPTS[:count], options)
    shards = open_store(store.path).manifest.corpus
    assert [(shard.documents, shard.provenance.command[-3:]) for shard in shards] == [(6, "one"), (5, "two")]


def test_bad_rows_are_reported_and_the_others_done(new_store: NewStore, tiny: LanguageModel) -> None:
    bad = BadRow("bad", PromptError("row 1 is not JSON"))
    rows = [PROMPTS[0], bad, PROMPTS[1], prompt("empty", "", raw=True)]
    store = new_store()
    report = generate(store, Engine(tiny), rows, GenerationOptions(max_new_tokens=4))
    assert report.documents == 2
    assert [failed.id for failed in report.failed] == ["bad", "empty"]


def test_wrong_options_are_refused(new_store: NewStore, tiny: LanguageModel) -> None:
    for name in ("samples", "max_new_tokens", "max_prompt_tokens", "parallel", "save_every"):
        with pytest.raises(UsageError, match=name.replace("_", "-")):
            GenerationOptions(**{name: 0})
    with pytest.raises(UsageError, match="samples-per-prompt"):
        generate(new_store(), Engine(tiny), PROMPTS, GenerationOptions(samples=2))
    with pytest.raises(UsageError, match="own text"):
        generate(new_store(), Engine(tiny, Method("pld", verifier="csd", budget=4)), PROMPTS, GenerationOptions())


def test_a_store_of_another_tokenizer_or_with_another_writer_is_refused(
    tmp_path: Path, new_store: NewStore, tiny: LanguageModel
) -> None:
    other = create_store(tmp_path / "other.ds", wrap_tokenizer(make_tokenizer(64), "other"))
    with pytest.raises(ForeignTokenizer):
        generate(other, Engine(tiny), PROMPTS, GenerationOptions())
    store = new_store()
    with store.writer(), pytest.raises(StoreLocked):
        generate(store, Engine(tiny), PROMPTS, GenerationOptions())


def test_progress_counts_to_the_end(new_store: NewStore, tiny: LanguageModel) -> None:
    seen: list[tuple[int, int, int]] = []
    report = generate(
        new_store(),
        Engine(tiny),
        PROMPTS,
        GenerationOptions(max_new_tokens=4, parallel=3, save_every=3),
        lambda done, total, tokens: seen.append((done, total, tokens)),
    )
    assert seen[-1] == (11, 11, report.tokens)
    assert [done for done, _, _ in seen] == sorted(done for done, _, _ in seen)


def test_an_interrupted_run_leaves_the_first_documents_and_the_next_the_same_corpus(
    new_store: NewStore, tiny: LanguageModel
) -> None:
    """Whichever responses end first: what is saved are always those of the first prompts."""
    lengths = [40, 3, 3, 40, 3, 3]
    asked = [prompt(str(number), words(length, number)) for number, length in enumerate(lengths)]
    options = GenerationOptions(max_new_tokens=30, parallel=4, save_every=2)
    whole, store = new_store(), new_store()
    generate(whole, Engine(tiny, Method("pld", budget=4)), asked, options)

    def until(moment: float) -> Callable[[float, int, int], None]:
        def interrupt(done: float, total: int, tokens: int) -> None:
            if done >= moment:
                raise KeyboardInterrupt

        return interrupt

    held = 0
    for moment in (1.5, 3.5, 5.5):
        with contextlib.suppress(KeyboardInterrupt):
            generate(store, Engine(tiny, Method("pld", budget=4)), asked, options, until(moment))
        kept = list(corpus_of(store.path))
        assert kept == list(corpus_of(whole.path))[: len(kept)]
        assert held <= len(kept)
        held = len(kept)
    assert 0 < held < len(asked)
    generate(store, Engine(tiny, Method("auto")), asked, options)
    assert list(corpus_of(store.path).items()) == list(corpus_of(whole.path).items())


def test_what_a_store_holds_and_what_was_just_written_drafts_for_what_is_written(
    new_store: NewStore, tiny: LanguageModel
) -> None:
    sampling = Sampling(1.2, seed=2)
    store, again = new_store(), new_store()
    options = GenerationOptions(max_new_tokens=20, parallel=2)
    plain = generate(store, Engine(tiny, sampling=sampling), PROMPTS, options)
    build_suffix(open_store(store.path))
    drafted = generate(again, Engine(tiny, Method("rest", stores=(store.path,), budget=8), sampling), PROMPTS, options)
    assert corpus_of(again.path) == corpus_of(store.path)
    assert plain.counters.mat == 1
    assert drafted.counters.mat > 2
