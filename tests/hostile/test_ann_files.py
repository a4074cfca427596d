"""Forged files of an ANN index: told from what they should be before ScaNN or faiss, which die of them, see them."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specds.caches import cache_directory
from specds.datastore import ann, trial
from specds.datastore.ann_files import check_contents
from specds.datastore.ann_shape import IndexShape
from specds.datastore.store import open_store
from specds.errors import CorruptStore, Notice, StoreError

from ..tools import Run, manifest_of, reseal

KEYS = "dense/000001/keys"
KEPT = ("float32", "half", "int8", "none")


def unit(count: int, dims: int) -> Any:
    keys = np.random.default_rng(0).normal(size=(count, dims)).astype(np.float32)
    return keys / np.linalg.norm(keys, axis=1, keepdims=True)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[str, Any]]]:
    """Indexes of either kind, with and without a partition."""
    found = {}
    for kind in ann.KINDS:
        for size, keys in (("small", unit(300, 9)), ("large", unit(20_000, 9))):
            for kept in KEPT:
                directory = tmp_path_factory.mktemp("index")
                parameters = ann.build(kind, keys, directory, leaves=100, search=25, kept=kept)
                found[f"{kind} {size} {kept}"] = directory, parameters
    return found


@pytest.mark.parametrize("kind", ann.KINDS)
def test_what_is_built_passes(kind: str, built: dict[str, tuple[Path, dict[str, Any]]], tmp_path: Path) -> None:
    """Keys so alike that cells stay empty, and very few, too."""
    for name, (directory, parameters) in built.items():
        if name.startswith(kind):
            check_contents(directory, ann.checked(directory, parameters))
    for number, (keys, leaves) in enumerate(
        [(unit(1, 9), None), (unit(2, 1), None), (unit(30, 8)[np.arange(20_000) % 30], 1_000)]
    ):
        directory = tmp_path / str(number)
        directory.mkdir()
        parameters = ann.build(kind, keys, directory, leaves=leaves)
        check_contents(directory, ann.checked(directory, parameters))
        assert len(ann.load(directory, parameters, keys.shape[1]).search(keys[0], 1)[1]) == 1


def on_text(name: str, change: Callable[[str], str]) -> Callable[[Path], None]:
    return lambda path: (path / name).write_text(change((path / name).read_text())) and None


def on_array(name: str, change: Callable[[Any], Any]) -> Callable[[Path], None]:
    def forge(path: Path) -> None:
        header = (path / name).read_bytes()[:128]
        old = np.load(path / name)
        new = np.ascontiguousarray(change(old))
        if new.shape == old.shape and new.dtype == old.dtype:
            (path / name).write_bytes(header + new.tobytes())
        else:
            np.save(path / name, new)

    return forge


def on_bytes(name: str, old: bytes, new: bytes) -> Callable[[Path], None]:
    def forge(path: Path) -> None:
        data = (path / name).read_bytes()
        assert old in data
        (path / name).write_bytes(data.replace(old, new, 1))

    return forge


def poke(at: int, new: bytes) -> Callable[[Path], None]:
    """Other bytes at a place of a faiss index; before its end where `at` is negative."""

    def forge(path: Path) -> None:
        data = bytearray((path / "index.faiss").read_bytes())
        at_ = at % len(data)
        data[at_ : at_ + len(new)] = new
        (path / "index.faiss").write_bytes(bytes(data))

    return forge


def beside(name: str) -> Callable[[Path], None]:
    return lambda path: (path / name).write_bytes(b"x") and None


def without(name: str) -> Callable[[Path], None]:
    return lambda path: (path / name).unlink()


def on_disk_lists(path: Path) -> None:
    """The same index with its lists in another file, which faiss opens by the name in the first."""
    import faiss

    index = faiss.read_index(str(path / "index.faiss"))
    lists = faiss.OnDiskInvertedLists(index.nlist, index.code_size, str(path.parent / "lists.bin"))
    lists.merge_from(index.invlists, 0)
    index.replace_invlists(lists, False)
    faiss.write_index(index, str(path / "index.faiss"))


SCANN, FAISS = "scann large float32", "faiss large float32"
# What is wrong: of which index, how, and what is said of it.
HEADERS: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "assets cut": (SCANN, on_text("scann_assets.pbtxt", lambda t: t[: t.index("}") + 2]), "list of assets"),
    "assets empty": (SCANN, on_text("scann_assets.pbtxt", lambda t: ""), "list of assets"),
    "assets twice": (SCANN, on_text("scann_assets.pbtxt", lambda t: t + t), "list of assets"),
    "assets swapped": (
        SCANN,
        on_text("scann_assets.pbtxt", lambda t: t.replace("AH_DATASET_NPY", "DATASET_NPY", 1)),
        "list of assets",
    ),
    "cells of fewer keys": (SCANN, on_array("datapoint_to_token.npy", lambda a: a[:-1]), "datapoint_to_token.npy"),
    "cells of more keys": (SCANN, on_array("datapoint_to_token.npy", lambda a: np.tile(a, 2)), "datapoint_to_token"),
    "fewer rows": (SCANN, on_array("dataset.npy", lambda a: a[:-5]), "dataset.npy"),
    "fewer hashes": (SCANN, on_array("hashed_dataset.npy", lambda a: a[:7]), "hashed_dataset.npy"),
    "wider hashes": (SCANN, on_array("hashed_dataset.npy", lambda a: np.tile(a, 2)), "hashed_dataset.npy"),
    "doubles": (SCANN, on_array("dataset.npy", lambda a: a.astype(np.float64)), "float64"),
    "bytes the other way": (SCANN, on_array("dataset.npy", lambda a: a.astype(">f4")), ">f4"),
    "columns first": (SCANN, on_array("dataset.npy", lambda a: np.asfortranarray(a)[:, :8].T), "dataset.npy"),
    "a header twice": (
        SCANN,
        on_bytes("dataset.npy", b"'shape':(20000,9,)}" + b" " * 14, b"'shape':(1,), 'shape':(20000,9,)}"),
        "dataset.npy",
    ),
    "an object": (SCANN, on_bytes("dataset.npy", b"'<f4'", b"'|O' "), "dataset.npy"),
    "a file more": (SCANN, beside("int8_dataset.npy"), "int8_dataset.npy"),
    "a pickle": (SCANN, beside("scann_docids.pkl"), "pickle"),
    "no codebook": (SCANN, without("ah_codebook.pb"), "lacks ah_codebook.pb"),
    "another index": (FAISS, poke(0, b"IxHn"), "class"),
    "more keys": (FAISS, poke(8, b"\xff"), "keys of"),
    "other dimensions": (FAISS, poke(4, b"\x0a"), "keys of"),
    "lists on disk": (FAISS, on_disk_lists, "inverted lists"),
    "a file beside": (FAISS, beside("lists.bin"), "lists.bin"),
    "bytes at the end": (FAISS, lambda path: (path / "index.faiss").open("ab").write(b"0" * 8) and None, "too many"),
}


@pytest.mark.parametrize("case", HEADERS)
def test_a_file_of_another_form_is_refused(
    case: str, built: dict[str, tuple[Path, dict[str, Any]]], tmp_path: Path
) -> None:
    name, forge, said = HEADERS[case]
    directory, parameters = built[name]
    copy = Path(shutil.copytree(directory, tmp_path / "keys"))
    forge(copy)
    for ask in (lambda: ann.load(copy, parameters, 9), lambda: ann.stored_keys(copy, parameters)):
        with pytest.raises(CorruptStore, match=said) as refusal:
            ask()
        assert str(copy) in refusal.value.message


def cells_beyond(values: Any) -> Any:
    return np.where(np.arange(len(values)) == 7, 100, values)


CONTENTS: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "a cell beyond": (SCANN, on_array("datapoint_to_token.npy", cells_beyond), "cell that there is not"),
    "a cell below": (SCANN, on_array("datapoint_to_token.npy", lambda a: a - 1), "cell that there is not"),
    "a code beyond": (SCANN, on_array("hashed_dataset.npy", lambda a: a | 16), "code that there is not"),
    "not numbers": (SCANN, on_array("dataset.npy", lambda a: a * np.nan), "not a number"),
    "halves without end": ("scann large half", on_array("bfloat16_dataset.npy", lambda a: a | 0x7F80), "not a number"),
    "multipliers": (
        "scann large int8",
        lambda path: (
            (path / "int8_multipliers.npy").write_bytes(
                (path / "int8_multipliers.npy").read_bytes()[:-4] + b"\0\0\xc0\x7f"
            )
            and None
        ),
        "not a number",
    ),
    "another configuration": ("scann small float32", on_bytes("scann_config.pb", b"DotProduct", b"SquaredL2x"), "conf"),
    "fewer centres": (
        SCANN,
        lambda path: (path / "ah_codebook.pb").write_bytes((path / "ah_codebook.pb").read_bytes()[:-19]) and None,
        "ah_codebook.pb",
    ),
    "no centres": (SCANN, lambda path: (path / "ah_codebook.pb").write_bytes(b"") and None, "codebook"),
    "no partition": (SCANN, lambda path: (path / "serialized_partitioner.pb").write_bytes(b"") and None, "partition"),
    "a leaf of another number": (
        SCANN,
        on_bytes("serialized_partitioner.pb", b"\x28\x63", b"\x28\x7f"),
        "serialized_partitioner.pb",
    ),
    "a list's key beyond": (FAISS, poke(-8, b"\xff\xff\xff\x7f"), "a key that there is not"),
    "a list's key twice": (
        FAISS,
        lambda path: poke(-16, (path / "index.faiss").read_bytes()[-8:])(path),
        "name a key twice",
    ),
    "centroids": (FAISS, poke(198, b"\0\0\xc0\x7f" * 4), "not a number"),
}


@pytest.mark.parametrize("case", CONTENTS)
def test_contents_that_lead_astray_are_refused(
    case: str, built: dict[str, tuple[Path, dict[str, Any]]], tmp_path: Path
) -> None:
    name, forge, said = CONTENTS[case]
    directory, parameters = built[name]
    copy = Path(shutil.copytree(directory, tmp_path / "keys"))
    forge(copy)
    shape = ann.checked(copy, parameters)
    with pytest.raises(ValueError, match=said):
        check_contents(copy, shape)


@pytest.mark.parametrize(
    "change",
    [{"keys": True}, {"keys": 0}, {"dims": 1 << 70}, {"leaves": 30_000}, {"leaves_searched": 3}, {"search": None},
     {"kept": "none"}, {"kept": ["half"]}, {"ann": {"scann": 1}}, {"leaves": 0}],
)  # fmt: skip
def test_parameters_that_no_index_has_are_refused(change: dict[str, Any]) -> None:
    good = {"ann": "faiss", "kept": "float32", "keys": 300, "dims": 9, "leaves": 0, "leaves_searched": 0, "search": 250}
    if change == {"leaves": 0}:
        good |= {"leaves": 100, "leaves_searched": 100}
    assert IndexShape.of(good).keys == 300
    with pytest.raises(ValueError):
        IndexShape.of(good | change)


@pytest.fixture
def elsewhere(stocked: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store with a faiss index that this machine does not know."""
    (tmp_path / "known").mkdir()
    monkeypatch.setattr(trial, "known_directory", lambda: tmp_path / "known")
    return Path(shutil.copytree(stocked["faiss"], tmp_path / "foreign.ds"))


