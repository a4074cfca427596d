"""What is exported is what the store holds; the lookup cache is read as llama.cpp reads it."""

from __future__ import annotations

import json
import struct
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specds.datastore import export
from specds.datastore.corpus import Document
from specds.datastore.export import export_jsonl, export_lookup_cache, export_parquet, export_records
from specds.datastore.manifest import Manifest
from specds.datastore.store import Store
from specds.errors import ForeignTokenizer, OutputError, UsageError
from specds.tokenizer import Tokenizer, wrap_tokenizer

from ..conftest import fill, make_tokenizer
from ..tools import random_documents, snapshot

Counts = dict[tuple[int, int], dict[int, int]]


def read_lookups(path: Path) -> Counts:
    """A static cache, field by field as `common_ngram_cache_load` of llama.cpp reads it, with all that it asserts."""
    found: Counts = {}
    with path.open("rb") as file:
        while head := file.read(16):
            *context, third, fourth = struct.unpack("<4i", head)
            assert (third, fourth) == (-1, -1), "LLAMA_TOKEN_NULL beyond LLAMA_NGRAM_STATIC"
            (size,) = struct.unpack("<i", file.read(4))
            assert size > 0
            followers = {}
            for _ in range(size):
                token, count = struct.unpack("<2i", file.read(8))
                assert count > 0
                assert token not in followers
                followers[token] = count
            key = (context[0], context[1])
            assert key not in found
            found[key] = followers
    return found


def counted(documents: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Counts:
    """What follows each two tokens of a document."""
    found: dict[tuple[int, int], Counter[int]] = defaultdict(Counter)
    for prompt, response in documents:
        text = [*prompt, *response]
        for place in range(2, len(text)):
            found[text[place - 2], text[place - 1]][text[place]] += 1
    return {key: dict(value) for key, value in found.items()}


@pytest.fixture
def store(new_store: Callable[..., Store]) -> Store:
    return fill(new_store(random_documents(50)), random_documents(30, seed=1), source="other")


def test_records_are_the_documents(store: Store, tmp_path: Path) -> None:
    records = list(export_records(store))
    whole = random_documents(50) + random_documents(30, seed=1)
    assert [(one["prompt_tokens"], one["response_tokens"]) for one in records] == whole
    assert [one["source"] for one in records] == ["test"] * 50 + ["other"] * 30
    assert records[50]["doc_id"] == "other-0"
    done = export_jsonl(tmp_path / "d.jsonl", store)
    assert [json.loads(line) for line in (tmp_path / "d.jsonl").read_text().splitlines()] == records
    export_parquet(tmp_path / "d.parquet", store)
    assert pq.read_table(tmp_path / "d.parquet").to_pylist() == records
    assert (done.documents, done.tokens) == (80, store.manifest.tokens)
    assert list(export_records(store, ["other"])) == records[50:]
    assert export_parquet(tmp_path / "d.parquet", store, ["test"]).documents == 50
    assert pq.read_table(tmp_path / "d.parquet").to_pylist() == records[:50]


def test_text_is_the_tokenizers(store: Store, tokenizer: Tokenizer, tmp_path: Path) -> None:
    for record in export_records(store, (), tokenizer):
        assert record["prompt"] == tokenizer.decode(record["prompt_tokens"])
        assert record["response"] == tokenizer.decode(record["response_tokens"]) != ""
    export_parquet(tmp_path / "d.parquet", store, ["other"], tokenizer)
    assert pq.read_table(tmp_path / "d.parquet").to_pylist() == list(export_records(store, ["other"], tokenizer))
    foreign = wrap_tokenizer(make_tokenizer(50), "foreign")
    with pytest.raises(ForeignTokenizer):
        export_records(store, (), foreign)


def test_an_empty_store_gives_empty_files(new_store: Callable[..., Store], tmp_path: Path) -> None:
    empty = new_store()
    assert list(export_records(empty)) == []
    for write in (export_jsonl, export_lookup_cache):
        assert write(tmp_path / "empty", empty).documents == 0
        assert (tmp_path / "empty").read_bytes() == b""
    export_parquet(tmp_path / "empty", empty)
    assert pq.read_table(tmp_path / "empty").column_names == ["doc_id", "source", "prompt_tokens", "response_tokens"]


def test_more_than_a_row_group(new_store: Callable[..., Store], tmp_path: Path) -> None:
    store = new_store([([], [number % 100]) for number in range(2500)])
    export_parquet(tmp_path / "d.parquet", store)
    assert pq.read_table(tmp_path / "d.parquet").column("response_tokens").to_pylist() == [
        [number % 100] for number in range(2500)
    ]


tokens = st.lists(st.integers(0, 3), max_size=14)


@settings(max_examples=150)
@given(st.lists(st.tuples(tokens, tokens), max_size=8), st.sampled_from([1, 7, 1 << 22]), st.sampled_from([4, 60_000]))
def test_a_lookup_cache_holds_what_follows_each_pair(
    tmp_path_factory: pytest.TempPathFactory,
    documents: list[tuple[list[int], list[int]]],
    at_once: int,
    vocabulary: int,
) -> None:
    """Whatever is counted and written at once; ids as large as the vocabulary allows."""
    scale = (vocabulary - 1) // 3
    documents = [([one * scale for one in prompt], [one * scale for one in response]) for prompt, response in documents]
    path = tmp_path_factory.getbasetemp() / "some.lookup"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export, "_COUNTED_AT_ONCE", at_once)
        count = export._Count((vocabulary - 1).bit_length())
        for prompt, response in documents:
            count.add(Document("", "", np.array(prompt, np.int32), np.array(response, np.int32)))
        with path.open("wb") as file:
            export._write_lookups(file, *count.total(), (vocabulary - 1).bit_length())
    assert read_lookups(path) == counted(documents)


