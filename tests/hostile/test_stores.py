"""Broken, foreign and forged stores: each is refused on one line, and none can change the text.

Through the command line, as their users would meet them.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file, save_file

from specds.datastore.build_dense import DenseOptions, build_dense
from specds.datastore.build_suffix import build_suffix
from specds.datastore.creation import create_store
from specds.datastore.integrity import find_problems
from specds.datastore.manifest import NAME
from specds.datastore.store import open_store
from specds.errors import StoreError
from specds.model import LanguageModel
from specds.tokenizer import Tokenizer, wrap_tokenizer

from ..conftest import fill, make_tokenizer
from ..tools import Mortal, Run, damage, edit_manifest, manifest_of, reseal, snapshot, strays

DENSE = "dense/000001"
KEYS = f"{DENSE}/keys"


@pytest.fixture
def store(stocked: dict[str, Path], tmp_path: Path) -> Path:
    """A copy to break, with a ScaNN index."""
    return Path(shutil.copytree(stocked["scann"], tmp_path / "broken.ds"))


@pytest.fixture
def faiss_store(stocked: dict[str, Path], tmp_path: Path) -> Path:
    """A copy to break, with a faiss index."""
    return Path(shutil.copytree(stocked["faiss"], tmp_path / "broken.ds"))


@pytest.fixture
def decode(run_cli: Run, tiny_directory: Path) -> Run:
    """`specds decode` of one prompt with the tiny model."""

    def call(*arguments: object) -> Any:
        options = ["--model", tiny_directory, "--device", "cpu", "--max-new-tokens", 16, "-q"]
        return run_cli("decode", "-p", "-", *options, *arguments, stdin="w1 w2 w3\nw9 w1 w9 w1\n")

    return call


def refused_everywhere(store: Path, run_cli: Run, decode: Run, *words: str) -> None:
    """Whatever is done with the store, it is refused and not touched."""
    before = snapshot(store) if store.is_dir() else None
    run_cli("inspect", store).refused(*words)
    decode("-s", store, "-d", "rest").refused(*words)
    if before is not None:
        assert snapshot(store) == before


def on_json(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    return lambda store: edit_manifest(store, change)


def on_bytes(change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda store: (store / NAME).write_bytes(change((store / NAME).read_bytes()))


def grow(store: Path) -> None:
    os.truncate(store / NAME, (64 << 20) + 1)


def replaced(link: bool, target: str) -> Callable[[Path], object]:
    def change(store: Path) -> None:
        (store / NAME).unlink()
        if link:
            (store / NAME).symlink_to(target)
        elif target == "fifo":
            os.mkfifo(store / NAME)
        else:
            (store / NAME).mkdir()

    return change


def rename_file(new: str) -> Callable[[Path], object]:
    return on_json(lambda m: m["files"].update({new: m["files"].pop("suffix/000001/sa.bin")}))


MANIFESTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty": (on_bytes(lambda data: b""), "is not JSON"),
    "truncated": (on_bytes(lambda data: data[: len(data) // 2]), "is not JSON"),
    "bit flipped": (on_bytes(lambda data: data.replace(b'"documents": 40', b'"documents": 41')), "changed since"),
    "not JSON": (on_bytes(lambda data: b"\x7fELF" + data), "is not JSON"),
    "not UTF-8": (on_bytes(lambda data: data.replace(b"tiny", b"\xff\xfe\xfd\xfc")), "is not JSON"),
    "an array": (on_bytes(lambda data: b"[" + data + b"]"), "not a specds manifest"),
    "deeply nested": (on_bytes(lambda data: b"[" * 1_000_000), "is not JSON"),
    "huge": (grow, "more than"),
    "another format": (on_json(lambda m: m.update(format="parquet")), "not a specds manifest"),
    "another version": (on_json(lambda m: m.update(version=99)), "version 99"),
    "no version": (on_json(lambda m: m.pop("version")), "version None"),
    "negative size": (on_json(lambda m: m["files"]["suffix/000001/sa.bin"].update(size=-1)), "out of range"),
    "negative count": (on_json(lambda m: m["corpus"][0].update(documents=-40)), "out of range"),
    "endless number": (on_bytes(lambda data: data.replace(b'"documents": 40', b'"documents": ' + b"9" * 5000)), "JSON"),
    "absolute path": (rename_file("/etc/passwd"), "plain path"),
    "path upwards": (rename_file("suffix/../../../etc/passwd"), "plain path"),
    "directory upwards": (on_json(lambda m: m["suffix"][0].update(directory="..")), "plain path"),
    "path with NUL": (rename_file("suffix/000001/sa\0.bin"), "plain path"),
    "terminal escapes": (rename_file("\x1b[2Jsuffix"), "plain path"),
    "missing field": (on_json(lambda m: m.pop("tokenizer")), "lacks tokenizer"),
    "unknown field": (on_json(lambda m: m.update({"plugins\n": ["evil"]})), "unknown fields"),
    "wrong type": (on_json(lambda m: m.update(files=[1, 2])), "not an object"),
    "a link to a device": (replaced(True, "/dev/zero"), "symbolic link"),
    "a pipe": (replaced(False, "fifo"), "is a pipe"),
    "a directory": (replaced(False, "directory"), "not a file"),
    "a link to nothing": (replaced(True, "/nowhere/at/all"), "symbolic link"),
    "a link to itself": (replaced(True, NAME), "symbolic link"),
}


@pytest.mark.parametrize("case", MANIFESTS)
def test_a_broken_manifest_is_refused(case: str, store: Path, run_cli: Run, decode: Run) -> None:
    change, said = MANIFESTS[case]
    change(store)
    before = {path: path.lstat().st_mtime_ns for path in store.rglob("*")}
    run_cli("inspect", store).refused(said)
    run_cli("verify", store).refused(said)
    run_cli("build-suffix", store).refused(said)
    decode("-s", store, "-d", "rest").refused(said)
    assert {path: path.lstat().st_mtime_ns for path in store.rglob("*")} == before


FILES = {
    "scann": [
        "corpus/part-00001.parquet",
        "suffix/000001/tokens.bin",
        "suffix/000001/sa.bin",
        f"{DENSE}/positions.bin",
        f"{DENSE}/tokens.bin",
        f"{DENSE}/normalizer.safetensors",
        f"{KEYS}/dataset.npy",
        f"{KEYS}/scann_assets.pbtxt",
        f"{KEYS}/scann_config.pb",
    ],
    "faiss": [f"{KEYS}/index.faiss"],
}


@pytest.mark.parametrize("how", ["missing", "truncated", "halved", "emptied", "grown", "flipped"])
@pytest.mark.parametrize("name", [*FILES["scann"], *FILES["faiss"]])
def test_a_damaged_file_is_refused_and_found(
    name: str, how: str, stocked: dict[str, Path], tmp_path: Path, run_cli: Run
) -> None:
    kind = "faiss" if name in FILES["faiss"] else "scann"
    store = Path(shutil.copytree(stocked[kind], tmp_path / "broken.ds"))
    damage(store / name, how)
    run_cli("inspect", store).refused(name, "specds verify")
    run_cli("build-suffix", store).refused(name)
    result = run_cli("verify", store)
    assert result.code == 1
    assert len(result.out.splitlines()) == 1
    assert result.out.startswith(name)


def test_all_files_of_a_store_are_broken_above(stocked: dict[str, Path]) -> None:
    for kind, names in FILES.items():
        assert {name for name in manifest_of(stocked[kind]).files if kind == "scann" or "keys" in name} == set(names)


@pytest.fixture
def small(tmp_path: Path, tiny: LanguageModel) -> Path:
    """Two segments of each index, in a store of a few kilobytes."""
    path = tmp_path / "small.ds"
    documents: list[tuple[list[int], list[int]]] = [([5], [6, 7, 5, 6, 8]), ([], [9]), ([3], [4, 5])]
    for number, some in enumerate((documents, documents[:1])):
        store = fill(create_store(path, tiny.tokenizer), some, source=f"s{number}")
        build_suffix(store)
        build_dense(store, tiny, DenseOptions("faiss", dims=2))
    assert [len(segments) for segments in manifest_of(path).indexes.values()] == [2, 2]
    return path


def found_broken(path: Path) -> bool:
    """Whether both opening and verifying say that a store is not what it was."""
    with pytest.raises(StoreError):
        open_store(path)
    try:
        return find_problems(path)[0] != []
    except StoreError:
        return True


@pytest.mark.parametrize("most", [60, pytest.param(10**6, marks=pytest.mark.slow)])
def test_every_flipped_byte_is_found(most: int, small: Path) -> None:
    """Of the manifest, the corpus and both indexes, one byte at a time: of each file some, or all."""
    rng = np.random.default_rng(0)
    flipped = 0
    for name in [NAME, *manifest_of(small).files]:
        data = (small / name).read_bytes()
        for place in rng.permutation(len(data))[:most]:
            bit = 1 << int(rng.integers(8))
            (small / name).write_bytes(data[:place] + bytes([data[place] ^ bit]) + data[place + 1 :])
            assert found_broken(small), f"{name}, byte {place}, bit {bit}"
            flipped += 1
        (small / name).write_bytes(data)
    assert find_problems(small)[0] == []
    print(f"{flipped:,} bytes of {len(manifest_of(small).files) + 1} files flipped")


def test_every_truncated_file_is_found(small: Path) -> None:
    """Each file of the store, cut at up to a hundred places."""
    cuts = 0
    for name in [NAME, *manifest_of(small).files]:
        data = (small / name).read_bytes()
        for length in np.unique(np.linspace(0, len(data.rstrip()) - 1, 100).astype(int)):
            (small / name).write_bytes(data[:length])
            assert found_broken(small), f"{name}, {length} bytes left"
            cuts += 1
        (small / name).write_bytes(data)
    assert find_problems(small)[0] == []
    print(f"{cuts:,} cuts")


@pytest.mark.parametrize("name", ["suffix/000001/sa.bin", "corpus/part-00001.parquet", f"{KEYS}/dataset.npy"])
def test_a_file_that_is_a_link_out_is_refused(name: str, store: Path, tmp_path: Path, run_cli: Run) -> None:
    outside = tmp_path / "outside"
    (store / name).rename(outside)
    (store / name).symlink_to(outside)
    run_cli("inspect", store).refused(name, "symbolic link")
    assert run_cli("verify", store).code == 1


@pytest.mark.parametrize("name", ["suffix/000001/sa.bin", "corpus/part-00001.parquet"])
@pytest.mark.parametrize("what", ["pipe", "directory", "device", "loop"])
def test_a_file_that_is_none_is_refused(name: str, what: str, store: Path, run_cli: Run) -> None:
    (store / name).unlink()
    if what == "pipe":
        os.mkfifo(store / name)
        edit_manifest(store, lambda m: m["files"][name].update(size=0))
    elif what == "directory":
        (store / name).mkdir()
    elif what == "device":
        (store / name).symlink_to("/dev/zero")
    else:
        (store / name).symlink_to(Path(name).name)
    run_cli("inspect", store).refused(name)
    assert run_cli("verify", store).code == 1


def outside(store: Path) -> Path:
    return store.parent / "outside"


def moved_out(folder: str) -> Callable[[Path], object]:
    """The store's own folder, now a link to where it was moved; with a working folder in it that is the user's."""

    def plant(store: Path) -> None:
        (store / folder).rename(outside(store) / folder)
        (outside(store) / folder / "work").mkdir()
        (outside(store) / folder / "work" / "thesis").write_text("precious")
        (store / folder).symlink_to(outside(store) / folder)

    return plant


def plant_temporaries(store: Path) -> None:
    (store / ".readers").unlink()
    (store / ".readers").symlink_to("corpus/part-00001.parquet")
    for number in [*range(200), os.getpid()]:
        (store / f".{NAME}.{number}.tmp").symlink_to(outside(store) / "victim")


def instead(name: str, make: Callable[[Path], object]) -> Callable[[Path], object]:
    def plant(store: Path) -> None:
        (store / name).unlink(missing_ok=True)
        make(store / name)

    return plant


def listen(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server, contextlib.chdir(path.parent):
        server.bind(path.name)


PLANTED: dict[str, tuple[Callable[[Path], object], str]] = {
    "temporaries": (plant_temporaries, "symbolic link"),
    **{f"{folder} elsewhere": (moved_out(folder), folder) for folder in ("corpus", "suffix", "dense")},
    **{f"{name} is a pipe": (instead(name, os.mkfifo), name) for name in (".readers", ".lock", "stray")},
    **{
        f"{name} is a link": (instead(name, lambda path: path.symlink_to(outside(path.parent) / "victim")), name)
        for name in (".readers", ".lock", "stray")
    },
    "a link to nothing": (instead(".lock", lambda path: path.symlink_to(outside(path.parent) / "new")), ".lock"),
    "a link far down": (instead(f"{KEYS}/more", lambda path: path.symlink_to("/")), "more"),
    "a link within": (instead("suffix/000001/sa.bin", lambda path: path.symlink_to("tokens.bin")), "sa.bin"),
    "a socket": (instead("stray", listen), "socket"),
}


@pytest.mark.parametrize("case", PLANTED)
def test_nothing_that_is_planted_in_a_store_leads_out_of_it(
    case: str, store: Path, run_cli: Run, tiny_directory: Path
) -> None:
    outside(store).mkdir()
    (outside(store) / "victim").write_text("precious")
    plant, named = PLANTED[case]
    plant(store)
    before = snapshot(outside(store)), sorted((path, path.lstat().st_mtime_ns) for path in store.rglob("*"))
    model = ["--model", tiny_directory]
    for command in (
        ["verify", store],
        ["inspect", store],
        ["build-suffix", store],
        ["build-dense", store, "--replace", "--device", "cpu", *model],
        ["remove", store, "--source", "test"],
        ["merge", store, store, "--output", store.parent / "merged.ds"],
    ):
        run_cli(*command).refused(named)
    run_cli("ingest", "-", "-s", store, *model, stdin="w1 w2\n").refused(named)
    after = snapshot(outside(store)), sorted((path, path.lstat().st_mtime_ns) for path in store.rglob("*"))
    assert after == before


def test_a_copy_by_hard_links_is_a_store_and_leaves_the_first_alone(store: Path, run_cli: Run) -> None:
    """`cp -al` and backups make such copies; what is in a store is never written in place."""
    copy = store.parent / "copy.ds"
    shutil.copytree(store, copy, copy_function=os.link)
    before = snapshot(store)
    assert run_cli("remove", copy, "--source", "test").code == 0
    assert run_cli("verify", copy).code == 0
    assert snapshot(store) == before


class Canary:
    """Unpickling one leaves a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("listed", [True, False])
