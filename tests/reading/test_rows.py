"""Files of records: how each kind is read, and what is said of those that cannot be."""

import gzip
import io
import json
import os
import threading
import tracemalloc
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specds.errors import InputError, UsageError
from specds.limits import MAX_ROW
from specds.reading.prompts import BadRow, Prompt, read_prompts
from specds.reading.rows import Wanted, count_rows, dataset_rows, rows

from .conftest import user

# Files


@pytest.mark.parametrize("name", ["p.jsonl", "p.ndjson", "p.json", "P.JSONL"])
def test_json_lines_by_name(write, name):
    (prompt,) = read_prompts([write(name, '{"prompt": "p"}\n')])
    assert prompt.turns == ((user("p"),),)


@pytest.mark.parametrize("name", ["p.txt", "prompts", "p.md"])
def test_any_other_file_is_one_prompt_a_line(write, name):
    found = list(read_prompts([write(name, '  a \n\n \t\n{"prompt": "b"}\nc\u2028d\x0be')]))
    assert [prompt.turns for prompt in found] == [
        ((user(text),),) for text in ("  a ", '{"prompt": "b"}', "c\u2028d\x0be")
    ]


def test_format_overrides_the_name(write):
    (prompt,) = read_prompts([write("p.txt", '{"prompt": "p"}')], format="jsonl")
    assert prompt.turns == ((user("p"),),)


@pytest.mark.parametrize("name", ["p.jsonl.gz", "p.txt.gz"])
def test_gz_is_unpacked(write, name):
    content = b'{"prompt": "p"}\n' if "jsonl" in name else b"p\n"
    (prompt,) = read_prompts([write(name, gzip.compress(content))])
    assert prompt.turns == ((user("p"),),)


@pytest.mark.parametrize("content", [b"", b"\n\r\n  \n", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("name", ["p.jsonl", "p.txt"])
def test_file_without_rows_has_no_prompts(write, name, content):
    assert list(read_prompts([write(name, content)])) == []


@pytest.mark.parametrize("name", ["p.jsonl", "p.txt"])
def test_byte_order_mark_carriage_returns_and_missing_last_newline(write, name):
    lines = [b'{"prompt": "a"}', b'{"prompt": "b"}'] if name == "p.jsonl" else [b"a", b"b"]
    found = list(read_prompts([write(name, b"\xef\xbb\xbf" + b"\r\n".join(lines))]))
    assert [prompt.turns for prompt in found] == [((user("a"),),), ((user("b"),),)]


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


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("p.jsonl", b'{"prompt": "a"}\n\nbroken\n'),
        ("p.txt.gz", gzip.compress(b"a\n\nb")),
        ("p.csv", b'id,prompt\n1,"a\nb"\n,\n2,c,d\n'),
        ("p.tsv", b""),
    ],
)
def test_files_have_as_many_rows_as_are_read(write, name, content):
    path = write(name, content)
    assert count_rows([path]) == len(list(read_prompts([path])))


def test_rows_of_what_is_read_once_are_not_counted(write, tmp_path):
    path = write("p.jsonl", "{}\n")
    pq.write_table(pa.table({"prompt": ["a", "b"]}), tmp_path / "p.parquet")
    assert count_rows([path, "p.parquet"]) == 3
    assert count_rows([path, "-"]) is None
    assert count_rows([path, "nowhere.jsonl"]) is None


# Rows that cannot be used


def test_row_number_is_the_line_number_of_the_editor(write):
    (bad,) = read_prompts([write("p.jsonl", "\n\n\nbroken\n")])
    assert bad.error.message.startswith("p.jsonl:row 4 ")


def test_message_stays_on_one_printable_line(only):
    bad = only({"a\nb\ud800": 1, "k" * 500: 2, **{f"field{n}": n for n in range(500)}})
    bad.error.message.encode()
    assert bad.error.message.isprintable()
    assert len(bad.error.message) < 500


