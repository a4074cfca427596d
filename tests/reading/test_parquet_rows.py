"""Parquet files as rows."""

import io
import tracemalloc

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from specds.errors import InputError
from specds.reading.prompts import BadRow, Prompt, read_prompts

from .conftest import user


def test_parquet(tmp_path):
    table = {
        "id": [5, 6, 7],
        "messages": [[user("m")], None, None],
        "turns": [None, ["a", "b"], None],
        "prompt": [None, None, "p"],
        "reference": [["r"], None, None],
        "embedding": [[0.5], [0.5], [0.5]],
    }
    path = tmp_path / "p.parquet"
    pq.write_table(pa.table(table), path)
    assert list(read_prompts([str(path)])) == [
        Prompt("5", ((user("m"),),), reference="r"),
        Prompt("6", ((user("a"),), (user("b"),))),
        Prompt("7", ((user("p"),),)),
    ]


def test_parquet_rows_that_cannot_be_used_leave_the_others(tmp_path):
    # Arrow checks no UTF-8 as it builds from buffers, nor as it reads them back.
    texts = pa.Array.from_buffers(
        pa.string(), 3, [None, pa.array([0, 1, 2, 3], pa.int32()).buffers()[1], pa.py_buffer(b"a\xffb")]
    )
    path = tmp_path / "p.parquet"
    pq.write_table(pa.table({"prompt": pa.chunked_array([texts, pa.array([None, " "], pa.string())])}), path)
    found = list(read_prompts([str(path)]))
    assert [isinstance(row, BadRow) for row in found] == [False, True, False, True, True]
    assert found[1].error.message.endswith("p.parquet:row 2 is not UTF-8")
    assert "'prompt' (null)" in found[3].error.message


def test_parquet_reads_only_the_columns_it_needs(tmp_path):
    broken = pa.Array.from_buffers(
        pa.string(), 1, [None, pa.array([0, 1], pa.int32()).buffers()[1], pa.py_buffer(b"\xff")]
    )
    path = tmp_path / "p.parquet"
    pq.write_table(pa.table({"prompt": ["p"], "notes": broken}), path)
    assert list(read_prompts([str(path)])) == [Prompt("0", ((user("p"),),))]


def test_parquet_reads_by_batches(tmp_path):
    path = tmp_path / "p.parquet"
    with pq.ParquetWriter(path, pa.schema({"prompt": pa.string()})) as writer:
        for group in range(20):
            writer.write_table(pa.table({"prompt": [f"{group} {row} " + "x" * 10_000 for row in range(100)]}))
    tracemalloc.start()
    count = sum(1 for _ in read_prompts([str(path)]))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert count == 2000
    assert peak < 10e6  # of 20 MB


@pytest.mark.parametrize("content", [b"", b"PAR1", b"PAR1" * 100, b'{"prompt": "a"}'])
def test_file_that_is_no_parquet(write, content):
    with pytest.raises(InputError, match=r"p\.parquet is not a Parquet file"):
        list(read_prompts([write("p.parquet", content)]))


def test_damaged_parquet_is_refused_on_one_line(tmp_path):
    path = tmp_path / "p.parquet"
    pq.write_table(pa.table({"prompt": [str(row) * 20 for row in range(2000)]}), path)
    whole = path.read_bytes()
    refused = []
    for cut in range(0, len(whole), len(whole) // 100):
        for damaged in (whole[:cut], whole[:cut] + b"\xff" * 40 + whole[cut + 40 :]):
            path.write_bytes(damaged)
            try:
                list(read_prompts([str(path)]))
            except InputError as error:
                refused.append(error.message)
    assert len(refused) > 100
    assert not any("\n" in message for message in refused)


def test_parquet_without_the_column(tmp_path):
    path = tmp_path / "p.parquet"
    pq.write_table(pa.table({"question": ["q"], "id": [1]}), path)
    with pytest.raises(InputError, match="but has 'question', 'id'") as caught:
        list(read_prompts([str(path)]))
    assert "--prompt-field" in caught.value.hint
    (prompt,) = read_prompts([str(path)], prompt_field="question")
    assert prompt == Prompt("1", ((user("q"),),))


def test_parquet_on_stdin_is_refused(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"PAR1")))
    with pytest.raises(InputError, match="unpacked file only"):
        list(read_prompts(["-"], format="parquet"))