def test_a_planted_pickle_is_not_read(listed: bool, store: Path, tmp_path: Path, decode: Run) -> None:
    name = f"{KEYS}/scann_docids.pkl"
    (store / name).write_bytes(pickle.dumps(Canary(tmp_path / "canary")))
    if listed:
        edit_manifest(store, lambda m: m["files"].update({name: m["files"][f"{KEYS}/dataset.npy"]}))
        reseal(store)
    decode("-s", store, "-d", "dresd").refused("pickle")
    assert not (tmp_path / "canary").exists()
    assert pickle.loads(pickle.dumps(Canary(tmp_path / "canary"))) is None
    assert (tmp_path / "canary").exists(), "the canary does not sing"


@pytest.mark.parametrize("name", [f"{KEYS}/dataset.npy", "suffix/000001/sa.bin", f"{DENSE}/positions.bin"])
def test_a_numpy_array_of_objects_is_not_unpickled(name: str, store: Path, tmp_path: Path, decode: Run) -> None:
    np.save(tmp_path / "a.npy", np.array([Canary(tmp_path / "canary")], object), allow_pickle=True)
    (store / name).write_bytes((tmp_path / "a.npy").read_bytes())
    reseal(store)
    decode("-s", store, "-d", "rest" if "sa.bin" in name else "dresd").refused()
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize(
    "line",
    [
        '  asset_path: "{outside}"',
        "  asset_path: '{outside}'",
        '  asset_path:"{outside}"',
        '  asset_path: "dataset.npy" "/../{outside}"',
        '  asset_path: "../outside.npy"',
        '  asset_path: ".."',
        '  asset_path: "\\x2fetc\\x2fpasswd"',
        '  asset_path: "keys/../../outside.npy"',
        '} assets { asset_type: DATASET_NPY asset_path: "{outside}" ',
    ],
)
def test_a_scann_asset_that_leads_out_is_refused(line: str, store: Path, tmp_path: Path, decode: Run) -> None:
    assets = store / KEYS / "scann_assets.pbtxt"
    outside = tmp_path / "outside.npy"
    (store / KEYS / "dataset.npy").rename(outside)
    (store / KEYS / "dataset.npy").write_bytes(b"")
    text = assets.read_text().replace('  asset_path: "dataset.npy"', line.replace("{outside}", str(outside)))
    assert text != assets.read_text()
    assets.write_text(text)
    reseal(store)
    decode("-s", store, "-d", "dresd").refused("list of assets")


