"""Small files that stand for large ones, and claims of size: refused by their bytes before memory is taken."""

from __future__ import annotations

import itertools
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from specds.datastore import segments
from specds.datastore.build_suffix import build_suffix
from specds.datastore.corpus import check_claims, document_ids, read_documents, token_stream
from specds.datastore.manifest import NAME
from specds.datastore.store import Store, open_store
from specds.errors import CorruptStore, InputError, UsageError
from specds.reading.prompts import BadRow, Prompt, read_prompts

from ..conftest import NewStore
from ..tools import Run, edit_manifest, manifest_of, reseal

MIB = 1 << 20
POOLS: list[Any] = []  # what lies in one may outlive its test


@pytest.fixture(autouse=True)
def one_mebibyte(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small limits, so that what is too large need not be large."""
    monkeypatch.setenv("SPECDS_MAX_ROW", "1MiB")


@contextmanager
def at_most(limit: int) -> Iterator[None]:
    """Assert that Python, NumPy and Arrow together take no more bytes than this."""
    pool = pa.proxy_memory_pool(pa.system_memory_pool())
    POOLS.append(pool)
    usual = pa.default_memory_pool()
    pa.set_memory_pool(pool)
    tracemalloc.start()
    try:
        yield
        taken = tracemalloc.get_traced_memory()[1] + pool.max_memory()
    finally:
        tracemalloc.stop()
        pa.set_memory_pool(usual)
    assert taken < limit, f"{taken:,} bytes"


def repeated(store: Store, tokens: int, **options: Any) -> Path:
    """The store's only corpus file becomes one document of so many equal tokens, and the manifest says so, too."""
    path = store.path / store.manifest.corpus[0].file
    lists = pa.list_(pa.int32())
    schema = pa.schema(
        [("doc_id", pa.string()), ("source", pa.string()), ("prompt_tokens", lists), ("response_tokens", lists)]
    )
    flat = pa.repeat(pa.scalar(5, pa.int32()), tokens)
    response = pa.ListArray.from_arrays(pa.array([0, tokens], pa.int32()), flat)
    columns = [pa.array(["a"]), pa.array(["test"]), pa.array([[]], lists), response]
    pq.write_table(pa.Table.from_arrays(columns, schema=schema), path, data_page_size=1 << 30, **options)
    edit_manifest(store.path, lambda m: m["corpus"][0].update(documents=1, prompt_tokens=0, response_tokens=tokens))
    reseal(store.path)
    return path


def varint(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])


@pytest.mark.parametrize("honest", [True, False])
def test_a_corpus_that_unfolds_is_refused_before_it_does(honest: bool, new_store: NewStore, run_cli: Run) -> None:
    """A kilobyte of Parquet that is one document of nine million tokens, also where its metadata says ten."""
    store = new_store([([5], [6, 7])])
    path = repeated(store, 9_000_000)
    assert path.stat().st_size < 2_000
    if not honest:
        data = path.read_bytes()
        footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
        long, short = varint(2 * 9_000_000), bytes([20 | 128, 128, 128, 0])
        assert data.count(long, footer) >= 1
        path.write_bytes(data[:footer] + data[footer:].replace(long, short))
        assert pq.ParquetFile(path).metadata.row_group(0).column(3).num_values == 10
        edit_manifest(store.path, lambda m: m["corpus"][0].update(response_tokens=10))
        reseal(store.path)
    said = "SPECDS_MAX_ROW" if honest else "not what the file's metadata says"
    for argv in (["export", store.path], ["build-suffix", store.path, "--memory", "1G"]):
        with at_most(32 * MIB):
            run_cli(*argv).refused(path.name, *([said] if argv[0] == "export" or not honest else []))


