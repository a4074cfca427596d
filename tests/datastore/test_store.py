"""The store: made, opened, moved, locked, and what a killed writer leaves."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from specds.datastore.ann import KINDS
from specds.datastore.build_dense import DenseOptions, build_dense
from specds.datastore.build_suffix import build_suffix
from specds.datastore.creation import create_store
from specds.datastore.integrity import find_problems
from specds.datastore.segments import consolidate
from specds.datastore.store import open_store
from specds.errors import (
    CorruptStore,
    ForeignModel,
    ForeignTokenizer,
    MissingIndex,
    UnsafeFile,
    UnsafeStore,
    UsageError,
)
from specds.model import LanguageModel
from specds.tokenizer import wrap_tokenizer

from ..conftest import NewStore, fill, make_model, make_tokenizer
from ..tools import corpus_of, edit_manifest, manifest_of, random_documents, snapshot, strays


def test_another_tokenizer_is_refused_and_both_are_named(new_store: NewStore) -> None:
    store = new_store([([5], [6])])
    other = wrap_tokenizer(make_tokenizer(64), "other-model")
    with pytest.raises(ForeignTokenizer) as refused:
        open_store(store.path, other)
    for named in (store.manifest.tokenizer.fingerprint[:16], other.fingerprint[:16], "tiny", "other-model"):
        assert named in refused.value.message
    with pytest.raises(ForeignTokenizer):
        create_store(store.path, other)


def test_another_models_dense_index_is_refused(new_store: NewStore, tiny: LanguageModel) -> None:
    store = new_store(random_documents(10))
    build_dense(store, tiny, DenseOptions("faiss", dims=4))
    other = make_model(seed=1)
    store = open_store(store.path)
    with pytest.raises(ForeignModel) as refused:
        store.dense_index(other.fingerprint)
    assert other.fingerprint[:16] in refused.value.message
    assert tiny.fingerprint[:16] in refused.value.message
    store.dense_index(tiny.fingerprint)


def test_a_missing_index_says_how_to_build_it(new_store: NewStore, tiny: LanguageModel) -> None:
    store = new_store([([5], [6])])
    with pytest.raises(MissingIndex) as refused:
        store.suffix_index()
    assert f"specds build-suffix {store.path}" in refused.value.hint
    with pytest.raises(MissingIndex) as refused:
        store.dense_index(tiny.fingerprint)
    assert f"specds build-dense {store.path}" in refused.value.hint


def test_an_empty_corpus_cannot_be_indexed(new_store: NewStore, tiny: LanguageModel) -> None:
    store = new_store()
    with pytest.raises(UsageError):
        build_suffix(store)
    with pytest.raises(UsageError):
        build_dense(store, tiny)
    assert open_store(store.path).manifest == store.manifest


@pytest.mark.parametrize("kind", KINDS)
def test_a_moved_store_and_a_copy_answer_alike(
    kind: str, new_store: NewStore, tiny: LanguageModel, tmp_path: Path
) -> None:
    documents = random_documents(60, longest=20)
    store = new_store(documents)
    build_suffix(store)
    build_dense(store, tiny, DenseOptions(kind, dims=8))
    context = np.array(documents[7][1][:3], np.int64)
    hidden = np.random.default_rng(0).normal(size=32).astype(np.float32)

    def answers(path: Path) -> list[object]:
        opened = open_store(path)
        suffix, dense = opened.suffix_index(), opened.dense_index(tiny.fingerprint)
        match = suffix.match(context, min_match=1)
        similarity, positions = dense.search(hidden, 10)
        follows = [one.tolist() for one in dense.continuations(positions, 5)]
        tree = [part.tolist() for part in suffix.continuations(match)]
        return [match.length, match.ranges.tolist(), tree, similarity.tolist(), positions.tolist(), follows]

    expected = answers(store.path)
    copied, moved = tmp_path / "elsewhere" / "copy.ds", tmp_path / "a b ü" / "moved.ds"
    shutil.copytree(store.path, copied)
    moved.parent.mkdir()
    store.path.rename(moved)
    assert answers(copied) == expected
    assert answers(moved) == expected
    assert find_problems(moved)[0] == []


def test_new_documents_are_uncovered_until_the_index_takes_them_in(new_store: NewStore) -> None:
    store = new_store([([5], [6, 7])])
    build_suffix(store)
    assert open_store(store.path).manifest.uncovered("suffix") == []
    store = fill(store, [([], [9, 9])], source="new")
    assert store.manifest.uncovered("suffix") == store.manifest.corpus[1:]
    build_suffix(store)
    assert open_store(store.path).manifest.uncovered("suffix") == []
    assert build_suffix(store) == []


def test_consolidating_covered_files_keeps_them_covered(new_store: NewStore) -> None:
    store = new_store([([5], [6, 7])])
    for number in range(3):
        store = fill(store, [([], [9, number + 5])], source=f"new-{number}")
    build_suffix(store)
    before = corpus_of(store.path)
    with store.writer() as writer:
        assert consolidate(writer, 2) == 2
    store = open_store(store.path)
    assert corpus_of(store.path) == before
    assert len(store.manifest.corpus) == 2
    assert store.manifest.uncovered("suffix") == []
    assert strays(store.path) == []


def test_a_link_out_of_the_store_is_refused(new_store: NewStore, tmp_path: Path) -> None:
    store = new_store(random_documents(5))
    part = store.path / store.manifest.corpus[0].file
    outside = tmp_path / "outside.parquet"
    part.rename(outside)
    part.symlink_to(outside)
    with pytest.raises(UnsafeStore, match="is a symbolic link"):
        open_store(store.path)
    with pytest.raises(UnsafeStore, match="is a symbolic link"):
        find_problems(store.path)


def test_a_linked_directory_out_of_the_store_is_refused(new_store: NewStore, tmp_path: Path) -> None:
    store = new_store(random_documents(5))
    (store.path / "corpus").rename(tmp_path / "outside")
    (store.path / "corpus").symlink_to(tmp_path / "outside")
    with pytest.raises(UnsafeStore, match="is a symbolic link"):
        open_store(store.path)


def test_a_folder_that_becomes_a_link_after_it_was_looked_at_is_not_followed(
    new_store: NewStore, tmp_path: Path
) -> None:
    store = new_store(random_documents(5))
    build_suffix(store)
    (tmp_path / "outside").mkdir()
    with store.writer() as writer:
        for folder in ("suffix", "dense", "corpus"):
            if (store.path / folder).exists():
                (store.path / folder).rename(tmp_path / "outside" / folder)
            (tmp_path / "outside" / folder / "work").mkdir(parents=True)
            (store.path / folder).symlink_to(tmp_path / "outside" / folder)
        before = snapshot(tmp_path / "outside")
        for use in (
            lambda: writer.segment_path("suffix"),
            lambda: writer.work_path("dense"),
            writer.shard_path,
            lambda: open_store(store.path),
        ):
            with pytest.raises((UnsafeFile, UnsafeStore)):
                use()
        writer.change(corpus=[], suffix=[])  # what nobody names any more is swept, but not there
        assert snapshot(tmp_path / "outside") == before
        assert (tmp_path / "outside" / "dense" / "work").is_dir()


def test_a_store_behind_a_link_is_a_store(new_store: NewStore, tmp_path: Path) -> None:
    store = new_store(random_documents(5))
    (tmp_path / "link.ds").symlink_to(store.path)
    assert open_store(tmp_path / "link.ds").manifest == store.manifest


def test_verify_reads_what_opening_does_not(new_store: NewStore) -> None:
    """Opening looks at 64 KiB at each end; a change in the middle is for `verify`."""
    store = new_store([([], [5 + number % 100 for number in range(200_000)])])
    build_suffix(store)
    file = store.path / manifest_of(store.path).suffix[0].directory / "sa.bin"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    open_store(store.path)
    problems, files, size = find_problems(store.path)
    assert len(problems) == 1
    assert "sa.bin" in problems[0]
    assert files == 3
    assert size == open_store(store.path).size()


@pytest.mark.parametrize(("field", "value"), [("positions", 1), ("positions", "x"), ("token_dtype", "object")])
def test_an_index_whose_parameters_do_not_fit_its_files_is_refused(
    new_store: NewStore, field: str, value: object
) -> None:
    store = new_store(random_documents(5))
    build_suffix(store)
    edit_manifest(store.path, lambda body: body["suffix"][0]["parameters"].update({field: value}))
    with pytest.raises(CorruptStore):
        open_store(store.path).suffix_index()
