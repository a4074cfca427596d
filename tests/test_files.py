"""Files are written whole or not at all, and never where a link, a pipe or another name leads."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from specds.digests import sha256
from specds.errors import OutputError, UnsafeFile
from specds.files import (
    create,
    files_in,
    locked,
    make_directory,
    open_journal,
    open_lock,
    open_regular,
    remove_tree,
    replacing,
    target_of,
    write_atomically,
)


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    (tmp_path / "elsewhere").mkdir()
    path = tmp_path / "elsewhere" / "victim"
    path.write_text("precious")
    return path


PLANTED: dict[str, Callable[[Path, Path], object]] = {
    "a link": lambda path, victim: path.symlink_to(victim),
    "a link to nothing": lambda path, victim: path.symlink_to(victim.parent / "new"),
    "a link to itself": lambda path, victim: path.symlink_to(path.name),
    "a pipe": lambda path, victim: os.mkfifo(path),
    "a directory": lambda path, victim: path.mkdir(),
    "a device": lambda path, victim: path.symlink_to("/dev/zero"),
}
USES: dict[str, Callable[[Path], object]] = {
    "replace": lambda path: write_atomically(path, b"new"),
    "create": lambda path: create(path).close(),
    "lock": lambda path: locked(path).__enter__(),
    "wait": lambda path: locked(path, wait=True).__enter__(),
    "append": lambda path: open_journal(path).write(b"new"),
    "read": lambda path: open_regular(path).read(),
    "make": lambda path: make_directory(path / "inner", path.parent),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("planted", PLANTED)
def test_what_is_no_file_is_refused_at_once(planted: str, use: str, tmp_path: Path, victim: Path) -> None:
    if (planted, use) == ("a directory", "make"):
        return
    path = tmp_path / "thing"
    PLANTED[planted](path, victim)
    kind = stat.S_IFMT(path.lstat().st_mode)
    with pytest.raises(FileExistsError if use == "create" else UnsafeFile, match="thing"):
        USES[use](path)
    assert stat.S_IFMT(path.lstat().st_mode) == kind
    assert victim.read_text() == "precious"
    assert [one.name for one in victim.parent.iterdir()] == ["victim"]
    assert not any(one.name.endswith(".tmp") for one in tmp_path.iterdir())


def test_below_a_directory_that_the_user_named_no_link_is_followed(tmp_path: Path, victim: Path) -> None:
    real = tmp_path / "real"
    real.mkdir()
    named = tmp_path / "named"
    named.symlink_to(real)  # the user's own link
    write_atomically(named / "a", b"1", named)
    make_directory(named / "sub", named)
    with create(named / "sub" / "b", named) as file:
        file.write(b"2")
    assert files_in(named) == ["a", "sub/b"]
    assert sha256(named / "a", named) == sha256(real / "a")
    (named / "dense").symlink_to(victim.parent)
    for use in (
        lambda: write_atomically(named / "dense" / "victim", b"new", named),
        lambda: create(named / "dense" / "new", named),
        lambda: make_directory(named / "dense" / "new", named),
        lambda: open_lock(named / "dense" / "new", named),
        lambda: remove_tree(named / "dense" / "victim", named),
        lambda: files_in(named),
    ):
        with pytest.raises(UnsafeFile, match="dense"):
            use()
    remove_tree(named / "dense", named)
    assert victim.read_text() == "precious"
    assert not (named / "dense").exists()


def test_a_file_of_two_names_is_not_written_in_place_or_waited_for(tmp_path: Path, victim: Path) -> None:
    os.link(victim, tmp_path / "other")
    for use in (lambda: open_journal(tmp_path / "other"), locked(tmp_path / "other", wait=True).__enter__):
        with pytest.raises(UnsafeFile, match="another name"):
            use()
    write_atomically(tmp_path / "other", b"new")
    assert victim.read_text() == "precious"


def test_a_lock_is_not_emptied_and_excludes(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text("kept")
    with locked(tmp_path / "lock"), pytest.raises(BlockingIOError), locked(tmp_path / "lock"):
        pass
    with locked(tmp_path / "lock"):
        assert (tmp_path / "lock").read_text() == "kept"


def test_leftovers_of_the_dead_go_and_those_of_the_living_stay(tmp_path: Path) -> None:
    path = tmp_path / ("long" * 55 + ".jsonl")
    code = (
        "import os, sys, pathlib, specds.files as f\n"
        "with f.replacing(pathlib.Path(sys.argv[1])) as file:\n"
        "    file.write(b'half'); file.flush(); os._exit(9)\n"
    )
    assert subprocess.run([sys.executable, "-c", code, str(path)], check=False).returncode == 9
    (left,) = tmp_path.iterdir()
    assert left.read_text() == "half"
    alike = tmp_path / left.name.replace(left.name[-27:-11], "the-user's-own-1")
    alike.write_text("the user's")
    with replacing(path) as file:
        assert not left.exists()
        file.write(b"first")
        write_atomically(path, b"second")  # another writer of the same name: it must not sweep the first one's
    assert path.read_text() == "first"
    assert {one.name for one in tmp_path.iterdir()} == {path.name, alike.name}


def test_an_exception_leaves_the_old_file_and_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt), replacing(path) as file:
        file.write(b"half")
        raise KeyboardInterrupt
    assert path.read_text() == "old"
    assert [one.name for one in tmp_path.iterdir()] == ["file"]


def test_an_output_of_the_user_goes_through_the_users_link_and_replaces_no_device(tmp_path: Path) -> None:
    (tmp_path / "run.jsonl").write_text("old")
    (tmp_path / "latest").symlink_to("run.jsonl")
    (tmp_path / "dangling").symlink_to("new.jsonl")
    for name in ("latest", "dangling"):
        write_atomically(target_of(tmp_path / name), b"new")
        assert (tmp_path / name).is_symlink()
        assert (tmp_path / name).read_text() == "new"
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/null"), tmp_path):
        with pytest.raises(OutputError, match="not a file"):
            target_of(path)