@pytest.mark.parametrize("name", ["p.jsonl", "p.jsonl.gz"])
def test_line_over_the_cap_is_skipped_without_being_held(write, name):
    size = 4 * MAX_ROW.default
    content = b'{"prompt": "a"}\n{"prompt": "' + b"x" * size + b'"}\n{"prompt": "b"}'
    path = write(name, gzip.compress(content, 1) if name.endswith("gz") else content)
    del content
    tracemalloc.start()
    before, bad, after = read_prompts([path])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (before.turns, after.turns) == (((user("a"),),), ((user("b"),),))
    assert bad.error.message == "p.jsonl:row 2 is longer than 4,194,304 bytes".replace("p.jsonl", name)
    assert peak < 2.5 * MAX_ROW.default


def test_text_line_that_is_binary_is_a_bad_row(write):
    bad, worse, good = read_prompts([write("p.txt", b"a\0b\n\xff\nc")])
    assert "NUL" in bad.error.message
    assert "not UTF-8" in worse.error.message
    assert good.turns == ((user("c"),),)


@given(st.lists(st.binary(max_size=40)))
def test_no_line_raises(tmp_path_factory, lines):
    path = tmp_path_factory.mktemp("any") / "p.jsonl"
    path.write_bytes(b"{}\n" + b"\n".join(lines))
    for row in read_prompts([str(path)]):
        assert isinstance(row, Prompt | BadRow)


# Files that cannot be read


def test_missing_file_is_refused_before_the_first_prompt(write):
    first = write("a.jsonl", '{"prompt": "a"}')
    with pytest.raises(InputError, match=r"nowhere\.jsonl: no such file") as caught:
        read_prompts([first, "nowhere.jsonl"])
    assert caught.value.hint


def test_directory_is_refused_with_a_glob(tmp_path):
    with pytest.raises(InputError, match="is a directory") as caught:
        read_prompts([str(tmp_path)])
    assert "*.jsonl" in caught.value.hint


@pytest.mark.parametrize("path", ["a\0b", "x" * 5000, ""])
def test_impossible_path(path):
    with pytest.raises(InputError):
        read_prompts([path])


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_file_without_permission(write):
    path = write("p.jsonl", "{}")
    Path(path).chmod(0)
    with pytest.raises(InputError, match="permission denied"):
        read_prompts([path])


def test_unknown_format(write):
    with pytest.raises(UsageError, match="'docx'"):
        read_prompts([write("p.csv", "a")], format="docx")


def test_truncated_gz_gives_its_whole_rows_and_then_says_so(write):
    rows = b"".join(b'{"prompt": "%s"}\n' % os.urandom(50).hex().encode() for _ in range(200))
    packed = gzip.compress(rows)
    prompts = read_prompts([write("p.jsonl.gz", packed[: len(packed) // 2])])
    found = []
    with pytest.raises(InputError, match=r"p\.jsonl\.gz:row \d+ cannot be read") as caught:
        found.extend(prompts)
    assert len(found) > 50
    assert all(isinstance(prompt, Prompt) for prompt in found)
    assert "cut short" in caught.value.hint


def test_gz_that_is_none(write):
    with pytest.raises(InputError, match=r"p\.jsonl\.gz"):
        list(read_prompts([write("p.jsonl.gz", '{"prompt": "a"}')]))


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_utf16_file(write, encoding):
    with pytest.raises(InputError, match="is UTF-16") as caught:
        list(read_prompts([write("p.jsonl", '\ufeff{"prompt": "a"}\n'.encode(encoding))]))
    assert "UTF-8" in caught.value.hint


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


# Standard input


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b'\n {"prompt": "a"}\n{"text": "b"}', ["a", "b"]),
        (b'a\n{"prompt": "b"}\n', ["a", '{"prompt": "b"}']),
        (b"\xef\xbb\xbf" + b'{"prompt": "a"}', ["a"]),
        (b"", []),
    ],
)
def test_stdin_is_told_by_its_first_line(monkeypatch, content, expected):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))
    assert [prompt.turns[0][0]["content"] for prompt in read_prompts(["-"])] == expected


