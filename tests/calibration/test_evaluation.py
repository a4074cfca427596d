"""What is said about a store is what counting by hand says."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from specds.calibration.answers import Recorded
from specds.calibration.evaluation import evaluate
from specds.calibration.overlap import template
from specds.calibration.replay import replay
from specds.checkpoint import find_tokenizer
from specds.datastore.build_dense import DenseOptions, build_dense
from specds.datastore.build_suffix import build_suffix
from specds.datastore.corpus import read_documents
from specds.datastore.creation import create_store
from specds.datastore.store import Store, open_store
from specds.decode.counters import Counters
from specds.decode.engine import Engine
from specds.decode.method import Method, parse_methods
from specds.errors import CorruptStore, UsageError
from specds.model import LanguageModel, load_model

from ..conftest import fill, make_model
from ..tools import Run, edit_manifest, reseal

LENGTH = 24
LONGEST = 16


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return make_model()


def answers_of(model: LanguageModel, seeds: range) -> list[Recorded]:
    """The model's answers to prompts of a few words that repeat."""
    engine = Engine(model)
    found = []
    for seed in seeds:
        prompt = np.random.default_rng(seed).integers(5, 12, 14).tolist()
        tokens = tuple(token for step in engine.steps(prompt, LENGTH) for token in step.tokens)
        found.append(Recorded(f"p{seed}", 0, tuple(prompt), tokens, tokens[-1] in model.stop_tokens, LENGTH))
    return found


@pytest.fixture(scope="module")
def answers(model: LanguageModel) -> list[Recorded]:
    return answers_of(model, range(8))


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory, model: LanguageModel, answers: list[Recorded]) -> Store:
    """Two answers as they are, some like them, text of other words, and a part that is not indexed."""
    store = create_store(tmp_path_factory.mktemp("stores") / "own.ds", model.tokenizer)
    near = answers_of(model, range(6, 20))
    store = fill(store, [(list(one.prompt), list(one.tokens)) for one in near[:9]], "near")
    store = fill(store, [(list(one.prompt), list(one.tokens)) for one in near[1:7]], "also")
    store = fill(store, [([], list(range(60 + shift, 100 + shift))) for shift in range(3)], "far")
    build_suffix(store)
    build_dense(open_store(store.path), model, DenseOptions(index="faiss", dims=16))
    return fill(open_store(store.path), [([5, 6], [7, 8])], "late")


def documents(store: Store) -> list[tuple[str, list[int]]]:
    """Of the indexed part."""
    rows = [(row.source, [*row.prompt.tolist(), *row.response.tolist()]) for row in read_documents(store)]
    return [(source, text) for source, text in rows if source != "late"]


def continuations(texts: list[list[int]], suffix: list[int]) -> list[tuple[int, int]]:
    """(text, place) of all that follows a string."""
    size = len(suffix)
    return [
        (number, at + size)
        for number, text in enumerate(texts)
        for at in range(len(text) - size)
        if text[at : at + size] == suffix
    ]


def test_hits_are_those_of_a_search_by_hand(model: LanguageModel, filled: Store, answers: list[Recorded]) -> None:
    found = evaluate(filled, answers, model, indexes=["suffix"], budgets=[4])
    texts = [text for _, text in documents(filled)]
    by_hand: dict[int, list[int]] = {}
    for answer in answers:
        text = list(answer.text)
        for at in range(len(answer.prompt) + 1, len(text)):
            length, follows = 0, []
            for size in range(min(LONGEST, at), 0, -1):
                if follows := continuations(texts, text[at - size : at]):
                    length = size
                    break
            row = by_hand.setdefault(length, [0, 0, 0])
            tokens = [texts[number][place] for number, place in follows]
            best = min(set(tokens), key=lambda token: (-tokens.count(token), token)) if tokens else -1
            row[0] += 1
            row[1] += best == text[at]
            row[2] += text[at] in tokens
    assert {one.length: [one.positions, one.first, one.anywhere] for one in found.hits} == by_hand
    assert sum(one.first for one in found.hits) > 20