def forge_array(name: str, dtype: Any, make: Callable[[np.ndarray[Any, Any]], Any]) -> Callable[[Path], object]:
    def change(store: Path) -> None:
        values = np.fromfile(store / name, dtype)
        np.asarray(make(values)).astype(dtype).tofile(store / name)

    return change


def forge_normalizer(**arrays: Any) -> Callable[[Path], object]:
    def change(store: Path) -> None:
        file = store / DENSE / "normalizer.safetensors"
        good = load_file(file)
        save_file({**good, **{name: make(good[name]) for name, make in arrays.items()}}, file)

    return change


def parameter(kind: str, **values: Any) -> Callable[[Path], object]:
    return on_json(lambda m: m[kind][0]["parameters"].update(values))


def drop_parameter(kind: str, name: str) -> Callable[[Path], object]:
    return on_json(lambda m: m[kind][0]["parameters"].pop(name))


def other_keys(dims: int, count: int) -> Callable[[Path], object]:
    """Another index's keys in the place of this one's."""

    def change(store: Path) -> None:
        from specds.datastore import ann

        kind = manifest_of(store).dense[0].parameters["ann"]
        for file in (store / KEYS).iterdir():
            file.unlink()
        keys = np.random.default_rng(0).normal(size=(count, dims)).astype(np.float32)
        ann.build(kind, keys, store / KEYS)

    return change


