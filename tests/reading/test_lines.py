"""Text files line by line: ends, encodings, lines that are too long, packed files."""

import gzip
import os
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specds.errors import InputError
from specds.limits import MAX_ROW
from specds.reading.prompts import BadRow, Prompt, read_prompts

from .conftest import user


@pytest.mark.parametrize("name", ["p.jsonl", "p.txt"])
def test_byte_order_mark_carriage_returns_and_missing_last_newline(write, name):
    lines = [b'{"prompt": "a"}', b'{"prompt": "b"}'] if name == "p.jsonl" else [b"a", b"b"]
    found = list(read_prompts([write(name, b"\xef\xbb\xbf" + b"\r\n".join(lines))]))
    assert [prompt.turns for prompt in found] == [((user("a"),),), ((user("b"),),)]


def test_row_number_is_the_line_number_of_the_editor(write):
    (bad,) = read_prompts([write("p.jsonl", "\n\n\nbroken\n")])
    assert bad.error.message.startswith("p.jsonl:row 4 ")


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