def test_a_lookup_cache_of_a_store(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "s.lookup"
    done = export_lookup_cache(path, store, ["test"])
    expected = counted(random_documents(50))
    assert read_lookups(path) == expected
    assert (done.documents, done.contexts) == (50, len(expected))
    followers = sum(map(len, expected.values()))
    assert path.stat().st_size == 20 * len(expected) + 8 * followers
    first = path.read_bytes()
    export_lookup_cache(path, store, ["test"])
    assert path.read_bytes() == first


def test_counts_stop_where_llama_cpp_would_read_them_as_negative(tmp_path: Path) -> None:
    key = np.array([(1 << 14) | (2 << 7) | 3])
    with (tmp_path / "l").open("wb") as file:
        export._write_lookups(file, key, np.array([2**31]), 7)
    assert read_lookups(tmp_path / "l") == {(1, 2): {3: 2**31 - 1}}


WRITERS = [export_jsonl, export_parquet, export_lookup_cache]


@pytest.mark.parametrize("write", WRITERS)
def test_what_cannot_be_written_leaves_what_was_there(
    write: Callable[..., object], store: Store, tmp_path: Path
) -> None:
    kept = tmp_path / "kept"
    kept.write_text("kept")
    before = snapshot(tmp_path)
    with pytest.raises(UsageError, match="no source 'nowhere'"):
        write(kept, store, ["nowhere"])
    for bad in (tmp_path, tmp_path / "no" / "folder", kept / "below", Path("/dev/null"), store.path / "manifest.json"):
        with pytest.raises(OutputError):
            write(bad, store)
    assert snapshot(tmp_path) == before
    assert Path("/dev/null").is_char_device()


def test_a_vocabulary_too_large_for_a_lookup_cache_is_refused(store: Store, tmp_path: Path) -> None:
    large = Store(store.path, Manifest(store.manifest.tokenizer, 2**21 + 1))
    with pytest.raises(UsageError, match="vocabulary"):
        export_lookup_cache(tmp_path / "l", large)
