"""Files as a user would name them, and the messages that are read from them."""

import json
from pathlib import Path

import pyarrow as pa
import pytest

from specds.reading.prompts import read_prompts


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def packed_zstd(content):
    return pa.compress(content, codec="zstd", asbytes=True)


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
