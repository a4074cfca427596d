"""Parquet files that say of themselves what is not so: each is refused by name, and none ends the process."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from specds.calibration import trace
from specds.calibration.bench import results
from specds.datastore import corrections
from specds.datastore.corpus import document_ids
from specds.datastore.store import open_store
from specds.errors import CorruptStore, CorruptTable, InputError, OutputError
from specds.parquet import TooLarge, damage
from specds.parquet_bounds import BoundedFile, unfolded_bytes
from specds.reading.prompts import Prompt, read_prompts
from specds.reading.rows import count_rows

from ..datastore.test_corrections import table_of
from ..tools import reseal
from .test_sizes import MIB, NewStore, at_most

WORDS = ["aaaa", "bbbb", "cccc"]
PROMPTS = pa.table({"prompt": WORDS})
TURNS = pa.table({"turns": [WORDS, ["cccc"] * 40]})


def parquet(table: pa.Table, **options: Any) -> bytes:
    """A file that is not packed, so that its pages can be changed."""
    sink = io.BytesIO()
    pq.write_table(table, sink, **{"compression": "none", "store_schema": False, **options})
    return sink.getvalue()


def replaced(data: bytes, old: str, new: str, *, last: bool = False) -> bytes:
    """Data in which some bytes, as hexadecimal digits, are others; of equal length, so that all offsets stay."""
    before, after = bytes.fromhex(old), bytes.fromhex(new)
    assert len(before) == len(after)
    assert before in data
    here = data.rindex(before) if last else data.index(before)
    return data[:here] + after + data[here + len(before) :]


NAME = b"prompt".hex()
BROKEN = {
    # A schema element is type, repetition, name. Arrow's own view of these columns ends the process.
    "numbers with the size of texts": replaced(parquet(PROMPTS), f"150c250218 06 {NAME}", f"1508250218 06 {NAME}"),
    "histograms of no nulls": replaced(parquet(PROMPTS), f"150c250218 06 {NAME}", f"150c250018 06 {NAME}"),
    "a name of its own": replaced(parquet(PROMPTS), NAME, b"qrompt".hex(), last=True),
    # The texts of a list are numbers of a dictionary; two bits of each, in one group of eight and one run.
    "a number without a text": replaced(parquet(TURNS), "0203a4aa4602", "0203a4aa4603"),
    "wide numbers without a text": replaced(parquet(TURNS), "0203a4aa4602", "2056ffffffff"),
    # A page's header is kind, bytes, bytes, and of a dictionary (15 04) how many values.
    "a dictionary of thousands": replaced(parquet(PROMPTS), "4c15061500120000", "4c15fe7f15000000"),
    "a footer that ends early": parquet(PROMPTS)[:-8] + b"\xff\0\0\0PAR1",
    "an encrypted footer": parquet(PROMPTS)[:-4] + b"PARE",
    "no footer": b"PAR1" + b"\0" * 4 + b"PAR1",
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_file_that_does_not_hold_together_is_refused_by_name(what: str, tmp_path: Path) -> None:
    path = tmp_path / "p.parquet"
    path.write_bytes(BROKEN[what])
    with pytest.raises(InputError, match=r"p\.parquet is (damaged after row 0|not a Parquet file): \S"):
        list(read_prompts([str(path)]))
    assert count_rows([str(path)]) in (2, 3, None)


@pytest.mark.parametrize("options", [{}, {"data_page_version": "2.0"}, {"use_dictionary": False}])
@pytest.mark.parametrize("table", [PROMPTS, TURNS], ids=["flat", "nested"])
def test_every_byte_of_a_footer_may_be_another(table: pa.Table, options: dict[str, Any]) -> None:
    data = parquet(table, **options)
    first = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    for place in range(first, len(data)):
        for value in (data[place] ^ 1, data[place] ^ 4, 0xFF):
            stream = io.BytesIO(data[:place] + bytes([value]) + data[place + 1 :])
            try:
                with BoundedFile(stream) as file:
                    file.held(file.schema.names, 100)
            except damage() as error:
                assert str(error), (place, value)


def test_a_footer_of_many_columns_is_refused_before_arrow_sees_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three bytes in a footer Arrow makes a kilobyte."""
    path = tmp_path / "p.parquet"
    # version, no schema, no rows; one row group of many empty columns; its end, and the footer's
    chunks = bytes.fromhex("260000") * 200_000
    count = bytes([0xFC, 0xC0, 0x9A, 0x0C])
    footer = bytes.fromhex("1502 190c 1600 191c 19") + count + chunks + bytes.fromhex("2600 00 00")
    path.write_bytes(b"PAR1" + footer + len(footer).to_bytes(4, "little") + b"PAR1")
    monkeypatch.setenv("SPECDS_MAX_ROW", "1MiB")
    with at_most(8 * MIB), pytest.raises(InputError, match="more columns") as refusal:
        list(read_prompts([str(path)]))
    assert "SPECDS_MAX_ROW" in refusal.value.hint


