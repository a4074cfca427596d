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

from specds.errors import InputError, PromptError, UsageError
from specds.limits import MAX_ROW
from specds.reading.prompts import BadRow, Prompt, read_prompts
from specds.reading.rows import Wanted, rows


def user(text):
    return {"role": "user", "content": text}


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Write a file into the working directory and return its name, as a user would give it."""
    monkeypatch.chdir(tmp_path)

    def _write(name, content):
        Path(name).write_bytes(content.encode() if isinstance(content, str) else content)
        return name

    return _write


@pytest.fixture
def only(write):
    """What one line of JSON is read as."""

    def _only(line):
        (found,) = read_prompts([write("p.jsonl", line if isinstance(line, str | bytes) else json.dumps(line))])
        return found

    return _only


# What each kind of row means


def test_prompt_is_one_user_turn(only):
    assert only({"prompt": "Sort a list."}) == Prompt("0", ((user("Sort a list."),),))


def test_turns_are_one_user_message_each(only):
    assert only({"turns": ["a", "b"]}).turns == ((user("a"),), (user("b"),))


def test_messages_are_one_turn_with_its_history(only):
    history = [{"role": "system", "content": ""}, user("a"), {"role": "assistant", "content": "b"}, user("c")]
    assert only({"messages": history}).turns == (tuple(history),)


def test_messages_keep_only_role_and_content(only):
    assert only({"messages": [{**user("a"), "name": "x", "weight": 1}]}).turns == ((user("a"),),)


def test_text_is_raw(only):
    prompt = only({"text": "def f("})
    assert prompt.raw
    assert prompt.turns == ((user("def f("),),)


def test_of_several_kinds_the_first_in_order_is_taken(only):
    row = {"text": "t", "prompt": "p", "turns": ["u"], "messages": [user("m")]}
    for expected in "mupt":
        prompt = only(row)
        assert prompt.turns == ((user(expected),),)
        assert prompt.raw == (expected == "t")
        row.popitem()


def test_null_field_counts_as_absent(only):
    assert only({"messages": None, "prompt": "p"}).turns == ((user("p"),),)


def test_prompt_keeps_its_white_space(only):
    assert only({"prompt": "  a\n"}).turns == ((user("  a\n"),),)


@pytest.mark.parametrize(
    ("reference", "expected"), [("r", "r"), (["r", "s"], "r"), ([], None), (42, None), (None, None), ({}, None)]
)
def test_reference(only, reference, expected):
    assert only({"prompt": "p", "reference": reference}).reference == expected


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"id": "x"}, "x"),
        ({"id": 7}, "7"),
        ({"question_id": 81}, "81"),
        ({"id": "x", "question_id": 81}, "x"),
        ({"id": None, "question_id": 81}, "81"),
        ({"id": " "}, "0"),
        ({"id": [1]}, "0"),
        ({"id": True}, "0"),
        ({"id": "\ud800"}, "0"),
    ],
)
def test_id(only, row, expected):
    assert only({**row, "prompt": "p"}).id == expected
    assert only({**row, "prompt": 1}).id == expected  # a bad row is reported under the same id


def test_rows_are_numbered_from_0_over_all_files(write):
    first = write("a.jsonl", '{"prompt": "a"}\n\nbroken\n')
    second = write("b.txt", "c\nd\n")
    found = list(read_prompts([first, second]))
    assert [row.id for row in found] == ["0", "1", "2", "3"]
    assert [isinstance(row, BadRow) for row in found] == [False, True, False, False]


def test_prompt_field_named_is_the_only_one_looked_at(write):
    path = write("p.jsonl", '{"question": "q", "messages": []}\n{"prompt": "p"}')
    good, bad = read_prompts([path], prompt_field="question")
    assert good.turns == ((user("q"),),)
    assert "'question'" in bad.error.message


def test_text_field_named_as_the_prompt_is_no_raw_text(write):
    (prompt,) = read_prompts([write("p.jsonl", '{"text": "q"}')], prompt_field="text")
    assert not prompt.raw


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


# Rows that cannot be used


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b'{"prompt": ', "is not JSON: Expecting value at column 12"),
        (b'{"prompt": "a"} {}', "is not JSON: Extra data at column 17"),
        (b'{"prompt": "\xff"}', "is not UTF-8: byte 0xff at offset 12"),
        (b'{"prompt": "a\0"}', "holds a NUL byte"),
        (b'{"prompt": "a\x07"}', "is not JSON: Invalid control character"),
        (b'["a"]', "must be an object, but is an array"),
        (b'"a"', "must be an object, but is a string"),
        (b"1", "must be an object, but is a number"),
        (b"null", "must be an object, but is null"),
        (b"[" * 100_000, "too deeply nested"),
        (b'{"prompt": ' * 100_000, "too deeply nested"),
        (b'{"prompt": "a", "prompt": "b"}', "the key 'prompt' stands twice"),
        (b'{"prompt": ' + b"1" * 5000 + b"}", "a number has too many digits"),
        (b"{}", "must have 'messages' or 'turns' or 'prompt' or 'text', but has nothing"),
        (b'{"promt": "a", "id": 1}', "but has 'promt', 'id'"),
        (b'{"prompt": null}', "but has 'prompt' (null)"),
        (b'{"prompt": 1}', "field 'prompt' must be a string, but is a number"),
        (b'{"prompt": true}', "field 'prompt' must be a string, but is a truth value"),
        (b'{"prompt": ["a"]}', "field 'prompt' must be a string, but is an array"),
        (b'{"prompt": ""}', "field 'prompt' must not be empty"),
        (b'{"prompt": " \\n\\u00a0"}', "field 'prompt' must not be empty"),
        (b'{"prompt": "\\ud83d"}', "field 'prompt' holds half of a surrogate pair"),
        (b'{"text": ""}', "field 'text' must not be empty"),
        (b'{"turns": "a"}', "field 'turns' must be a list of strings, but is a string"),
        (b'{"turns": []}', "field 'turns' must be a list of strings, but is empty"),
        (b'{"turns": ["a", 1]}', "field 'turns[1]' must be a string, but is a number"),
        (b'{"messages": {}}', "field 'messages' must be a list of messages, but is an object"),
        (b'{"messages": []}', "field 'messages' must be a list of messages, but is empty"),
        (b'{"messages": ["a"]}', "field 'messages[0]' must be a message, but is a string"),
        (b'{"messages": [{"role": "user"}]}', "field 'messages[0].content' must be a string, but is null"),
        (b'{"messages": [{"content": "a"}]}', "field 'messages[0].role' must be a string, but is null"),
        (b'{"messages": [{"role": "bot", "content": "a"}]}', "field 'messages[0].role' is 'bot'"),
        (b'{"messages": [{"role": "user", "content": " "}]}', "field 'messages[0].content' must not be empty"),
        (b'{"messages": [{"role": "system", "content": "a"}]}', "must end with a user's message"),
    ],
)  # fmt: skip
def test_bad_row_says_where_and_what_and_leaves_the_others(write, line, says):
    path = write("p.jsonl", b'{"prompt": "a"}\n' + line + b'\n{"prompt": "b"}\n')
    before, bad, after = read_prompts([path])
    assert before.turns == ((user("a"),),)
    assert after.turns == ((user("b"),),)
    assert isinstance(bad.error, PromptError)
    assert bad.error.message.startswith("p.jsonl:row 2")
    assert says in bad.error.message
    assert bad.error.hint
    assert "\n" not in bad.error.message + bad.error.hint


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


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.just("user"),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(["role", "content", "prompt", "messages", "turns", "id"]), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


@given(_json)
def test_every_json_value_is_a_prompt_of_text_or_a_bad_row(tmp_path_factory, value):
    path = tmp_path_factory.mktemp("json") / "p.jsonl"
    path.write_text(json.dumps(value))
    (row,) = read_prompts([str(path)])
    if isinstance(row, Prompt):
        assert row.turns
        for turn in row.turns:
            assert turn[-1]["role"] == "user"
            assert turn[-1]["content"].strip()
            assert all(isinstance(message["content"], str) for message in turn)


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