def test_predictions_are_replays_and_replays_are_runs(
    model: LanguageModel, filled: Store, answers: list[Recorded]
) -> None:
    found = evaluate(filled, answers, model, budgets=[3, 12])
    assert [(index, budget) for index, budget, _ in found.predictions] == [
        ("suffix", 3),
        ("suffix", 12),
        ("dense", 3),
        ("dense", 12),
    ]
    for index, budget, summary in found.predictions:
        engine = Engine(model, Method({"suffix": "rest", "dense": "dresd"}[index], stores=[filled], budget=budget))
        measured = Counters.of(step for one in answers for step in engine.steps(list(one.prompt), LENGTH))
        assert (summary.counters.mat, summary.counters.accepted) == (measured.mat, measured.accepted)


@pytest.mark.parametrize("ngram", [1, 3, 13])
def test_overlap_is_that_of_sets(ngram: int, model: LanguageModel, filled: Store, answers: list[Recorded]) -> None:
    found = evaluate(filled, answers, model, indexes=["suffix"], budgets=[4], ngram=ngram)

    def grams(text: list[int]) -> list[tuple[int, ...]]:
        return [tuple(text[at : at + ngram]) for at in range(len(text) - ngram + 1)]

    rows = list(read_documents(filled))
    held = {gram for row in rows for gram in grams([*row.prompt.tolist(), *row.response.tolist()])}
    for overlap, texts, wholes in (
        (found.prompts, [list(one.prompt) for one in answers], {tuple(row.prompt.tolist()) for row in rows}),
        (found.responses, [list(one.tokens) for one in answers], {tuple(row.response.tolist()) for row in rows}),
    ):
        shared = [sum(gram in held for gram in grams(text)) for text in texts]
        assert overlap.texts == sum(len(text) >= ngram for text in texts)
        assert (overlap.touched, overlap.shared) == (sum(one > 0 for one in shared), sum(shared))
        assert overlap.ngrams == sum(len(grams(text)) for text in texts)
        assert overlap.same == sum(tuple(text) in wholes for text in texts)
    assert found.responses.same >= 2


def test_credit_goes_where_the_tokens_stood(model: LanguageModel, filled: Store, answers: list[Recorded]) -> None:
    found = evaluate(filled, answers, model, indexes=["suffix"], budgets=[4, 10])
    rows = documents(filled)
    texts = [text for _, text in rows]
    gave: dict[str, list[int]] = {source: [0, 0] for source, _ in rows}
    useful: dict[str, set[int]] = {source: set() for source, _ in rows}
    for one in replay(model, parse_methods(f"rest:{filled.path}", 10), answers):
        for step in one.steps:
            text = list(one.answer.text[: step.position])
            places: list[tuple[int, int]] = []
            for size in range(min(LONGEST, len(text)), 1, -1):
                if places := continuations(texts, text[-size:]):
                    break
            for token in step.tokens[: step.accepted]:
                places = [(n, at) for n, at in places if at < len(texts[n]) and texts[n][at] == token]
                sources = {rows[number][0] for number, _ in places}
                for source in sources:
                    gave[source][0] += 1
                    gave[source][1] += len(sources) == 1
                for number, _ in places:
                    useful[rows[number][0]].add(number)
                places = [(number, at + 1) for number, at in places]
    sources = {one.name: one for one in found.sources}
    assert {name: [sources[name].gave, sources[name].alone] for name in gave} == gave
    assert {name: sources[name].useful for name in useful} == {name: len(one) for name, one in useful.items()}
    assert [one.name for one in found.sources if one.dead] == ["far"]
    assert sources["near"].gave > sources["near"].alone > 0
    assert (sources["late"].indexed, sources["late"].dead) == (0, False)
    assert [one.documents for one in found.parts] == [9, 6, 3, 1]
    assert sum(one.tokens for one in found.parts) == sum(one.tokens for one in found.sources) == filled.manifest.tokens


def test_the_oldest_and_newest_part_of_a_source(model: LanguageModel, filled: Store, answers: list[Recorded]) -> None:
    corpus = [
        dataclasses.replace(shard, provenance=dataclasses.replace(shard.provenance, date=f"202{number}-01-01"))
        for number, shard in enumerate(filled.manifest.corpus)
    ]
    store = Store(filled.path, dataclasses.replace(filled.manifest, corpus=corpus))
    found = evaluate(store, answers[:2], model, indexes=["suffix"], budgets=[4])
    assert [(one.name, one.oldest[:4], one.newest[:4]) for one in found.sources] == [
        ("near", "2020", "2020"),
        ("also", "2021", "2021"),
        ("far", "2022", "2022"),
        ("late", "2023", "2023"),
    ]


