"""The dense index: exact where it is small, near exact where it is large, and always at the right positions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from specds.datastore import ann
from specds.datastore.build_dense import DenseOptions, build_dense
from specds.datastore.corpus import token_stream
from specds.datastore.creation import create_store
from specds.datastore.normalizer import Normalizer
from specds.datastore.store import open_store
from specds.errors import CorruptStore, ForeignTokenizer, UsageError
from specds.model import LanguageModel
from specds.tokenizer import wrap_tokenizer

from ..conftest import NewStore, fill, make_model, make_tokenizer
from ..tools import random_documents, snapshot, strays


def unit(count: int, dims: int = 16, seed: int = 0, clusters: int = 200) -> NDArray[np.float32]:
    """Unit vectors in clusters, as hidden states of text are."""
    rng = np.random.default_rng(seed)
    centres = np.random.default_rng(99).normal(size=(clusters, dims))
    keys = centres[rng.integers(clusters, size=count)] + 0.4 * rng.normal(size=(count, dims))
    return np.asarray(keys / np.linalg.norm(keys, axis=1, keepdims=True), np.float32)


def states_of(model: LanguageModel, tokens: list[int]) -> NDArray[np.float32]:
    """float32[n, d]: the final-normed states of one document, without a batch and without padding."""
    with torch.inference_mode():
        output = model.network(torch.tensor([tokens]), output_hidden_states=True)
    return output.hidden_states[-1][0].float().numpy()


@pytest.mark.parametrize("kind", ann.KINDS)
@pytest.mark.parametrize("count", [1, 2, 9, 11, 300])
def test_a_small_index_is_exact(kind: str, count: int, tmp_path: Path) -> None:
    keys = unit(count)
    searcher = ann.load(tmp_path, ann.build(kind, keys, tmp_path), 16)
    for query in unit(20, seed=1):
        similarity, rows = searcher.search(query, min(10, count))
        exact = np.sort(keys @ query)[::-1][: min(10, count)]
        np.testing.assert_allclose(similarity, exact, atol=1e-5)
        np.testing.assert_allclose(keys[rows] @ query, exact, atol=1e-5)


@pytest.mark.parametrize("kind", ann.KINDS)
def test_a_large_index_finds_nearly_all(kind: str, tmp_path: Path) -> None:
    keys = unit(21_000)
    parameters = ann.build(kind, keys, tmp_path, search=50)
    assert parameters["leaves"] == pytest.approx(5 * len(keys) ** 0.5, abs=1)
    searcher = ann.load(tmp_path, parameters, 16)
    hits = 0
    for query in unit(100, seed=1):
        similarity, rows = searcher.search(query, 10)
        assert len(rows) == len(set(rows.tolist())) == 10
        assert (np.diff(similarity) <= 1e-6).all()
        np.testing.assert_allclose(similarity, keys[rows] @ query, atol=1e-4)
        hits += len(set(rows.tolist()) & set(np.argsort(-(keys @ query))[:10].tolist()))
    assert hits / 1_000 > 0.9


@pytest.mark.parametrize("kind", ann.KINDS)
def test_more_neighbours_than_keys(kind: str, tmp_path: Path) -> None:
    keys = unit(5)
    searcher = ann.load(tmp_path, ann.build(kind, keys, tmp_path), 16)
    similarity, rows = searcher.search(keys[0], 100)
    assert sorted(rows.tolist()) == [0, 1, 2, 3, 4]
    assert np.isfinite(similarity).all()


def test_building_is_silent(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The libraries' own chatter does not belong between our lines."""
    for kind in ann.KINDS:
        (tmp_path / kind).mkdir()
        ann.load(tmp_path / kind, ann.build(kind, unit(20_500), tmp_path / kind), 16)
    assert capfd.readouterr() == ("", "")


def test_an_unknown_kind_is_refused(tmp_path: Path, new_store: NewStore, tiny: LanguageModel) -> None:
    with pytest.raises(UsageError, match="annoy"):
        ann.build("annoy", unit(10), tmp_path)
    with pytest.raises(CorruptStore, match="annoy"):
        ann.load(tmp_path, {"ann": "annoy"}, 16)
    with pytest.raises(UsageError, match="annoy"):
        build_dense(new_store(random_documents(3)), tiny, DenseOptions("annoy", dims=2))


@pytest.mark.parametrize("kind", ann.KINDS)
def test_every_key_is_the_state_before_its_continuation(kind: str, new_store: NewStore, tiny: LanguageModel) -> None:
    """By brute force over the corpus: for the state at token i the index names the text from i + 1 on."""
    documents = random_documents(25, longest=15)
    store = new_store(documents)
    (segment,) = build_dense(store, tiny, DenseOptions(kind, dims=16))
    index = open_store(store.path).dense_index(tiny.fingerprint)
    texts = [prompt + response for prompt, response in documents]
    assert segment.parameters["keys"] == sum(len(text) - 1 for text in texts)
    for text in texts:
        for at, state in enumerate(states_of(tiny, text)[:-1]):
            similarity, positions = index.search(state, 3)
            assert similarity[0] == pytest.approx(1.0, abs=1e-3)
            follows = index.continuations(positions, 4)
            near = [
                found.tolist() for found, sim in zip(follows, similarity, strict=True) if sim > similarity[0] - 1e-4
            ]
            assert text[at + 1 : at + 5] in near