rng = np.random.default_rng(0)
SUFFIX_FORGERIES: dict[str, Callable[[Path], object]] = {
    "positions outside": forge_array("suffix/000001/sa.bin", np.int32, lambda a: a + 10**6),
    "negative positions": forge_array("suffix/000001/sa.bin", np.int32, lambda a: -a - 1),
    "least integers": forge_array("suffix/000001/sa.bin", np.int32, lambda a: np.full_like(a, -(2**31))),
    "random positions": forge_array("suffix/000001/sa.bin", np.int32, lambda a: rng.permutation(a)),
    "one position": forge_array("suffix/000001/sa.bin", np.int32, lambda a: np.full_like(a, a[3])),
    "no separators": forge_array("suffix/000001/tokens.bin", np.uint16, lambda a: np.where(a == 65535, 7, a)),
    "only separators": forge_array("suffix/000001/tokens.bin", np.uint16, lambda a: np.full_like(a, 65535)),
    "unknown tokens": forge_array("suffix/000001/tokens.bin", np.uint16, lambda a: a + 500),
    "another dtype": parameter("suffix", token_dtype="uint32"),
    "an object dtype": parameter("suffix", token_dtype="object"),
    "a dtype that is a list": parameter("suffix", suffix_dtype=["int32"]),
    "a count too large": parameter("suffix", positions=1 << 40),
    "an infinite count": parameter("suffix", positions=float("inf")),
    "a count of text": parameter("suffix", positions="many"),
    "no count": drop_parameter("suffix", "positions"),
}
DENSE_FORGERIES: dict[str, Callable[[Path], object]] = {
    "positions outside": forge_array(f"{DENSE}/positions.bin", np.uint32, lambda a: a + 10**6),
    "positions past 2^31": forge_array(f"{DENSE}/positions.bin", np.uint32, lambda a: np.full_like(a, 2**32 - 1)),
    "random positions": forge_array(f"{DENSE}/positions.bin", np.uint32, lambda a: rng.permutation(a)),
    "unknown tokens": forge_array(f"{DENSE}/tokens.bin", np.uint16, lambda a: a + 500),
    "no separators": forge_array(f"{DENSE}/tokens.bin", np.uint16, lambda a: np.where(a == 65535, 7, a)),
    "another hidden size": forge_normalizer(
        mean=lambda a: a[:-1], scale=lambda a: a[:-1], components=lambda a: a[:, :-1]
    ),
    "fewer dimensions": forge_normalizer(components=lambda a: a[:-1]),
    "a flat normalizer": forge_normalizer(components=lambda a: a.ravel()),
    "integers": forge_normalizer(components=lambda a: a.astype(np.int64)),
    "half precision": forge_normalizer(mean=lambda a: a.astype(np.float16)),
    "not numbers": forge_normalizer(mean=lambda a: a * np.nan),
    "infinite": forge_normalizer(scale=lambda a: a * np.inf),
    "other dims": parameter("dense", dims=4),
    "no dims": drop_parameter("dense", "dims"),
    "an unknown kind": parameter("dense", ann="pickle"),
    "a kind of list": parameter("dense", ann=["scann"]),
    "negative cells": parameter("dense", leaves_searched=-3),
    "cells of text": parameter("dense", leaves_searched="x"),
    "infinite keys": parameter("dense", keys=float("inf")),
    "a position dtype": parameter("dense", position_dtype="float32"),
    "keys of other dims": other_keys(5, 30),
    "fewer keys": other_keys(8, 3),
    "more keys": other_keys(8, 5_000),
}


