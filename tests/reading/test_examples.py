import gzip
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from specds.errors import InputError, UsageError
from specds.reading.examples import Example, read_examples
from specds.reading.prompts import BadRow

from .conftest import assistant, user


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Write a file of rows, or of bytes, into the working directory and return its name."""
    monkeypatch.chdir(tmp_path)

    def _write(name, *rows):
        content = b"\n".join(row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows)
        Path(name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
        return name

    return _write


# What each kind of row means


@pytest.mark.parametrize(
    ("row", "prompt", "response"),
    [
        ({"messages": [user("q"), assistant("r")]}, [user("q")], "r"),
        ({"messages": [user("q"), assistant("r"), user("s")]}, [user("q")], "r"),
        (
            {"messages": [user("q"), assistant("r"), user("s"), assistant("t")]},
            [user("q"), assistant("r"), user("s")],
            "t",
        ),
        ({"prompt": "q", "response": "r"}, [user("q")], "r"),
        ({"prompt": "q", "completion": "r"}, [user("q")], "r"),
        ({"instruction": "q", "output": "r"}, [user("q")], "r"),
        ({"instruction": "q", "input": "x", "output": "r"}, [user("q\n\nx")], "r"),
        ({"instruction": "q", "input": "", "output": "r"}, [user("q")], "r"),
        ({"question": "q", "answer": "r"}, [user("q")], "r"),
        ({"text": " r\n"}, [], " r\n"),
        ({"text": "t", "prompt": "q", "response": "r"}, [user("q")], "r"),
        ({"text": "t", "prompt": "q", "response": None}, [], "t"),
    ],
)
def test_rows_are_told_by_their_fields(write, row, prompt, response):
    assert list(read_examples([write("a.jsonl", row)])) == [Example("a", tuple(prompt), response)]


def test_fields_named_win(write):
    row = {"q": "q", "a": "a", "chat": [user("q"), assistant("c")], "body": "b", "messages": "m", "text": "t"}
    path = write("a.jsonl", row)
    assert list(read_examples([path], prompt_field="q", response_field="a")) == [Example("a", (user("q"),), "a")]
    assert list(read_examples([path], messages_field="chat")) == [Example("a", (user("q"),), "c")]
    assert list(read_examples([path], text_field="body")) == [Example("a", (), "b")]
    assert list(read_examples([path], text_field="messages")) == [Example("a", (), "m")]


def test_one_field_named_keeps_the_other_default(write):
    path = write("a.jsonl", {"q": "q", "response": "r"})
    assert list(read_examples([path], prompt_field="q")) == [Example("a", (user("q"),), "r")]


def test_field_named_and_missing_is_a_bad_row(write):
    good, bad = read_examples([write("a.jsonl", {"body": "b"}, {"text": "t", "id": "x"})], text_field="body")
    assert good.response == "b"
    assert bad.id == "x"
    assert bad.error.message == "a.jsonl:row 2 must have 'body', but has 'text', 'id'"


def test_fields_of_two_kinds_are_refused(write):
    with pytest.raises(UsageError, match="more than one kind"):
        read_examples([write("a.jsonl", {})], text_field="a", prompt_field="b")


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"promt": "q", "answers": "r"}, "but has 'promt', 'answers'"),
        ({"prompt": "q"}, "but has 'prompt'"),
        ({"prompt": "q", "response": ""}, "field 'response' must not be empty"),
        ({"prompt": "q", "response": ["r"]}, "field 'response' must be a string, but is an array"),
        ({"prompt": " ", "response": "r"}, "field 'prompt' must not be empty"),
        ({"instruction": "q", "input": 3, "output": "r"}, "field 'input' must be a string, but is a number"),
        ({"text": "\ud800"}, "half of a surrogate pair"),
        ({"messages": [user("q")]}, "has no message of the assistant"),
        ({"messages": [assistant("r")]}, "starts with the answer"),
        ({"messages": [user("q"), assistant(" ")]}, "field 'messages[1].content' must not be empty"),
        ({"messages": [{"from": "human", "value": "q"}]}, "field 'messages[0].role' must be a string"),
        (b"[" * 100_000, "too deeply nested"),
        (b"\xff", "is not UTF-8"),
        (b"[]", "must be an object, but is an array"),
        (b'{"text": "a", "text": "b"}', "stands twice"),
    ],
)
def test_bad_row_says_where_and_what_and_leaves_the_others(write, row, says):
    before, bad, after = read_examples([write("a.jsonl", {"text": "a"}, row, {"text": "b"})])
    assert (before.response, after.response) == ("a", "b")
    assert isinstance(bad, BadRow)
    assert bad.error.message.startswith("a.jsonl:row 2")
    assert says in bad.error.message
    assert bad.error.hint
    assert "\n" not in bad.error.message


# Files


def test_text_file_is_one_document(write):
    path = write("notes.py", b"\xef\xbb\xbfdef f():\r\n    pass\n")
    assert list(read_examples([path])) == [Example("notes", (), "def f():\r\n    pass\n")]


def test_text_files_that_cannot_be_used(write):
    empty = write("empty.py", b" \n")
    found = list(read_examples([empty, write("latin.txt", b"caf\xe9"), write("x.bin", b"a\0"), write("ok.md", b"ok")]))
    assert [row.error.message.split(" ")[0] for row in found if isinstance(row, BadRow)] == ["latin.txt", "x.bin"]
    assert found[-1] == Example("ok", (), "ok")
    assert len(found) == 3


def test_document_over_the_cap_is_a_bad_row(write):
    with Path(write("big.txt", b"")).open("r+b") as file:
        file.truncate(65 * 1024 * 1024)
    (bad,) = read_examples(["big.txt"])
    assert "big.txt is longer than 4,194,304 bytes" in bad.error.message


def test_parquet_and_json_lines_give_the_same(write):
    rows = [{"messages": [user("q"), assistant("r")], "source": "s"}, {"messages": [user("a"), assistant("b")]}]
    pq.write_table(pa.Table.from_pylist(rows), write("a.parquet"))
    found = list(read_examples([write("a.jsonl", *rows)]))
    assert list(read_examples([write("a.jsonl.gz", *rows)])) == found
    assert list(read_examples(["a.parquet"])) == found
    assert found[0].source == "s"


def test_parquet_without_the_columns_is_refused_and_says_what_it_has(write):
    pq.write_table(pa.table({"prompt": ["q"], "reply": ["r"]}), write("a.parquet"))
    with pytest.raises(InputError, match="but has 'prompt', 'reply'") as caught:
        list(read_examples(["a.parquet"]))
    assert "--response-field" in caught.value.hint
    assert list(read_examples(["a.parquet"], response_field="reply")) == [Example("a", (user("q"),), "r")]


def test_csv_and_json_lines_give_the_same(write):
    rows = [{"prompt": "a, b", "response": "c", "source": "x"}, {"messages": [user("q"), assistant("r")]}]
    messages = json.dumps(rows[1]["messages"]).replace('"', '""')
    table = f'prompt,response,source,messages\n"a, b",c,x,\n,,,"{messages}"\n'.encode()
    Path(write("rows.csv.zst")).write_bytes(pa.compress(table, codec="zstd", asbytes=True))
    assert list(read_examples(["rows.csv.zst"])) == list(read_examples([write("rows.jsonl", *rows)]))


@pytest.mark.parametrize("name", ["owner/table.xlsx", "owner/table.arrow", "hf://owner/name", "s3://owner/name.csv"])
def test_what_is_not_read_is_taken_for_no_data_set(name):
    with pytest.raises(InputError, match=r"not read|nothing is read"):
        read_examples([name])


def test_stdin_is_json_lines(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b'{"text": "a"}\nb\n')))
    good, bad = read_examples(["-"])
    assert good == Example("stdin", (), "a")
    assert bad.error.message.startswith("stdin:row 2 is not JSON")


# Where an example comes from


@pytest.mark.parametrize(
    ("row", "options", "expected"),
    [
        ({}, {}, "a.b"),
        ({"source": "s"}, {}, "s"),
        ({"source": 1}, {}, "a.b"),
        ({"source": ""}, {}, "a.b"),
        ({"source": "s"}, {"source": "mine"}, "mine"),
        ({"repo": "r", "source": "s"}, {"source_field": "repo"}, "r"),
        ({"repo": "r"}, {"source_field": "repo", "source": "mine"}, "r"),
        ({}, {"source_field": "repo", "source": "mine"}, "mine"),
    ],
)
@pytest.mark.parametrize("name", ["a.b.jsonl", "a.b.jsonl.gz"])
def test_source(write, name, row, options, expected):
    (example,) = read_examples([write(name, {"text": "t", **row})], **options)
    assert example.source == expected


def test_source_field_named_and_missing_is_a_bad_row(write):
    (bad,) = read_examples([write("a.jsonl", {"text": "t"})], source_field="repo")
    assert "field 'repo' must be a string, but is null" in bad.error.message


def test_source_of_a_text_file(write):
    (example,) = read_examples([write("a.txt", b"t")], source="mine")
    assert example.source == "mine"


# How many


@pytest.mark.parametrize(("limit", "expected"), [(0, ""), (1, "a"), (2, "ab"), (3, "abc"), (9, "abcd"), (None, "abcd")])
def test_limit_counts_examples_over_all_files_and_no_bad_rows(write, limit, expected):
    first = write("1.jsonl", {"text": "a"}, b"broken", {"text": "b"})
    second = write("2.jsonl", {"text": "c"}, {"text": "d"})
    found = [row.response for row in read_examples([first, second], limit=limit) if isinstance(row, Example)]
    assert "".join(found) == expected


def test_limit_reads_no_further(write):
    path = write("a.jsonl.gz", *[{"text": os.urandom(50).hex()} for _ in range(500)])
    packed = Path(path).read_bytes()
    Path(path).write_bytes(packed[: len(packed) // 2])  # reading to the end would raise
    assert len(list(read_examples([path], limit=3))) == 3


def test_negative_limit(write):
    with pytest.raises(UsageError, match="-1"):
        read_examples([write("a.jsonl")], limit=-1)


# Names that are not files


def test_names_are_checked_before_the_first_row(write):
    path = write("a.jsonl", {"text": "a"})
    for missing in ("nowhere.jsonl", "data/nowhere.jsonl", "./owner/name", "/owner/name", "name", "owner/name/more"):
        with pytest.raises(InputError, match="no such file") as caught:
            read_examples([path, missing])
        assert "owner/name" in caught.value.hint


def test_missing_file_in_a_directory_that_is_there_is_no_data_set(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    with pytest.raises(InputError, match="data/nowhere: no such file"):
        read_examples(["data/nowhere"])


def test_directory_is_refused_with_a_glob(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("owner/name").mkdir(parents=True)
    for path in (str(tmp_path), "owner/name"):
        with pytest.raises(InputError, match="is a directory") as caught:
            read_examples([path])
        assert "glob" in caught.value.hint


def test_data_set_that_cannot_be_reached_is_an_input_error(tmp_path):
    code = """
from specds.reading.examples import read_examples
from specds.errors import InputError
try:
    list(read_examples(["nobody/nothing:main"]))
except InputError as error:
    print(error.message, "|", error.hint)
"""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert result.stdout.startswith("data set nobody/nothing:main, split train: ")
    assert "network" in result.stdout


def test_reading_files_imports_neither_torch_nor_datasets(write):
    code = f"""
import sys
from specds.reading.examples import read_examples
from specds.reading.prompts import read_prompts
list(read_examples([{write("a.jsonl", {"text": "a"})!r}])), list(read_prompts(["a.jsonl"]))
print(sorted({{"torch", "datasets", "pyarrow"}} & sys.modules.keys()))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