@pytest.fixture
def deadly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """From now on, new processes that import faiss get one that does this when it reads an index."""
    import faiss

    assert faiss.__version__

    def make(what: str) -> None:
        (tmp_path / "path").mkdir()
        (tmp_path / "path" / "faiss.py").write_text(
            f"import os, signal, time\nIO_FLAG_MMAP = 0\ndef read_index(*words):\n    {what}\n"
        )
        monkeypatch.setattr(sys, "path", [str(tmp_path / "path"), *sys.path])

    return make


def test_an_index_from_elsewhere_is_tried_out_once(
    elsewhere: Path, deadly: Callable[[str], None], run_cli: Run, tiny_directory: Path
) -> None:
    """First it is opened in another process; later it is known; one byte more that differs, and it is not."""

    def decode() -> Any:
        options = ["--model", tiny_directory, "--device", "cpu", "--max-new-tokens", 4, "-q"]
        return run_cli("decode", "-p", "-", "-s", elsewhere, *options, stdin="w1 w2 w3\n")

    assert decode().code == 0
    deadly("os.kill(os.getpid(), signal.SIGSEGV)")
    assert decode().code == 0
    data = bytearray((elsewhere / KEYS / "index.faiss").read_bytes())
    data[-1] ^= 1
    (elsewhere / KEYS / "index.faiss").write_bytes(bytes(data))
    reseal(elsewhere)
    decode().refused(str(elsewhere), "ends the process that opens it (SIGSEGV)")
    run_cli("inspect", elsewhere)
    assert run_cli("verify", elsewhere).code == 0


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("time.sleep(60)", "does not open within 2 seconds"),
        ("raise RuntimeError('bad\\nindex')", "does not open as a faiss index: bad"),
        ("os._exit(7)", "exit code 7"),
    ],
)
def test_an_index_that_its_library_cannot_open_is_refused(
    what: str, said: str, elsewhere: Path, deadly: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    deadly(what)
    monkeypatch.setattr(trial, "_SECONDS", 2)
    store = open_store(elsewhere)
    segment = store.manifest.dense[0]
    for _ in range(1 + ("7" in what)):
        with pytest.raises(CorruptStore) as refusal:
            trial.require_sound(store, segment)
        assert said in refusal.value.message


def test_where_nothing_can_be_kept_it_is_tried_out_again_and_said(
    elsewhere: Path, tmp_path: Path, deadly: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder into which others may write is not to be trusted, either."""
    monkeypatch.setattr(trial, "known_directory", lambda: cache_directory("indexes"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    for folder in (tmp_path / "cache" / "specds", tmp_path / "temporary" / f"specds-{os.geteuid()}"):
        folder.mkdir(parents=True)
        folder.chmod(0o777)
    store = open_store(elsewhere)
    segment = store.manifest.dense[0]
    with pytest.warns(Notice, match="XDG_CACHE_HOME"):
        trial.require_sound(store, segment)
    deadly("os._exit(7)")
    with pytest.raises(CorruptStore):
        trial.require_sound(store, segment)
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(StoreError, match="no process can be started"):
        trial.require_sound(store, segment)


def test_an_asset_without_a_checksum_is_refused(elsewhere: Path) -> None:
    store = open_store(elsewhere)
    del store.manifest.files[f"{KEYS}/index.faiss"]
    with pytest.raises(CorruptStore, match="no checksum"):
        trial.require_sound(store, manifest_of(elsewhere).dense[0])