def check_forgery(store: Path, drafter: str, change: Callable[[Path], object], decode: Run) -> None:
    """With checksums that fit: it is refused, or its drafts are bad and the text is still the model's own."""
    plain = decode("-d", "none")
    change(store)
    reseal(store)
    result = decode("-s", store, "-d", drafter)
    if result.code:
        result.refused(str(store))
    else:
        assert [one["tokens"] for one in result.records] == [one["tokens"] for one in plain.records]


@pytest.mark.parametrize("case", SUFFIX_FORGERIES)
def test_a_forged_suffix_index_changes_no_text(case: str, store: Path, decode: Run) -> None:
    check_forgery(store, "rest", SUFFIX_FORGERIES[case], decode)


@pytest.mark.parametrize("drafter", ["dresd", "auto"])
@pytest.mark.parametrize("kind", ["scann", "faiss"])
@pytest.mark.parametrize("case", DENSE_FORGERIES)
def test_a_forged_dense_index_changes_no_text(
    case: str, kind: str, drafter: str, stocked: dict[str, Path], tmp_path: Path, decode: Run
) -> None:
    store = Path(shutil.copytree(stocked[kind], tmp_path / "forged.ds"))
    check_forgery(store, drafter, DENSE_FORGERIES[case], decode)


@pytest.mark.parametrize("data", [b"", b"\0" * 100, b"IwFlnonsense", b"IxFI" + b"\xff" * 200])
def test_a_forged_faiss_index_is_refused(data: bytes, faiss_store: Path, decode: Run) -> None:
    (faiss_store / KEYS / "index.faiss").write_bytes(data)
    reseal(faiss_store)
    decode("-s", faiss_store, "-d", "dresd").refused("faiss")