def test_bad_line_on_stdin_is_placed_there(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"{\n")))
    (bad,) = read_prompts(["-"])
    assert bad.error.message.startswith("stdin:row 1 ")


def test_parquet_on_stdin_is_refused(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"PAR1")))
    with pytest.raises(InputError, match="unpacked file only"):
        list(read_prompts(["-"], format="parquet"))


def test_closed_stdin(monkeypatch):
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(InputError, match="stdin is closed"):
        list(read_prompts(["-"]))


@pytest.mark.parametrize("line", [b'{"prompt": "%d"}\n', b"%d\n"])
def test_stdin_gives_a_prompt_before_the_next_is_written(monkeypatch, line):
    read_end, write_end = os.pipe()
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(os.fdopen(read_end, "rb")))
    # A reader that waits for more than a line would wait for ever: the timer ends that.
    timer = threading.Timer(5, os.close, [write_end])
    timer.start()
    prompts = read_prompts(["-"])
    for number in range(3):
        os.write(write_end, line % number)
        prompt = next(prompts)
        assert timer.is_alive()
        assert prompt.turns == ((user(str(number)),),)
    timer.cancel()
    os.close(write_end)
    assert list(prompts) == []


# CSV, TSV and packed files


def packed_zstd(content):
    return pa.compress(content, codec="zstd", asbytes=True)


@pytest.mark.parametrize(
    ("name", "separator", "pack"),
    [
        ("p.csv", ",", bytes),
        ("P.TSV", "\t", bytes),
        ("p.csv.gz", ",", gzip.compress),
        ("p.tsv.zst", "\t", packed_zstd),
        ("packed-without-a-word", ",", gzip.compress),
    ],
)
def test_csv_rows_are_read_by_column_name(write, name, separator, pack):
    lines = [
        ["prompt", "id ", "task", "turns", "unused", "unused"],
        ['"a ""b"", c\r\nd"', "x", "code", "", "1", "2"],
        [""] * 6,
        ["", "", "", '"[""a"", ""b""]"', "", ""],
    ]
    content = b"\xef\xbb\xbf" + b"\r\n".join(separator.join(line).encode() for line in lines)
    found = list(
        read_prompts(
            [write(name, pack(content))],
            format=None if "." in name else "csv",
            group_field="task",
        )
    )
    assert found == [
        Prompt("x", ((user('a "b", c\r\nd'),),), group="code"),
        Prompt("1", ((user("a"),), (user("b"),))),
    ]


@pytest.mark.parametrize(
    ("lines", "place", "says"),
    [
        (b"1,a,b", 3, "has 3 fields, and the first row names 2"),
        (b"1", 3, "has 1 fields, and the first row names 2"),
        (b"1,\xe9t\xe9", 3, "is not UTF-8: byte 0xe9"),
        (b"1,a\0b", 3, "holds a NUL byte"),
        (b'1,"a\n\xe9"', 4, "is not UTF-8"),
        (b'1,"a"b', 3, "is not valid CSV"),
        (b"1,a\rb", 3, "is not valid CSV: new-line character seen in unquoted field"),
        (b"1,", 3, "must have"),
        (b"1," + b"x" * MAX_ROW.default, 3, "is longer than 4,194,304 bytes"),
    ],
)
def test_csv_row_that_cannot_be_used_leaves_the_others(write, lines, place, says):
    first, bad, *rest = read_prompts([write("p.csv", b"id,prompt\n0,a\n" + lines + b"\n2,b\n")])
    assert first.turns == ((user("a"),),)
    assert bad.error.message.startswith(f"p.csv:row {place}")
    assert says in bad.error.message
    assert bad.error.message.isprintable()
    assert bad.error.hint
    assert rest[-1].turns == ((user("b"),),)


