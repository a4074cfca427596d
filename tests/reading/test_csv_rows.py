"""CSV and TSV files as rows."""

import gzip

import pytest

from specds.limits import MAX_ROW
from specds.reading.fields import Wanted
from specds.reading.prompts import Prompt, read_prompts
from specds.reading.rows import rows

from .conftest import packed_zstd, user


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