@pytest.mark.parametrize("name", ["scann_config.pb", "scann_assets.pbtxt", "dataset.npy"])
@pytest.mark.parametrize("data", [b"", b"\xff" * 100, b"\0" * 100])
def test_a_forged_scann_index_is_refused(data: bytes, name: str, store: Path, decode: Run) -> None:
    (store / KEYS / name).write_bytes(data)
    reseal(store)
    decode("-s", store, "-d", "dresd").refused(str(store))


@pytest.mark.parametrize("data", [b"", b"PAR1", b"PAR1" + b"\xff" * 100 + b"PAR1"])
def test_a_forged_corpus_is_refused(data: bytes, store: Path, run_cli: Run, tiny_directory: Path) -> None:
    part = manifest_of(store).corpus[0].file
    (store / part).write_bytes(data)
    reseal(store)
    before = snapshot(store)
    run_cli("rebuild", store, "--suffix-only").refused(part)
    run_cli("build-dense", store, "--model", tiny_directory, "--device", "cpu", "--replace").refused(part)
    run_cli("ingest", "-", "-s", store, "--model", tiny_directory, stdin="w1\n").refused(part)
    assert snapshot(store) == before


def test_a_corpus_of_other_columns_is_refused(store: Path, run_cli: Run) -> None:
    part = manifest_of(store).corpus[0].file
    pq.write_table(pa.table({"text": ["a"]}), store / part)
    reseal(store)
    run_cli("rebuild", store, "--suffix-only").refused(part)


