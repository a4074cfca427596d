"""Ingestion: text that exists already, as the model would see it, once."""

from __future__ import annotations

from pathlib import Path

import pytest

from specds.datastore.corpus import read_documents
from specds.datastore.creation import create_store
from specds.datastore.ingestion import ingest
from specds.datastore.store import open_store
from specds.errors import ForeignTokenizer, PromptError, StoreLocked
from specds.reading.examples import Example
from specds.reading.prompts import BadRow
from specds.tokenizer import Tokenizer, wrap_tokenizer

from ..conftest import STOP, NewStore, make_tokenizer
from ..tools import corpus_of


def pair(question: str, answer: str, source: str = "s") -> Example:
    return Example(source, ({"role": "user", "content": question},), answer)


def text(content: str, source: str = "s") -> Example:
    return Example(source, (), content)


def test_pairs_look_as_the_model_would_see_them(new_store: NewStore, tokenizer: Tokenizer) -> None:
    store = new_store()
    report = ingest(store, tokenizer, [pair("w1 w2", "w3 w4"), text("w5 w6")])
    first, second = read_documents(open_store(store.path))
    assert first.prompt.tolist() == tokenizer.chat([{"role": "user", "content": "w1 w2"}])
    assert first.response.tolist() == [*tokenizer.encode("w3 w4"), STOP]
    assert (second.prompt.tolist(), second.response.tolist()) == ([], tokenizer.encode("w5 w6"))
    assert report.documents == 2
    assert report.tokens == open_store(store.path).manifest.tokens
    assert open_store(store.path).manifest.corpus[0].origin == "ingested"


def test_the_same_again_adds_nothing_and_more_adds_the_rest(new_store: NewStore, tokenizer: Tokenizer) -> None:
    store = new_store()
    some = [pair("w1", "w2"), pair("w3", "w4")]
    ingest(store, tokenizer, some)
    again = ingest(store, tokenizer, some)
    assert (again.documents, again.present) == (0, 2)
    more = ingest(store, tokenizer, [*some, pair("w5", "w6")])
    assert (more.documents, more.present) == (1, 2)
    assert len(corpus_of(store.path)) == 3


def test_equal_examples_stay_as_many_as_they_are(new_store: NewStore, tokenizer: Tokenizer) -> None:
    """How often a text occurs is what drafts are counted from."""
    store = new_store()
    assert ingest(store, tokenizer, [text("w1 w2")] * 3).documents == 3
    assert ingest(store, tokenizer, [text("w1 w2")] * 4).documents == 1
    assert len(corpus_of(store.path)) == 4


def test_sources_are_kept_apart(new_store: NewStore, tokenizer: Tokenizer) -> None:
    store = new_store()
    ingest(store, tokenizer, [text("w1", "a"), text("w1", "b"), text("w2", "a")])
    (shard,) = open_store(store.path).manifest.corpus
    assert {name: (count.documents, count.tokens) for name, count in shard.sources.items()} == {
        "a": (2, 2),
        "b": (1, 1),
    }


def test_prompt_and_response_are_not_confused(new_store: NewStore, tokenizer: Tokenizer) -> None:
    """The same tokens split elsewhere are another document."""
    store = new_store()
    ingest(store, tokenizer, [pair("w1", "w2 w3"), pair("w1 assistant w2", "w3")])
    assert len(corpus_of(store.path)) == 2


def test_long_texts_are_cut_prompts_at_the_front(new_store: NewStore, tokenizer: Tokenizer) -> None:
    store = new_store()
    long = " ".join(f"w{number}" for number in range(50))
    report = ingest(store, tokenizer, [pair(long, long), text("w1")], max_tokens=10)
    assert report.truncated == 1
    first = next(iter(read_documents(open_store(store.path))))
    assert first.prompt.tolist() == tokenizer.chat([{"role": "user", "content": long}])[-10:]
    assert first.response.tolist() == tokenizer.encode(long)[:10]


def test_bad_rows_are_reported_in_their_place(new_store: NewStore, tokenizer: Tokenizer) -> None:
    store = new_store()
    bad = BadRow("row 2", PromptError("not JSON"))
    report = ingest(store, tokenizer, [text("w1"), bad, text(""), text("w2")])
    assert report.documents == 2
    assert [failed.id for failed in report.failed] == ["row 2", "2"]


def test_strict_stops_at_a_bad_row_and_keeps_what_was_before(new_store: NewStore, tokenizer: Tokenizer) -> None:
    store = new_store()
    rows = [text("w1"), BadRow("x", PromptError("not JSON")), text("w2")]
    with pytest.raises(PromptError):
        ingest(store, tokenizer, rows, strict=True)
    assert list(corpus_of(store.path).values()) == [([], tokenizer.encode("w1"))]


def test_another_tokenizer_or_another_writer_is_refused(
    tmp_path: Path, new_store: NewStore, tokenizer: Tokenizer
) -> None:
    other = create_store(tmp_path / "other.ds", wrap_tokenizer(make_tokenizer(64), "other"))
    with pytest.raises(ForeignTokenizer):
        ingest(other, tokenizer, [text("w1")])
    store = new_store()
    with store.writer(), pytest.raises(StoreLocked):
        ingest(store, tokenizer, [text("w1")])


def test_more_documents_than_a_part_holds(new_store: NewStore, tokenizer: Tokenizer) -> None:
    store = new_store()
    report = ingest(store, tokenizer, [text(f"w{number % 100} w{number // 100}") for number in range(4_100)])
    assert report.documents == 4_100
    assert [shard.documents for shard in open_store(store.path).manifest.corpus] == [4_096, 4]
    assert len(corpus_of(store.path)) == 4_100
