"""Files of records: how each kind is read, and what is said of those that cannot be."""

import gzip
import io
import json
import os
import threading

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from specds.errors import InputError, UsageError
from specds.reading.fields import Wanted
from specds.reading.prompts import read_prompts
from specds.reading.rows import count_rows, dataset_rows

from .conftest import packed_zstd, user


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


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("p.jsonl", b'{"prompt": "a"}\n\nbroken\n'),
        ("p.txt.gz", gzip.compress(b"a\n\nb", mtime=0)),
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


def test_message_stays_on_one_printable_line(only):
    bad = only({"a\nb\ud800": 1, "k" * 500: 2, **{f"field{n}": n for n in range(500)}})
    bad.error.message.encode()
    assert bad.error.message.isprintable()
    assert len(bad.error.message) < 500


def test_unknown_format(write):
    with pytest.raises(UsageError, match="'docx'"):
        read_prompts([write("p.csv", "a")], format="docx")


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