def test_a_corpus_that_the_manifest_makes_too_much_of_is_refused(store: Path, run_cli: Run) -> None:
    edit_manifest(store, lambda m: m["corpus"][0].update(prompt_tokens=1 << 61))
    run_cli("rebuild", store, "--suffix-only").refused("tokens")
    edit_manifest(store, lambda m: m["corpus"][0].update(prompt_tokens=0, response_tokens=1))
    run_cli("rebuild", store, "--suffix-only").refused("tokens")


def test_a_store_of_another_tokenizer_is_refused(
    tmp_path: Path, run_cli: Run, decode: Run, tiny_directory: Path
) -> None:
    other = wrap_tokenizer(make_tokenizer(64), "other-model")
    path = fill(create_store(tmp_path / "other.ds", other), [([5], [6, 7])]).path
    before = snapshot(path)
    for result in (
        decode("-s", path, "-d", "rest"),
        run_cli("generate", "-", "-s", path, "--model", tiny_directory, stdin="w1\n"),
        run_cli("ingest", "-", "-s", path, "--model", tiny_directory, stdin="w1\n"),
        run_cli("build-dense", path, "--model", tiny_directory),
    ):
        result.refused("other-model", other.fingerprint[:16])
    assert snapshot(path) == before


def test_another_models_hidden_states_are_refused(store: Path, decode: Run) -> None:
    edit_manifest(store, lambda m: m["dense"][0]["model"].update(fingerprint="0" * 64, name="another"))
    decode("-s", store, "-d", "dresd").refused("another", "0000000000000000")
    edit_manifest(store, lambda m: m["dense"][0].update(model=None))
    decode("-s", store, "-d", "dresd").refused("unknown")
    assert decode("-s", store, "-d", "rest").code == 0


def test_an_index_that_was_not_built_is_asked_for(tmp_path: Path, tokenizer: Tokenizer, decode: Run) -> None:
    path = fill(create_store(tmp_path / "bare.ds", tokenizer), [([5], [6, 7])]).path
    decode("-s", path, "-d", "rest").refused("specds build-suffix")
    decode("-s", path, "-d", "dresd").refused("specds build-dense")
    decode("-d", "rest").refused("--store", code=2)


def test_an_empty_store_cannot_be_indexed(
    tmp_path: Path, tokenizer: Tokenizer, run_cli: Run, tiny_directory: Path
) -> None:
    path = create_store(tmp_path / "empty.ds", tokenizer).path
    run_cli("build-suffix", path).refused("no documents", code=2)
    run_cli("build-dense", path, "--model", tiny_directory, "--device", "cpu").refused("no documents", code=2)
    assert strays(path) == []


@pytest.mark.parametrize("what", ["nothing", "a file", "an empty directory", "a foreign directory", "under a file"])
def test_what_is_no_store_is_refused(
    what: str, tmp_path: Path, run_cli: Run, decode: Run, tiny_directory: Path
) -> None:
    path = tmp_path / "thing"
    if what == "a file":
        path.write_text("thesis")
    elif what == "an empty directory":
        path.mkdir()
    elif what == "a foreign directory":
        path.mkdir()
        (path / "thesis.tex").write_text("years of work")
    elif what == "under a file":
        path.write_text("thesis")
        path = path / "code.ds"
    before = snapshot(tmp_path)
    run_cli("inspect", path).refused(str(path))
    run_cli("verify", path).refused(str(path))
    run_cli("build-suffix", path).refused(str(path))
    run_cli("build-dense", path, "--model", tiny_directory).refused(str(path))
    decode("-s", path, "-d", "rest").refused(str(path))
    if what not in ("nothing", "an empty directory"):
        run_cli("generate", "-", "-s", path, "--model", tiny_directory, stdin="w1\n").refused(str(path))
        run_cli("ingest", "-", "-s", path, "--model", tiny_directory, stdin="w1\n").refused(str(path))
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("path", ["/proc/specds.ds", "/dev/null", "/dev/null/code.ds", "/proc/self/mem"])
def test_a_place_that_cannot_be_written_is_refused(path: str, run_cli: Run, tiny_directory: Path) -> None:
    for command in ("generate", "ingest"):
        run_cli(command, "-", "-s", path, "--model", tiny_directory, stdin="w1\n").refused(path)