def test_a_chat_template_is_no_overlap() -> None:
    tokenizer = find_tokenizer("smollm2-135m")
    before, after = template(tokenizer)
    text = tokenizer.chat([{"role": "user", "content": "Sort a list."}])
    assert tuple(text[: len(before)]) == before
    assert tuple(text[len(text) - len(after) :]) == after
    assert tokenizer.decode(text[len(before) : len(text) - len(after)]) == "Sort a list."


def test_what_cannot_be_evaluated(model: LanguageModel, tmp_path: Path, answers: list[Recorded]) -> None:
    store = fill(create_store(tmp_path / "bare.ds", model.tokenizer), [([5], [6, 7])])
    with pytest.raises(UsageError, match="has no suffix or dense index"):
        evaluate(store, answers, model)
    build_suffix(store)
    with pytest.raises(UsageError, match="no budget"):
        evaluate(open_store(store.path), answers, model, budgets=[])
    # The index of one corpus, and another corpus.
    other = fill(create_store(tmp_path / "other.ds", model.tokenizer), [([5], [6, 7, 8])])
    part = "corpus/part-00001.parquet"
    (store.path / part).write_bytes((other.path / part).read_bytes())
    reseal(store.path)
    with pytest.raises(CorruptStore, match="holds other documents"):
        evaluate(open_store(store.path), answers, model)


def test_the_command(run_cli: Run, tmp_path: Path, tiny_directory: Path, stocked: dict[str, Path]) -> None:
    prompts, answers, store = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl", stocked["faiss"]
    rows = [{"id": f"p{number}", "prompt": f"w{number} w{number + 1} w{number}"} for number in range(4)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = ["--model", tiny_directory, "--device", "cpu"]
    run_cli("decode", "-p", prompts, "-d", "none", "--max-new-tokens", 20, *model, "--output", answers)
    given = run_cli("evaluate", store, "-p", prompts, "--answers", answers, "--budgets", "8,2", "--json", *model)
    assert given.code == 0, given.err
    (record,) = given.records
    assert [(row["index"], row["budget"]) for row in record["predictions"]] == [
        ("suffix", 2),
        ("suffix", 8),
        ("dense", 2),
        ("dense", 8),
    ]
    assert sum(row["positions"] for row in record["hits"]) == record["tokens"] - record["answers"]
    written = run_cli("evaluate", store, "-p", prompts, "--max-new-tokens", 20, "--budgets", "8,2", "--json", *model)
    (again,) = written.records
    for row in [*record["predictions"], *again["predictions"]]:
        assert row.pop("draft_ms_a_step") >= 0
    assert again == record
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text(json.dumps({"prompt": "w1 w2", "response": "w3 w4 w5"}) + "\n")
    shown = run_cli("evaluate", store, "--answers", pairs, "--no-dense", *model)
    assert shown.code == 0, shown.err
    assert all(word in shown.out for word in ("longest match", "overlap", "suffix", "corpus file", "dead weight"))
    assert "dense" not in shown.out
    run_cli("evaluate", store, *model).refused("neither", code=2)
    run_cli("evaluate", tmp_path, "--answers", pairs, *model).refused("not a datastore")


def test_no_weights_are_read_for_a_suffix_index(tiny_directory: Path, stocked: dict[str, Path]) -> None:
    model = load_model(str(tiny_directory), device="cpu")
    answer = Recorded("p", 0, (5, 6, 7), (8, 9, 10), False, 3)
    found = evaluate(open_store(stocked["faiss"]), [answer], model, indexes=["suffix"])
    assert (found.answers, found.tokens) == (1, 3)
    assert model._network is None


def test_an_index_of_another_model_is_passed_over(
    run_cli: Run, tmp_path: Path, tiny_directory: Path, stocked: dict[str, Path]
) -> None:
    store = tmp_path / "foreign.ds"
    shutil.copytree(stocked["faiss"], store)
    edit_manifest(store, lambda body: body["dense"][0]["model"].update(fingerprint="other"))
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text(json.dumps({"prompt": "w1 w2", "response": "w3 w4 w5"}) + "\n")
    result = run_cli("evaluate", store, "--answers", pairs, "--model", tiny_directory, "--device", "cpu")
    assert result.code == 0, result.err
    assert "another model's" in result.err
