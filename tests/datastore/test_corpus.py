"""The corpus: documents in, the same documents out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specds.datastore.corpus import Document, add_documents, document_ids, read_documents, token_dtype, token_stream
from specds.datastore.store import Store, open_store
from specds.errors import CorruptStore

from ..conftest import VOCABULARY, NewStore, fill
from ..tools import corpus_of, edit_manifest, random_documents, reseal

tokens = st.lists(st.integers(0, VOCABULARY - 1), max_size=8)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25, deadline=None)
@given(st.lists(st.tuples(tokens, tokens), min_size=1, max_size=8))
def test_documents_come_back_as_they_were(new_store: NewStore, documents: list[tuple[list[int], list[int]]]) -> None:
    store = new_store(documents)
    assert list(corpus_of(store.path).values()) == documents
    assert store.manifest.documents == len(documents)
    assert store.manifest.tokens == sum(len(p) + len(r) for p, r in documents)

    stream = token_stream(store)
    assert len(stream.starts) == len(documents) + 1
    for start, end, (prompt, response) in zip(stream.starts, stream.starts[1:], documents, strict=False):
        assert stream.tokens[start : end - 1].tolist() == prompt + response
        assert stream.tokens[end - 1] == stream.separator
    assert stream.starts[-1] == len(stream.tokens)


def test_parts_keep_their_order_sources_and_counts(new_store: NewStore) -> None:
    store = fill(new_store(random_documents(3)), random_documents(2, seed=1), source="second")
    assert [document.source for document in read_documents(store)] == ["test"] * 3 + ["second"] * 2
    assert document_ids(store) == {"test-0", "test-1", "test-2", "second-0", "second-1"}
    assert {name: count.documents for shard in store.manifest.corpus for name, count in shard.sources.items()} == {
        "test": 3,
        "second": 2,
    }
    second = [store.manifest.corpus[1].file]
    assert [document.doc_id for document in read_documents(store, second)] == ["second-0", "second-1"]


def test_more_rows_than_a_row_group_holds(new_store: NewStore) -> None:
    documents = [([], [2 + number % 100]) for number in range(2_500)]
    assert list(corpus_of(new_store(documents).path).values()) == documents


@pytest.mark.parametrize(("vocabulary", "dtype"), [(128, np.uint16), (65_535, np.uint16), (65_536, np.uint32)])
def test_every_token_and_the_separator_fit_the_dtype(vocabulary: int, dtype: type) -> None:
    assert token_dtype(vocabulary) is dtype
    assert vocabulary - 1 < np.iinfo(dtype).max


def test_the_file_says_what_wrote_it(new_store: NewStore) -> None:
    store = new_store([([5], [6])])
    metadata = pq.read_schema(store.path / store.manifest.corpus[0].file).metadata
    assert store.manifest.tokenizer.fingerprint.encode() in metadata[b"specds"]


def rewrite(store: Store, table: pa.Table) -> Store:
    """Put another table in the place of the corpus file, with checksums that fit."""
    pq.write_table(table, store.path / store.manifest.corpus[0].file)
    reseal(store.path)
    return open_store(store.path)


GOOD = {"doc_id": ["a"], "source": ["s"], "prompt_tokens": [[5]], "response_tokens": [[6]]}
TYPES = {
    "doc_id": pa.string(),
    "source": pa.string(),
    "prompt_tokens": pa.list_(pa.int32()),
    "response_tokens": pa.list_(pa.int32()),
}


def table(types: dict[str, pa.DataType] | None = None, **changes: object) -> pa.Table:
    schema = pa.schema({**TYPES, **(types or {})})
    return pa.table({**GOOD, **changes}, schema)


@pytest.mark.parametrize(
    "bad",
    [
        table(response_tokens=[[VOCABULARY]]),
        table(response_tokens=[[-1]]),
        table(response_tokens=[None]),
        table(response_tokens=[[None]]),
        table(doc_id=[None]),
        table({"response_tokens": pa.list_(pa.int64())}),
        table({"response_tokens": pa.string()}, response_tokens=["six"]),
        table({"prompt_tokens": pa.int32()}, prompt_tokens=[5]),
        table({"doc_id": pa.int64()}, doc_id=[7]),
        table().drop_columns("source"),
        table(response_tokens=[[6, 7]]),
        table(response_tokens=[[]]),
        table().slice(0, 0),
        pa.concat_tables([table(), table(doc_id=["b"])]),
    ],
    ids=lambda one: str(one.schema.names) if isinstance(one, pa.Table) else None,
)
def test_a_forged_corpus_is_refused(new_store: NewStore, bad: pa.Table) -> None:
    """With checksums that fit: what is wrong is what the file holds."""
    store = rewrite(new_store([([5], [6])]), bad)
    with pytest.raises(CorruptStore) as refused:
        token_stream(store)
    assert str(store.path) in refused.value.message


def test_columns_in_another_order_are_the_same_columns(new_store: NewStore) -> None:
    turned = table().select(["response_tokens", "source", "prompt_tokens", "doc_id"])
    store = rewrite(new_store([([5], [6])]), turned)
    assert corpus_of(store.path) == {"a": ([5], [6])}


def test_a_damaged_page_is_noticed_when_it_is_read(new_store: NewStore) -> None:
    """In a large file opening does not see a flipped bit in the middle; reading does."""
    rng = np.random.default_rng(0)
    store = new_store([([], rng.integers(2, VOCABULARY, 400_000).tolist())])
    file = store.path / store.manifest.corpus[0].file
    data = bytearray(file.read_bytes())
    assert len(data) > 200_000
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    store = open_store(store.path)
    with pytest.raises(CorruptStore):
        token_stream(store)


def test_a_manifest_that_speaks_of_more_tokens_than_memory_holds(new_store: NewStore) -> None:
    store = new_store([([5], [6])])
    edit_manifest(store.path, lambda body: body["corpus"][0].update(prompt_tokens=1 << 61))
    with pytest.raises(CorruptStore):
        token_stream(open_store(store.path))


def test_a_refused_document_changes_nothing(new_store: NewStore, tmp_path: Path) -> None:
    store = new_store([([5], [6])])
    before = corpus_of(store.path)
    empty = np.array([], np.int32)
    with pytest.raises(UnicodeError), store.writer() as writer:
        add_documents(writer, [Document("half \ud800", "s", empty, empty)], origin="ingested")
    assert corpus_of(store.path) == before