def test_a_store_that_is_being_written_refuses_a_second_writer(
    store: Path, run_cli: Run, decode: Run, tiny_directory: Path
) -> None:
    with open_store(store).writer():
        before = snapshot(store)
        run_cli("build-suffix", store).refused("another process")
        run_cli("generate", "-", "-s", store, "--model", tiny_directory, stdin="w1\n").refused("another process")
        assert run_cli("inspect", store).code == 0
        assert decode("-s", store, "-d", "rest").code == 0
        assert snapshot(store) == before


WRITERS: dict[str, list[object]] = {
    "suffix": ["build-suffix"],
    "scann": ["build-dense", "--index", "scann", "--dims", 16, "--device", "cpu"],
    "faiss": ["build-dense", "--index", "faiss", "--dims", 16, "--device", "cpu"],
    "generate": ["generate", "--device", "cpu", "--max-new-tokens", 4],
    "ingest": ["ingest"],
}


@pytest.mark.parametrize("writer", WRITERS)
def test_a_full_disk_leaves_the_store_as_it_was(
    writer: str, tmp_path: Path, tiny_directory: Path, killable: Mortal
) -> None:
    """Files may grow to a limit, at first a small one; with enough room the same command succeeds."""
    words = " ".join(f"w{number % 120}" for number in range(400))
    (tmp_path / "p.txt").write_text("".join(f"w{number} {words}\n" for number in range(40)))
    store = tmp_path / "full.ds"
    model = ["--model", tiny_directory]
    assert killable.run(["ingest", tmp_path / "p.txt", "-s", store, *model, "--source", "first"]) == 0, killable.said
    argv: list[object] = [*WRITERS[writer], *(model if writer != "suffix" else [])]
    argv += [tmp_path / "p.txt", "-s", store] if writer in ("generate", "ingest") else [store]
    before = snapshot(store)
    refusals = 0
    for room in (1_200, 5_000, 40_000, 200_000):
        code = killable.run(argv, room=room)
        if code == 0:
            break
        refusals += 1
        assert code == 1, killable.said
        lines = killable.said.splitlines()
        assert len(lines) == 1, killable.said
        assert lines[0].startswith("error: cannot write "), killable.said
        assert " — " in lines[0]
        assert snapshot(store) == before, f"room for {room}"
    assert refusals
    assert killable.run(argv) == 0, killable.said
    assert find_problems(store)[0] == []
    assert snapshot(store) != before


@pytest.mark.parametrize("kind", ["scann", "faiss"])
def test_a_disk_that_fills_up_under_the_ann_library(
    kind: str, tmp_path: Path, tiny_directory: Path, killable: Mortal, stocked: dict[str, Path]
) -> None:
    """The library's own file is the largest: states and keys fit, and they with a header do not."""
    store = Path(shutil.copytree(stocked[kind], tmp_path / "full.ds"))
    before = snapshot(store)
    argv = ["build-dense", store, "--replace", "--dims", 32, "--device", "cpu", "--model", tiny_directory]
    assert killable.run(argv, room=manifest_of(store).dense[0].parameters["keys"] * 32 * 4) == 1
    assert killable.said.startswith("error: cannot write "), killable.said
    assert len(killable.said.splitlines()) == 1, killable.said
    assert snapshot(store) == before
    assert killable.run(argv) == 0, killable.said
    assert find_problems(store)[0] == []


def test_the_json_of_a_strange_store_is_still_json(
    tmp_path: Path, tiny_directory: Path, tokenizer: Tokenizer, run_cli: Run
) -> None:
    """Names that are not UTF-8, or would move a terminal's cursor, come from users and file systems."""
    strange = "tiny \udcff \x1b[2J [bold]x[/bold] \n é"
    path = create_store(tmp_path / "strange.ds", Tokenizer(strange, tokenizer.fingerprint, 128, None)).path
    fill(open_store(path), [([5], [6])])
    result = run_cli("inspect", path, "--json")
    assert (result.code, result.err) == (0, "")
    assert json.loads(result.out)["tokenizer"]["name"] == strange
    shown = run_cli("inspect", path)
    assert (shown.code, shown.err) == (0, "")
    assert "[bold]x[/bold]" in shown.out
    assert "\x1b[2J" not in shown.out