def test_a_document_longer_than_a_row_may_be_is_refused(new_store: NewStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store = new_store([([5], [6, 7])])
    repeated(store, 2 * MIB)
    with pytest.raises(CorruptStore, match="2,097,152 tokens") as refusal:
        list(read_documents(open_store(store.path)))
    assert "SPECDS_MAX_ROW" in refusal.value.hint
    monkeypatch.setenv("SPECDS_MAX_ROW", "2MiB")
    (document,) = read_documents(open_store(store.path))
    assert len(document.response) == 2 * MIB
    monkeypatch.setenv("SPECDS_MAX_ROW", "much")
    with pytest.raises(UsageError, match="SPECDS_MAX_ROW is 'much'"):
        list(read_documents(open_store(store.path)))


def test_long_names_that_repeat_are_read_a_few_at_a_time(new_store: NewStore) -> None:
    """A source of a quarter of a megabyte, 300 times, is a quarter of a megabyte on disk."""
    store = new_store([([5], [6, 7])] * 300)
    path = store.path / store.manifest.corpus[0].file
    table = pq.read_table(path)
    names = pa.array(["n" * (MIB // 4)] * 300)
    pq.write_table(table.set_column(1, "source", names).set_column(0, "doc_id", names), path)
    reseal(store.path)
    with at_most(100 * MIB):
        assert len(next(read_documents(open_store(store.path))).source) == MIB // 4
        assert len(document_ids(open_store(store.path))) == 1


@pytest.mark.parametrize("claim", [{"response_tokens": 3 * 10**9}, {"documents": 1 << 60}, {"prompt_tokens": 0}])
def test_a_manifest_that_claims_is_compared_with_the_corpus(
    claim: dict[str, int], new_store: NewStore, run_cli: Run
) -> None:
    store = new_store([([5] * 40, [6, 7])])
    edit_manifest(store.path, lambda m: m["corpus"][0].update(claim))
    with at_most(32 * MIB):
        run_cli("build-suffix", store.path, "--memory", "1G").refused("the manifest says", "part-00001.parquet")
    lying = open_store(store.path)
    with pytest.raises(CorruptStore):
        check_claims(lying, lying.manifest.corpus[0])
    with at_most(MIB), pytest.raises(CorruptStore, match="the manifest says"):
        token_stream(lying)


def test_memory_is_kept_to_or_refused(new_store: NewStore, monkeypatch: pytest.MonkeyPatch, run_cli: Run) -> None:
    """What Python takes anyway is granted; here that is made small, so that the corpus need not be large."""
    monkeypatch.setattr(segments, "_RESERVE", 1_000)
    store = new_store([([5] * 400, [6] * 600)])
    run_cli("build-suffix", store.path, "--memory", "8kB").refused("about 10,010 bytes", "--memory", code=2)
    assert open_store(store.path).manifest.suffix == []
    assert len(build_suffix(store, memory=12_000)) == 1


@pytest.mark.parametrize("piece", [b"{},", b'{"a":[]},'])
def test_a_manifest_of_many_small_values_is_refused(piece: bytes, new_store: NewStore, run_cli: Run) -> None:
    path = new_store().path
    for size in (15 * MIB, 63 * MIB):
        (path / NAME).write_bytes(b"[" + piece * (size // len(piece)) + b"0]")
        with at_most(70 * MIB):
            run_cli("inspect", path).refused("more than", "SPECDS_MAX_MANIFEST")


def test_a_store_never_gets_a_manifest_that_it_could_not_read(
    new_store: NewStore, monkeypatch: pytest.MonkeyPatch, run_cli: Run
) -> None:
    store = new_store([([5], [6, 7])])
    before = (store.path / NAME).read_bytes()
    monkeypatch.setenv("SPECDS_MAX_MANIFEST", str(len(before)))
    run_cli("build-suffix", store.path).refused("manifest", "SPECDS_MAX_MANIFEST")
    assert (store.path / NAME).read_bytes() == before
    assert manifest_of(store.path).suffix == []


def write_prompts(path: Path, column: str, values: Any, **options: Any) -> str:
    pq.write_table(pa.table({column: values}), path, data_page_size=1 << 30, **options)
    return str(path)


def test_a_line_over_the_limit_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "' + "x" * 2 * MIB + '"}\n{"prompt": "b"}\n')
    long, short = read_prompts([str(path)])
    assert isinstance(long, BadRow)
    assert isinstance(short, Prompt)
    assert "SPECDS_MAX_ROW" in long.error.hint
    monkeypatch.setenv("SPECDS_MAX_ROW", "3MB")
    assert all(isinstance(row, Prompt) for row in read_prompts([str(path)]))


@pytest.mark.parametrize("encoding", ["dictionary", "delta", "plain"])
def test_parquet_rows_unfold_one_by_one(encoding: str, tmp_path: Path) -> None:
    """Texts that share their bytes are held a few at a time."""
    options: dict[str, Any] = {"dictionary": {}, "plain": {"use_dictionary": False}}.get(
        encoding, {"use_dictionary": False, "column_encoding": {"prompt": "DELTA_BYTE_ARRAY"}}
    )
    count, size = (40, 900_000) if encoding == "plain" else (600, 900_000)
    value = pa.array(["x" * size])
    values = pa.chunked_array([value.take(pa.array([0] * 10))] * (count // 10))
    path = write_prompts(tmp_path / "p.parquet", "prompt", values, row_group_size=count, **options)
    with at_most(100 * MIB):
        for row in itertools.islice(read_prompts([path]), 50):
            assert isinstance(row, Prompt)
            assert len(row.turns[0][0]["content"]) == size


def test_parquet_rows_of_many_shared_texts_are_refused_one_by_one(tmp_path: Path) -> None:
    texts = [["y" * 5_000] * 1_000, ["z"], ["y" * 5_000] * 3]
    path = write_prompts(tmp_path / "p.parquet", "turns", pa.array(texts))
    assert Path(path).stat().st_size < 10_000
    long, *short = read_prompts([path])
    assert isinstance(long, BadRow)
    assert "longer than 1,048,576 bytes" in long.error.message
    assert "SPECDS_MAX_ROW" in long.error.hint
    assert [len(row.turns) for row in short if isinstance(row, Prompt)] == [1, 3]


def test_parquet_with_too_many_values_is_refused(tmp_path: Path) -> None:
    flat = pa.repeat(pa.scalar("w"), 9_000_000)
    path = write_prompts(
        tmp_path / "p.parquet", "turns", pa.ListArray.from_arrays(pa.array([0, 9_000_000], pa.int32()), flat)
    )
    with at_most(32 * MIB), pytest.raises(InputError, match="9,000,000 values") as refusal:
        list(read_prompts([path]))
    assert "SPECDS_MAX_ROW" in refusal.value.hint
