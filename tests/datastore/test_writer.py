"""Writers: one at a time, what they leave behind, and readers that go on meanwhile."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from specds.datastore.build_dense import DenseOptions, build_dense
from specds.datastore.build_suffix import build_suffix
from specds.datastore.store import open_store
from specds.errors import SpecdsError, StoreLocked
from specds.model import LanguageModel

from ..conftest import NewStore, fill
from ..tools import random_documents, snapshot, strays

HOLD = """
import sys, time
from specds.datastore.store import open_store
with open_store(sys.argv[1]).writer():
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_second_writer_is_refused_and_a_killed_ones_lock_is_gone(new_store: NewStore) -> None:
    store = new_store([([5], [6])])
    command = [sys.executable, "-c", HOLD, str(store.path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "held\n"
        with pytest.raises(StoreLocked), store.writer():
            pass
        with pytest.raises(StoreLocked):
            build_suffix(store)
        assert open_store(store.path).manifest == store.manifest  # readers do not care
        first.send_signal(signal.SIGKILL)
    with store.writer():
        pass


def test_two_writers_in_one_process(new_store: NewStore) -> None:
    store = new_store()
    with store.writer(), pytest.raises(StoreLocked), store.writer():
        pass
    with store.writer():
        pass


def test_a_lock_that_is_a_link_is_not_followed(new_store: NewStore, tmp_path: Path) -> None:
    store = new_store()
    (store.path / ".lock").unlink()
    (store.path / ".lock").symlink_to(tmp_path / "victim")
    with pytest.raises(SpecdsError), store.writer():
        pass
    assert not (tmp_path / "victim").exists()


def test_the_next_writer_sweeps_what_killed_ones_left_and_nothing_else(new_store: NewStore) -> None:
    store = new_store(random_documents(5))
    build_suffix(store)
    store = open_store(store.path)
    before = snapshot(store.path)
    left = [
        "corpus/part-00077.parquet",
        "suffix/000044/tokens.bin",
        "dense/000009/keys/dataset.npy",
        "dense/000009/states.work",
        ".manifest.json.4242.tmp",
    ]
    for name in left:
        (store.path / name).parent.mkdir(parents=True, exist_ok=True)
        (store.path / name).write_bytes(b"half")
    (store.path / "README.txt").write_text("the user's own")
    assert open_store(store.path).manifest == store.manifest  # readers do not care
    with store.writer():
        pass
    assert snapshot(store.path) == {**before, "README.txt": snapshot(store.path)["README.txt"]}


def test_a_failed_writer_leaves_nothing(new_store: NewStore) -> None:
    store = new_store(random_documents(5))
    before = snapshot(store.path)
    with pytest.raises(RuntimeError), store.writer() as writer:
        (writer.segment_path("suffix") / "tokens.bin").write_bytes(b"half")
        writer.shard_path().write_bytes(b"half")
        raise RuntimeError
    assert snapshot(store.path) == before


def test_readers_keep_what_they_opened_through_a_rebuild(new_store: NewStore, tiny: LanguageModel) -> None:
    documents = random_documents(30)
    store = new_store(documents)
    build_suffix(store)
    build_dense(store, tiny, DenseOptions(dims=8))
    opened = open_store(store.path)
    suffix, dense = opened.suffix_index(), opened.dense_index(tiny.fingerprint)
    context = np.array(documents[3][1], np.int64)
    hidden = np.ones(32, np.float32)

    def answers() -> list[object]:
        match = suffix.match(context, min_match=1)
        similarity, positions = dense.search(hidden, 10)
        follows = [one.tolist() for one in dense.continuations(positions, 5)]
        tree = [part.tolist() for part in suffix.continuations(match)]
        return [match.length, match.ranges.tolist(), tree, similarity.tolist(), follows]

    expected = answers()
    fill(store, random_documents(40, seed=5), source="more")
    build_suffix(store)
    build_dense(store, tiny, DenseOptions(dims=8))
    assert answers() == expected
    newer = open_store(store.path)
    assert len(newer.manifest.suffix) == len(newer.manifest.dense) == 1
    assert len(newer.suffix_index().parts.tokens[0]) > len(suffix.parts.tokens[0])


def test_readers_keep_files_that_they_have_not_opened_yet(new_store: NewStore, tiny: LanguageModel) -> None:
    store = new_store(random_documents(30))
    build_suffix(store)
    build_dense(store, tiny, DenseOptions("faiss", dims=8))
    reader = open_store(store.path)
    other = open_store(store.path)
    build_suffix(fill(other, random_documents(40, seed=5), source="more"))
    build_dense(other, tiny, replace=True)
    assert len(reader.suffix_index().parts.tokens[0]) == reader.manifest.tokens + 30
    reader.dense_index(tiny.fingerprint)
    assert strays(store.path) != []
    del reader
    with open_store(store.path).writer():
        pass
    assert strays(store.path) == []


def test_opening_while_a_writer_rebuilds_never_fails(new_store: NewStore) -> None:
    store = new_store(random_documents(5))
    done = threading.Event()

    def rebuild() -> None:
        for number in range(20):
            fill(store, [([], [5, 6, number])], source=f"more-{number}")
            build_suffix(store)
        done.set()

    writer = threading.Thread(target=rebuild)
    writer.start()
    opened = 0
    while not done.is_set():
        open_store(store.path)
        opened += 1
    writer.join()
    assert opened