def test_neighbours_are_the_nearest_by_brute_force(new_store: NewStore, tiny: LanguageModel) -> None:
    documents = random_documents(30)
    store = new_store(documents)
    build_dense(store, tiny, DenseOptions("scann", dims=12))
    index = open_store(store.path).dense_index(tiny.fingerprint)
    texts = [prompt + response for prompt, response in documents]
    states = np.concatenate([states_of(tiny, text)[:-1] for text in texts])
    keys = Normalizer.fit(states, 12).keys(states)
    stream = token_stream(open_store(store.path))
    where = np.concatenate(
        [np.arange(start + 1, end - 1) for start, end in zip(stream.starts, stream.starts[1:], strict=False)]
    )
    query = states_of(tiny, [9, 8, 7, 6])[-1]
    exact = keys @ Normalizer.fit(states, 12).keys(query[None])[0]
    best = np.argsort(-exact)[:10]
    similarity, positions = index.search(query, 10)
    np.testing.assert_allclose(similarity, exact[best], atol=1e-3)
    assert len(set(positions.tolist()) & set(where[best].tolist())) >= 9  # one near-tie may fall either way


def test_continuations_stop_where_the_document_ends(new_store: NewStore, tiny: LanguageModel) -> None:
    store = new_store([([5, 6], [7, 8, 9]), ([], [10, 11]), ([12], [13, 14])])
    build_dense(store, tiny, DenseOptions(dims=4))
    index = open_store(store.path).dense_index(tiny.fingerprint)
    starts = index.parts[0].positions.astype(np.int64)
    follows = {tuple(one.tolist()) for one in index.continuations(starts, 3)}
    assert follows == {(6, 7, 8), (7, 8, 9), (8, 9), (9,), (11,), (13, 14), (14,)}
    # Whatever a damaged file may say, nothing outside the text is read.
    outside = np.array([-5, 10**6, np.iinfo(np.int64).max - 3, np.iinfo(np.int64).min])
    assert [one.tolist() for one in index.continuations(outside, 3)] == [[]] * 4
    assert index.continuations(np.array([], np.int64), 3) == []


@pytest.mark.parametrize("kind", ann.KINDS)
def test_the_reported_recall_is_the_recall(kind: str, new_store: NewStore, tiny: LanguageModel) -> None:
    """More keys than are searched exactly, and few cells searched: recall is below 1 and said to be."""
    documents = random_documents(190, longest=120, seed=3)
    store = new_store(documents)
    (segment,) = build_dense(store, tiny, DenseOptions(kind, dims=16, search=8, leaves=400))
    assert segment.parameters["keys"] > 20_000
    assert segment.parameters["leaves"] == 400
    index = open_store(store.path).dense_index(tiny.fingerprint)
    states = np.concatenate([states_of(tiny, prompt + response)[:-1] for prompt, response in documents])
    keys = index.parts[0].normalizer.keys(states)
    hits = mrr = 0.0
    probes = np.random.default_rng(7).choice(len(keys), 400, replace=False)
    for probe in probes:
        _, rows = index.parts[0].searcher.search(keys[probe], 100)
        exact = np.partition(keys @ keys[probe], -10)[-10]
        hits += int((keys[rows[:10]] @ keys[probe] >= exact - 1e-5).sum())
        found = np.flatnonzero(rows == probe)
        mrr += 1 / (1 + found[0]) if len(found) else 0
    assert segment.quality["recall_at_10"] == pytest.approx(hits / 4_000, abs=0.03)
    assert segment.quality["self_retrieval_mrr"] == pytest.approx(mrr / 400, abs=0.03)
    assert 0.3 < segment.quality["recall_at_10"] < 1


def test_a_bounded_sample_gives_an_index_as_good(new_store: NewStore, tiny: LanguageModel) -> None:
    """Documents outside the sample become keys without waiting in a file; they land at the same rows."""
    documents = random_documents(120, longest=20)
    whole, part = new_store(documents), new_store(documents)
    (all_of_it,) = build_dense(whole, tiny, DenseOptions("faiss", dims=16))
    (sampled,) = build_dense(part, tiny, DenseOptions("faiss", dims=16, sample=400))
    assert 400 <= sampled.parameters["sampled"] < all_of_it.parameters["sampled"] == all_of_it.parameters["keys"]
    assert sampled.parameters["keys"] == all_of_it.parameters["keys"]
    one = open_store(whole.path).dense_index(tiny.fingerprint)
    two = open_store(part.path).dense_index(tiny.fingerprint)
    np.testing.assert_array_equal(one.parts[0].positions, two.parts[0].positions)
    assert sampled.quality["recall_at_10"] == pytest.approx(all_of_it.quality["recall_at_10"], abs=0.02)
    for prompt, response in documents[::10]:
        text = prompt + response
        if len(text) < 2:
            continue
        state = states_of(tiny, text)[-2]
        similarity, positions = two.search(state, 1)
        assert similarity[0] == pytest.approx(1, abs=1e-3)
        assert two.continuations(positions, 1)[0].tolist() == text[-1:]


