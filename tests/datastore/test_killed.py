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

from specds.datastore.integrity import find_problems
from specds.datastore.store import open_store

from ..tools import Mortal, corpus_of, manifest_of, strays

# Of a run that is killed: several responses at once, saved in parts.
PARTS = ["--parallel", 3, "--save-every", 2, "-d", "pld"]


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
    options = ["--device", "cpu", "--threads", 1, "--max-new-tokens", 24, "--temperature", 0.8]

    def make(store: Path) -> list[object]:
        return ["generate", asked, "--store", store, "--model", tiny_directory, *options, *PARTS]

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
    """Every creation, rename, removal and fsync of a run that saves twice is the last one once."""
    prompts = tmp_path / "p.txt"
    prompts.write_text("w1\nw2\n")
    options = ["--model", tiny_directory, "--device", "cpu", "--threads", 1, "--max-new-tokens", 3]
    options += ["-d", "none", "--parallel", 2, "--save-every", 1]
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
    print(f"generate: killed at {step - 1} points")


COMMANDS: dict[str, list[object]] = {
    "build-suffix": ["STORE"],
    "build-dense": ["STORE", "MODEL"],
    "build-dense --replace": ["STORE", "--index", "faiss", "--dims", 4, "MODEL"],
    "ingest": ["TEXT", "MODEL", "-s", "STORE"],
    "remove": ["STORE", "--source", "more"],
    "compact": ["STORE"],
    "dedupe": ["STORE", "--boilerplate", 4],
    "rebuild": ["STORE", "--suffix-only"],
    "merge": ["OTHER", "GROWN", "-o", "STORE"],
}
SLOW = ("build-dense --replace", "rebuild", "merge")


@pytest.mark.parametrize("name", [pytest.param(one, marks=pytest.mark.slow if one in SLOW else ()) for one in COMMANDS])
def test_any_writer_killed_before_any_change_of_a_file_leaves_the_old_store_or_the_new_one(
    name: str, tmp_path: Path, killable: Mortal, tiny_directory: Path, grown: Path
) -> None:
    """The store has two segments of each index, and documents in none: what is replaced is at stake too."""
    text = tmp_path / "more.txt"
    text.write_text("w5 w6 w7\n")
    store, other = tmp_path / "killed.ds", tmp_path / "other.ds"
    assert killable.run(["ingest", text, "--model", tiny_directory, "-s", other]) == 0
    places = {"STORE": store, "OTHER": other, "GROWN": grown, "TEXT": text, "MODEL": f"--model={tiny_directory}"}
    argv = [*name.split(), *(places.get(str(one), one) for one in COMMANDS[name])]

    def fresh() -> None:
        shutil.rmtree(store, ignore_errors=True)
        if name != "merge":
            shutil.copytree(grown, store)

    fresh()
    assert killable.run(argv) == 0, killable.said
    after = corpus_of(store)
    fresh()
    before = corpus_of(store) if store.exists() else {}
    model = manifest_of(grown).dense[0].model
    assert model is not None
    outcomes = set()
    step = 0
    while True:
        step += 1
        fresh()
        code = killable.run(argv, at=step, root=store)
        if code != 9:
            break
        if not (store / "manifest.json").exists():
            assert name == "merge"
            continue
        assert find_problems(store)[0] == [], f"killed before change {step}"
        held = corpus_of(store)
        assert held in (before, after), f"killed before change {step}"
        outcomes.add(manifest_of(store) == manifest_of(grown))
        opened = open_store(store)
        if opened.manifest.corpus:
            opened.suffix_index()
            opened.dense_index(model.fingerprint)
        with opened.writer():
            pass
        assert strays(store) == [], f"killed before change {step}"
    assert code == 0, killable.said
    assert outcomes == ({True, False} if name != "merge" else {False}), "kills on both sides of the commit"
    assert step > 5
    print(f"{name}: killed at {step - 1} points")
