"""Files that cannot be read, and what is said of them."""

import os
from pathlib import Path

import pytest

from specds.errors import InputError
from specds.reading.prompts import read_prompts


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


def test_closed_stdin(monkeypatch):
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(InputError, match="stdin is closed"):
        list(read_prompts(["-"]))


@pytest.mark.parametrize(
    "path", ["s3://bucket/p.jsonl", "hf://datasets/a/b/p.csv", "https://x.org/p.jsonl.gz?" + "k" * 5000]
)
def test_address_is_refused_before_anything_is_read(path):
    with pytest.raises(InputError, match="nothing is read over " + path.partition("//")[0]) as caught:
        read_prompts([path])
    assert "download" in caught.value.hint
