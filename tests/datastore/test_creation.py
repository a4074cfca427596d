"""Making a store, whatever is there already and whoever else does."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from specds.datastore.creation import create_store
from specds.datastore.integrity import find_problems
from specds.datastore.store import open_store
from specds.errors import NotAStore, StoreLocked
from specds.tokenizer import Tokenizer

from ..conftest import NewStore, fill
from ..tools import snapshot, strays


def test_a_new_store_is_empty_and_opens(tmp_path: Path, tokenizer: Tokenizer) -> None:
    made = create_store(tmp_path / "deep" / "new.ds", tokenizer)
    opened = open_store(made.path, tokenizer)
    assert opened.manifest == made.manifest
    assert (opened.manifest.documents, opened.manifest.tokens, opened.size()) == (0, 0, 0)
    assert find_problems(made.path) == ([], 0, 0)


def test_creating_what_is_there_opens_it(new_store: NewStore, tokenizer: Tokenizer) -> None:
    store = new_store([([5], [6, 7])])
    assert create_store(store.path, tokenizer).manifest == store.manifest


def test_an_empty_directory_becomes_a_store_a_foreign_one_does_not(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "empty").mkdir()
    create_store(tmp_path / "empty", tokenizer)
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.tex").write_text("years of work")
    before = snapshot(tmp_path)
    with pytest.raises(NotAStore):
        create_store(foreign, tokenizer)
    with pytest.raises(NotAStore):
        create_store(foreign / "thesis.tex", tokenizer)
    assert snapshot(tmp_path) == before


def test_what_a_killed_creator_left_becomes_a_store(tmp_path: Path, tokenizer: Tokenizer) -> None:
    left = tmp_path / "left.ds"
    left.mkdir()
    (left / ".manifest.json.123.tmp").write_text('{"format": "spec')
    (left / ".lock").touch()
    store = fill(create_store(left, tokenizer), [([], [5, 6])])
    assert store.manifest.documents == 1
    assert strays(left) == []


def test_creators_do_not_undo_each_other(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Whoever makes the store while another looks at it, what was put in it stays."""
    path = tmp_path / "new.ds"
    path.mkdir()
    lock = os.open(path / ".lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    with pytest.raises(StoreLocked):
        create_store(path, tokenizer)
    os.close(lock)
    create_store(path, tokenizer)