def test_csv_quote_that_swallows_the_file_is_held_to_the_cap(write):
    wanted = Wanted((("prompt",),))
    path = write("p.csv", 'prompt\na\n"' + "b\n" * 1000)
    found = list(rows(path, wanted, max_line=100))
    assert found[1][0] == "p.csv:row 3"
    assert "p.csv:row 3 is longer than 100 bytes" in found[1][1].message


def test_csv_quote_that_is_never_closed_is_named_by_its_row(write):
    _, bad = read_prompts([write("p.csv", 'prompt\na\n"b\nc\n')])
    assert bad.error.message == "p.csv:row 3 is not valid CSV: a quote is never closed"


def test_csv_field_that_is_longer_than_csv_modules_own_limit(write):
    (prompt,) = read_prompts([write("p.csv", "prompt\n" + "x" * 300_000)])
    assert len(prompt.turns[0][0]["content"]) == 300_000


@pytest.mark.parametrize(
    ("name", "content", "says", "hint"),
    [
        ("p.csv", b"Sort a list.,1\nReverse it.,2\n", "must have 'messages' or 'turns' or 'prompt'", "first row"),
        ("p.csv", b"prompt,prompt\na,b\n", "the column 'prompt' twice", "leave one"),
        ("p.csv", b"pr\xffmpt\na\n", "row 1 is not UTF-8", "UTF-8"),
        ("p.csv", "\ufeffprompt\n".encode("utf-16-le"), "is UTF-16", "UTF-8"),
        ("p.csv.zst", b"prompt\na\n", "row 1 cannot be read", "damaged"),
        ("p.jsonl.zst", packed_zstd(os.urandom(5000).hex().encode())[:2000], "cannot be read", "cut short"),
        ("p.parquet.zst", b"", "unpacked file only", "write it"),
        ("p.xlsx", b"PK", "spreadsheets are not read", "CSV"),
        ("p.jsonl.bz2", b"BZh", "packed like this are not read", ".gz or .zst"),
        ("p.pdf", b"%PDF", "documents are not read", "text"),
    ],
)
def test_file_of_rows_that_cannot_be_read(write, name, content, says, hint):
    with pytest.raises(InputError) as caught:
        list(read_prompts([write(name, content)]))
    assert caught.value.message.startswith(name)
    assert says in caught.value.message
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    "path", ["s3://bucket/p.jsonl", "hf://datasets/a/b/p.csv", "https://x.org/p.jsonl.gz?" + "k" * 5000]
)
def test_address_is_refused_before_anything_is_read(path):
    with pytest.raises(InputError, match="nothing is read over " + path.partition("//")[0]) as caught:
        read_prompts([path])
    assert "download" in caught.value.hint


# Data sets


_PAIRS = Wanted((("question", "answer"),), hint="name the fields")


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_data_set_gives_its_rows_with_the_wanted_fields(write, tmp_path, monkeypatch, kind):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "set"
    folder.mkdir()
    rows = [{"question": f"q{n}", "answer": "a", "embedding": [0.5]} for n in range(3)]
    if kind == "jsonl":
        write("set/train.jsonl", "\n".join(map(json.dumps, rows)))
    else:
        pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")
    found = list(dataset_rows(str(folder), _PAIRS))
    assert found == [(f"{folder}:row {n + 1}", {"question": f"q{n}", "answer": "a"}) for n in range(3)]
    with pytest.raises(InputError, match=r"split test: .*Available splits: \['train'\]") as caught:
        list(dataset_rows(str(folder), _PAIRS, split="test"))
    assert caught.value.hint
    with pytest.raises(InputError, match="must have 'text', but has 'question', 'answer', 'embedding'"):
        list(dataset_rows(str(folder), Wanted((("text",),))))


def test_data_set_damaged_half_way_is_an_input_error(write, tmp_path):
    (tmp_path / "set").mkdir()
    write("set/train.jsonl", json.dumps({"question": "q", "answer": "a"}) + "\n{broken")
    with pytest.raises(InputError, match="data set") as caught:
        list(dataset_rows(str(tmp_path / "set"), _PAIRS))
    assert "\n" not in caught.value.message
