"""Writers killed at any moment: the store opens as before, and the next run ends as if nothing had happened.

The commands run through the command line, in processes of their own.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from specds.datastore.store import find_problems, open_store

from ..tools import Mortal, corpus_of, manifest_of, snapshot, strays


def words(count: int, seed: int) -> str:
    return " ".join(f"w{number}" for number in np.random.default_rng(seed).integers(0, 120, count))


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    rows = [{"id": str(number), "prompt": words(4 + number % 5, number)} for number in range(24)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def command(asked: Path, tiny_directory: Path) -> Callable[[Path], list[object]]:
    options = ["--device", "cpu", "--threads", 1, "--batch-size", 2, "--max-new-tokens", 24, "--temperature", 0.8]

    def make(store: Path) -> list[object]:
        return ["generate", asked, "--store", store, "--model", tiny_directory, *options]

    return make


@pytest.fixture(scope="module")
def uninterrupted(
    tmp_path_factory: pytest.TempPathFactory, killable: Mortal, command: Callable[[Path], list[object]]
) -> tuple[Path, float]:
    """The store of a run that nothing interrupted, and how long that took."""
    store = tmp_path_factory.mktemp("uninterrupted") / "whole.ds"
    assert killable.run(command(store)) == 0, killable.said
    return store, killable.seconds


def test_killed_at_random_moments_and_resumed_it_ends_as_if_uninterrupted(
    tmp_path: Path,
    killable: Mortal,
    command: Callable[[Path], list[object]],
    uninterrupted: tuple[Path, float],
    tiny_directory: Path,
) -> None:
    whole, seconds = uninterrupted
    store = tmp_path / "killed.ds"
    rng = random.Random(0)
    killed = held = 0
    while killed < 12:
        code = killable.run(command(store), after=seconds * rng.uniform(0.1, 0.7))
        assert code in (-9, 0), killable.said
        killed += code == -9
        if (store / "manifest.json").exists():
            assert find_problems(store)[0] == [], f"after kill {killed}"
            assert len(corpus_of(store)) >= held, "a document was lost"
            held = len(corpus_of(store))
        if code == 0:  # done before the kill came: once more from the start
            assert corpus_of(store) == corpus_of(whole)
            shutil.rmtree(store)
            held = 0
    assert killable.run(command(store)) == 0, killable.said
    assert corpus_of(store) == corpus_of(whole)
    assert list(corpus_of(store)) == list(corpus_of(whole)), "the order of documents differs"
    assert strays(store) == []


def test_killed_before_any_change_of_a_file_it_leaves_a_store_that_opens(
    tmp_path: Path, killable: Mortal, tiny_directory: Path
) -> None:
    """Every creation, rename, removal and fsync of a run of two batches is the last one once."""
    prompts = tmp_path / "p.txt"
    prompts.write_text("w1\nw2\n")
    options = ["--model", tiny_directory, "--device", "cpu", "--threads", 1, "--batch-size", 1, "--max-new-tokens", 3]
    whole = tmp_path / "whole.ds"
    assert killable.run(["generate", prompts, "-s", whole, *options]) == 0, killable.said
    step = 0
    while True:
        step += 1
        store = tmp_path / "killed.ds"
        shutil.rmtree(store, ignore_errors=True)
        argv = ["generate", prompts, "-s", store, *options]
        code = killable.run(argv, at=step, root=store)
        if code != 9:
            break
        if (store / "manifest.json").exists():
            assert find_problems(store)[0] == [], f"killed before change {step}"
            before = corpus_of(store)
            assert before.items() <= corpus_of(whole).items()
        assert killable.run(argv) == 0, f"after a kill before change {step}: {killable.said}"
        assert corpus_of(store) == corpus_of(whole), f"killed before change {step}"
        assert strays(store) == [], f"killed before change {step}"
    assert code == 0, killable.said
    assert step > 25


@pytest.mark.parametrize("kind", ["suffix", "scann", "faiss", "ingest"])
def test_any_writer_killed_before_any_change_of_a_file_leaves_the_store_as_it_was(
    kind: str, tmp_path: Path, killable: Mortal, tiny_directory: Path, stocked: dict[str, Path]
) -> None:
    """The store has both indexes already, so that what a rebuild replaces is at stake too."""
    text = tmp_path / "more.txt"
    text.write_text("w5 w6 w7\n")
    argv: dict[str, list[object]] = {
        "suffix": ["build-suffix"],
        "scann": ["build-dense", "--index", "scann", "--dims", 4, "--model", tiny_directory, "--threads", 1],
        "faiss": ["build-dense", "--index", "faiss", "--dims", 4, "--model", tiny_directory, "--threads", 1],
        "ingest": ["ingest", text, "--model", tiny_directory, "-s"],
    }
    store = tmp_path / "killed.ds"
    step = 0
    outcomes = set()
    while True:
        step += 1
        shutil.rmtree(store, ignore_errors=True)
        shutil.copytree(stocked["scann"], store)
        old, files = manifest_of(store), snapshot(store)
        code = killable.run([*argv[kind], store], at=step, root=store)
        if code != 9:
            break
        assert find_problems(store)[0] == [], f"killed before change {step}"
        new = manifest_of(store)
        if new == old:
            assert files.items() <= snapshot(store).items()
        outcomes.add(new == old)
        opened = open_store(store)
        opened.suffix_index()
        assert new.dense[0].model is not None
        opened.dense_index(new.dense[0].model.fingerprint)
        with opened.writer():
            pass
        assert strays(store) == [], f"killed before change {step}"
    assert code == 0, killable.said
    assert manifest_of(store) != old
    assert outcomes == {True, False}, "kills on both sides of the commit"