def test_texts_of_maps_and_structs_are_counted_as_often_as_they_stand_there() -> None:
    kind = pa.map_(pa.string(), pa.struct([("x", pa.list_(pa.string()))]))
    rows = [[("k", {"x": ["y" * 1_000] * 30})], [], [("k", {"x": []}), ("l", None)]]
    table = pa.table({"a": pa.array(rows, kind)})
    with BoundedFile(io.BytesIO(parquet(table))) as file:
        (batch,) = file.batches(["a"], 100)
        assert batch.to_pylist() == table.to_pylist()
        first, *others = (unfolded_bytes(batch.slice(row, 1).to_struct_array()) for row in range(3))
        assert first > 30_000 > 1_000 > max(others)
    many = pa.table({"a": pa.array([rows[0] * 200], kind)})
    with BoundedFile(io.BytesIO(parquet(many))) as file, pytest.raises(TooLarge, match="a row takes"):
        list(file.records(["a"], 100))


@pytest.mark.parametrize("values", [None, [7], [["a"]]])
def test_a_corpus_without_ids_is_refused_where_only_these_are_read(values: Any, new_store: NewStore) -> None:
    store = new_store([([5], [6, 7])])
    path = store.path / store.manifest.corpus[0].file
    table = pq.read_table(path).drop_columns(["doc_id"])
    pq.write_table(table if values is None else table.add_column(0, "doc_id", pa.array(values)), path)
    reseal(store.path)
    with pytest.raises(CorruptStore, match="doc_id"):
        document_ids(open_store(store.path))


def test_row_groups_without_rows_are_passed_over(tmp_path: Path) -> None:
    """Their columns have no page."""
    path = tmp_path / "p.parquet"
    with pq.ParquetWriter(path, TURNS.schema) as writer:
        for rows in (0, 2, 0, 1, 0):
            writer.write_table(TURNS.slice(0, rows))
    found = list(read_prompts([str(path)]))
    assert [len(one.turns) for one in found if isinstance(one, Prompt)] == [3, 40, 3]
    assert count_rows([str(path)]) == 3


def unfolding(path: Path, schema: pa.Schema, rows: int) -> Path:
    """A small file of many equal rows."""
    fill: dict[Any, Any] = {pa.string(): "x", pa.bool_(): True}
    some = min(rows, 1 << 17)
    columns = [
        pa.ListArray.from_arrays(pa.array([0] * (some + 1), pa.int32()), pa.array([], field.type.value_type))
        if pa.types.is_list(field.type)
        else pa.repeat(pa.scalar(fill.get(field.type, 1), field.type), some)
        for field in schema
    ]
    table = pa.Table.from_arrays(columns, schema=schema)
    with pq.ParquetWriter(path, schema) as writer:
        for _ in range(rows // some):
            writer.write_table(table)
    return path


def test_traces_tables_and_results_that_unfold_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDS_MAX_ROW", "32KiB")
    path = unfolding(tmp_path / "t.parquet", trace.trace_schema(), 1 << 18)
    assert path.stat().st_size < MIB // 8
    before = path.read_bytes()
    with at_most(32 * MIB):
        with pytest.raises(InputError, match=r"t\.parquet is not a trace: .*100 times.*SPECDS_MAX_ROW"):
            trace.read_passes(str(path))
        with (
            pytest.raises(OutputError, match=r"100 times.*SPECDS_MAX_ROW"),
            trace.TraceWriter(path, resumable=True) as writer,
        ):
            writer.carry_over(["x"])
    assert path.read_bytes() == before

    table = pa.schema([("draft_token", pa.int32()), ("target_token", pa.int32()), ("count", pa.int64())])
    with pytest.raises(CorruptTable):
        corrections.read_table(unfolding(tmp_path / "c.parquet", table, 1 << 14))
    corrections.write_table(tmp_path / "good.parquet", table_of({(1, 2): 3}))
    about = pq.read_schema(tmp_path / "good.parquet").metadata
    large = unfolding(tmp_path / "c.parquet", table.with_metadata(about), 1 << 20)
    with at_most(8 * MIB), pytest.raises(CorruptTable, match=r"100 times.*SPECDS_MAX_ROW"):
        corrections.read_table(large)

    unfolding(tmp_path / results.RESULTS, results.results_schema(), 1 << 17)
    unfolding(tmp_path / results.STEPS, results.steps_schema(), 1 << 18)
    with at_most(32 * MIB):
        with pytest.raises(InputError, match=r"results\.parquet .*100 times.*SPECDS_MAX_ROW"):
            results.read_rows(tmp_path)
        with pytest.raises(InputError, match=r"steps\.parquet .*100 times.*SPECDS_MAX_ROW"):
            list(results.read_steps(tmp_path, ["method", "step", "position", "verify_seconds", "commit_seconds"]))
