"""`specds diff` as its users meet it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from specds.datastore.creation import create_store
from specds.tokenizer import Tokenizer

from ..conftest import fill
from ..tools import Run, damage, random_documents, snapshot


@pytest.fixture
def pair(tmp_path: Path, tokenizer: Tokenizer) -> tuple[Path, Path]:
    """A store, and the same with three documents more, whose source is hostile to terminals."""
    one, other = tmp_path / "one.ds", tmp_path / "[red]other.ds"
    fill(create_store(one, tokenizer), random_documents(12))
    shutil.copytree(one, other)
    fill(create_store(other, tokenizer), [([5], [6, 7])] * 3, source="[bold]\x1b[2J")
    return one, other


def test_equal_stores_exit_with_0_and_others_with_1(pair: tuple[Path, Path], run_cli: Run) -> None:
    one, other = pair
    before = snapshot(one.parent)
    same = run_cli("diff", one, one)
    assert (same.code, same.err) == (0, "")
    assert "the same documents" in same.out
    result = run_cli("diff", one, other)
    assert (result.code, result.err) == (1, "")
    assert "3 documents only in" in result.out
    assert "3 (9 tokens)" in result.out
    assert "different documents" in result.out
    assert "\x1b" not in result.out
    assert "[red]other.ds" in result.out
    assert snapshot(one.parent) == before


def test_json_and_top(pair: tuple[Path, Path], run_cli: Run) -> None:
    result = run_cli("diff", *pair, "--json", "--top", 2)
    assert result.code == 1
    record = json.loads(result.out)
    assert record["documents"] == {"first": 0, "second": 3, "changed": 0, "renamed": 0, "relabelled": 0}
    assert len(record["ids"]["second"]) == 2
    assert record["sources"]["[bold]\x1b[2J"]["second"] == {"documents": 3, "tokens": 9}
    assert not record["same_contents"]
    assert "… and 1 more" in run_cli("diff", *pair, "--top", 2).out
    assert run_cli("diff", *pair, "--top", -1).code == 2


def test_indexes_are_shown_and_do_not_decide(stocked: dict[str, Path], run_cli: Run) -> None:
    result = run_cli("diff", stocked["scann"], stocked["faiss"])
    assert result.code == 0
    assert "dense      differs" in result.out
    assert "ann: scann; faiss" in result.out


@pytest.mark.parametrize("how", ["truncated", "missing", "flipped"])
def test_what_is_refused_has_its_reason_on_one_line(how: str, pair: tuple[Path, Path], run_cli: Run) -> None:
    one, other = pair
    damage(other / "corpus/part-00002.parquet", how)
    run_cli("diff", one, other).refused("part-00002.parquet")
    run_cli("diff", other, one).refused("part-00002.parquet")
    run_cli("diff", one, one.parent).refused("not a datastore")
    assert run_cli("diff", one).code == 2
