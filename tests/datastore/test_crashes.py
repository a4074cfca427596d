"""Whatever call or byte a writer dies at, the store opens and equals the old or the new state."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from specds.datastore.build_suffix import build_suffix
from specds.datastore.ingestion import ingest
from specds.datastore.integrity import find_problems
from specds.datastore.store import Store, open_store
from specds.reading.examples import Example
from specds.tokenizer import Tokenizer

from ..faults import crash_points
from ..tools import corpus_of, random_documents, strays


def ingested(store: Store, tokenizer: Tokenizer) -> None:
    ingest(store, tokenizer, [Example("more", (), f"w{number} w7 w{number}") for number in range(40)])


WRITERS: dict[str, Callable[[Store, Tokenizer], object]] = {
    "ingest": ingested,
    "build-suffix": lambda store, tokenizer: build_suffix(store),
}


def state(path: Path) -> tuple[object, list[list[int]]]:
    """Documents, and the suffix array that a reader gets."""
    return corpus_of(path), [one.tolist() for one in open_store(path).suffix_index().parts.suffixes]


@pytest.mark.parametrize("name", WRITERS)
def test_a_writer_that_dies_leaves_the_old_or_the_new_store(
    name: str, new_store: Callable[..., Store], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    write = WRITERS[name]
    old = new_store(random_documents(30))
    build_suffix(old)
    if name == "build-suffix":  # over a corpus that has grown, so that old and new differ
        ingested(open_store(old.path), tokenizer)
    root = tmp_path / "work"
    path = root / "s.ds"
    shutil.copytree(old.path, path)
    before = state(path)
    write(open_store(path), tokenizer)
    after = state(path)
    assert before != after

    def prepare() -> None:
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(old.path, path)

    seen = []
    points = 0
    for point in crash_points(prepare, lambda: write(open_store(path), tokenizer), root):
        points += 1
        assert find_problems(path)[0] == [], point
        now = state(path)
        assert now in (before, after), point
        seen.append(now == after)
        write(open_store(path), tokenizer)
        assert state(path)[0] == after[0], point
        assert state(path)[1] == after[1], point
        assert strays(path) == [], point
    assert set(seen) == {True, False}, "deaths on both sides of the commit"
    assert points >= 12, points
    print(f"{name}: died at {points} points")