def test_batches_do_not_change_the_keys(new_store: NewStore, tiny: LanguageModel) -> None:
    documents = random_documents(20)
    indexes = []
    for batch_tokens in (1, 50, 10_000):
        store = new_store(documents)
        build_dense(store, tiny, DenseOptions("faiss", dims=8, batch_tokens=batch_tokens))
        indexes.append(open_store(store.path).dense_index(tiny.fingerprint))
    state = states_of(tiny, [5, 6, 7])[-1]
    answers = [index.search(state, 20) for index in indexes]
    for similarity, positions in answers[1:]:
        np.testing.assert_allclose(similarity, answers[0][0], atol=1e-3)
        assert len(set(positions.tolist()) & set(answers[0][1].tolist())) >= 18


def test_documents_longer_than_the_model_holds_are_embedded_as_far_as_it_does(
    new_store: NewStore, tiny: LanguageModel
) -> None:
    long = [2 + number % 120 for number in range(tiny.context_length + 50)]
    store = new_store([([], long), ([5], [6, 7])])
    (segment,) = build_dense(store, tiny, DenseOptions(dims=4))
    assert segment.parameters["keys"] == tiny.context_length + 2
    (segment,) = build_dense(store, tiny, DenseOptions(dims=4, max_length=10), replace=True)
    assert segment.parameters["keys"] == 10 + 2
    assert segment.parameters["max_length"] == 10


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (DenseOptions(dims=33), "--dims"),
        (DenseOptions(dims=0), "--dims"),
        (DenseOptions(dims=16, sample=8), "--sample"),
    ],
)
def test_options_that_cannot_be_are_refused_and_nothing_is_left(
    options: DenseOptions, said: str, new_store: NewStore, tiny: LanguageModel
) -> None:
    store = new_store(random_documents(20))
    before = snapshot(store.path)
    with pytest.raises(UsageError, match=said):
        build_dense(store, tiny, options)
    assert snapshot(store.path) == before


def test_a_corpus_too_small_for_the_dimensions_is_refused(new_store: NewStore, tiny: LanguageModel) -> None:
    with pytest.raises(UsageError, match="--dims"):
        build_dense(new_store([([], [5])]), tiny)
    with pytest.raises(UsageError, match="--dims"):
        build_dense(new_store([([], [5, 6, 7])]), tiny)


@pytest.mark.parametrize("count", [2, 3])
def test_as_few_keys_as_dimensions(count: int, new_store: NewStore, tiny: LanguageModel) -> None:
    store = new_store([([], list(range(5, 6 + count)))])
    build_dense(store, tiny, DenseOptions(dims=count))
    similarity, positions = open_store(store.path).dense_index(tiny.fingerprint).search(np.ones(32, np.float32), 10)
    assert len(positions) == count
    assert np.isfinite(similarity).all()


def test_a_larger_vocabulary_takes_wider_tokens(tmp_path: Path) -> None:
    """Ids above 65,535 come back as they are."""
    model = make_model(vocab_size=70_000)
    store = fill(create_store(tmp_path / "wide.ds", model.tokenizer), [([69_999, 65_535], [65_536, 5, 69_998])])
    build_dense(store, model, DenseOptions("faiss", dims=2))
    index = open_store(store.path).dense_index(model.fingerprint)
    first = index.parts[0].positions[:1].astype(np.int64)
    assert index.continuations(first, 5)[0].tolist() == [
        65_535,
        65_536,
        5,
        69_998,
    ]


def test_an_index_is_replaced_where_that_is_asked_for(new_store: NewStore, tiny: LanguageModel) -> None:
    store = new_store(random_documents(20))
    build_dense(store, tiny, DenseOptions("scann", dims=4))
    assert build_dense(store, tiny) == []
    with pytest.raises(UsageError, match="--dims is 8"):
        build_dense(store, tiny, DenseOptions("faiss", dims=8))
    build_dense(store, tiny, DenseOptions("faiss", dims=8), replace=True)
    opened = open_store(store.path)
    assert [segment.parameters["ann"] for segment in opened.manifest.dense] == ["faiss"]
    assert strays(store.path) == []


def test_a_store_of_another_tokenizer_is_not_embedded(tmp_path: Path, tiny: LanguageModel) -> None:
    other = wrap_tokenizer(make_tokenizer(64), "other")
    store = fill(create_store(tmp_path / "other.ds", other), [([5], [6, 7, 8])])
    with pytest.raises(ForeignTokenizer):
        build_dense(store, tiny, DenseOptions(dims=2))
