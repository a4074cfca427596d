"""Where things are kept that could be made again, and whom that place must belong to."""

from __future__ import annotations

import importlib.util
import os
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from specds.caches import StartUpWarning, cache_directories, cache_directory, lend_temporary
from specds.errors import OutputError

NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """The user's cache, and the directory among temporary files that stands in for it."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "specds", temporary / f"specds-{os.geteuid()}"


def test_a_cache_is_made_for_its_user_alone(places: tuple[Path, Path]) -> None:
    user, _ = places
    before = os.umask(0)
    try:
        assert cache_directory("models") == user / "models"
    finally:
        os.umask(before)
    assert (user.stat().st_mode & 0o777, (user / "models").stat().st_mode & 0o777) == (0o700, 0o700)
    assert list(cache_directories("models")) == [user / "models"]


def _a_file(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("")


def _open_to_all(path: Path) -> None:
    path.mkdir(parents=True)
    path.chmod(0o777)


def _open_to_a_group(path: Path) -> None:
    path.mkdir(parents=True)
    path.chmod(0o770)
    os.chown(path, -1, NOBODY)


def _another_users(path: Path) -> None:
    path.mkdir(parents=True)
    os.chown(path, NOBODY, NOBODY)


def _another_users_link(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    (path.parent / "aside").mkdir(exist_ok=True)
    path.symlink_to("aside")
    os.lchown(path, NOBODY, NOBODY)


@pytest.mark.parametrize(
    "plant",
    [
        _a_file,
        _open_to_all,
        pytest.param(_open_to_a_group, marks=needs_root),
        pytest.param(_another_users, marks=needs_root),
        pytest.param(_another_users_link, marks=needs_root),
    ],
)
@pytest.mark.parametrize("inner", [False, True])
def test_what_others_could_write_to_is_neither_read_nor_written(
    plant: Callable[[Path], None], inner: bool, places: tuple[Path, Path]
) -> None:
    user, temporary = places
    plant(user / "compiled" if inner else user)
    assert cache_directory("compiled") == temporary / "compiled"
    assert list(cache_directories("compiled")) == [temporary / "compiled"]
    plant(temporary / "models")
    if inner:
        plant(user / "models")
    with pytest.raises(OutputError) as refused:
        cache_directory("models")
    assert "XDG_CACHE_HOME" in refused.value.hint


def test_a_user_without_a_home_has_a_cache(places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/dev/null")
    assert cache_directory("models") == places[1] / "models"


def test_a_machine_without_room_for_temporary_files_is_lent_some(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Libraries ask where such files go when they are imported, and raise where Python knows no place."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/dev/null"])
    for name in ("TMPDIR", "TEMP", "TMP"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/")
    with pytest.raises(FileNotFoundError):
        tempfile.gettempdir()
    lend_temporary()
    assert Path(tempfile.gettempdir()).is_dir()


SOURCE = """
from specds.jit import compiled

@compiled
def doubled(number):
    return 2 * number
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package with a compiled function."""
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "sums.py").write_text(SOURCE)
    return tmp_path / "package"


def started(package: Path) -> ModuleType:
    """The module, imported by a new start."""
    from specds import jit

    jit._places.cache_clear()
    jit._warn.cache_clear()
    spec = importlib.util.spec_from_file_location("sums", package / "sums.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def loaded(package: Path) -> bool:
    """Call the function; whether its machine code was there already."""
    doubled = started(package).doubled
    assert doubled(21) == 42
    return bool(doubled.stats.cache_hits) and not doubled.stats.cache_misses


def test_machine_code_is_kept_beside_the_source(package: Path, places: tuple[Path, Path]) -> None:
    assert not loaded(package)
    assert list((package / "__pycache__").glob("sums.doubled-*.nbi"))
    assert loaded(package)
    assert not any(place.exists() for place in places)


def test_machine_code_is_not_taken_from_where_anyone_can_put_it(package: Path, places: tuple[Path, Path]) -> None:
    assert not loaded(package)
    (package / "__pycache__").chmod(0o777)
    assert not loaded(package)
    assert len(list(places[0].glob("compiled/*/sums.doubled-*.nbc"))) == 1
    assert loaded(package)
    (folder,) = places[0].glob("compiled/*")
    folder.chmod(0o777)
    with pytest.warns(StartUpWarning):
        assert not loaded(package)


def test_machine_code_that_can_be_kept_only_for_a_while_is_said_once(
    package: Path, places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    (package / "__pycache__").mkdir()
    (package / "__pycache__").chmod(0o777)
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    with pytest.warns(StartUpWarning, match="XDG_CACHE_HOME") as said:
        assert not loaded(package)
    assert len(said) == 1
    assert str(places[1] / "compiled") in str(said[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert loaded(package)  # which costs nothing
    places[1].chmod(0o777)
    for _ in range(2):
        with pytest.warns(StartUpWarning, match="nowhere"):
            assert not loaded(package)


@pytest.mark.parametrize("suffix", ["nbi", "nbc"])
@pytest.mark.parametrize("data", [b"", b"\x80", b"not a pickle"])
def test_damaged_machine_code_is_compiled_again(
    suffix: str, data: bytes, package: Path, places: tuple[Path, Path]
) -> None:
    assert not loaded(package)
    for path in (package / "__pycache__").glob(f"*.{suffix}"):
        path.write_bytes(data if suffix == "nbi" or data else path.read_bytes()[:100])
    assert not loaded(package)
    assert loaded(package)
