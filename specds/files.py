"""Every file that specds writes, locks or makes: whole or not at all, and never somewhere else.

What lies in a store, a result or a cache is specds' own, and may have been put there by somebody else: it is a regular
file or a real directory, or it is refused. Functions take `below`, a directory that the user named, links in whose own
path are the user's; below it none is followed, because names are looked up from one open directory to the next, and
what was checked is what is used. Pipes and devices are refused without being opened. An output file that the user named
is the user's to link: see `target_of`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import io
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from specds.errors import OutputError, UnsafeFile

_BLOCK = 1 << 20
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_PLAIN = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_MODE = 0o666
_TEMPORARY = ".specds.tmp"
_RANDOM_BYTES = 8
# Names may have 255 bytes; this much is left of one for the rest of a temporary's.
_LONGEST_STEM = 200
_REFUSED = "do not trust what it lies in, or remove it"


@contextlib.contextmanager
def directory(path: Path, below: Path | None = None) -> Iterator[int]:
    """A descriptor of a directory, in which names are looked up whatever becomes of its path.

    Args:
        below: from here on no link is followed; None: the path is the user's, who may have put links into it.

    Raises:
        UnsafeFile: something below `below` is a link, or no directory. OSError: it is not there, or not for us.
    """
    with _naming(path):
        handle = os.open(path if below is None else below, _DIRECTORY)
    at = path if below is None else below
    try:
        for part in () if below is None else path.relative_to(below).parts:
            at = at / part
            with _naming(at):
                _require(stat.S_ISDIR, at, _status(part, handle), "a directory")
                inner = os.open(part, _DIRECTORY | os.O_NOFOLLOW, dir_fd=handle)
            os.close(handle)
            handle = inner
        yield handle
    finally:
        os.close(handle)


def create(path: Path, below: Path | None = None) -> io.BufferedRandom:
    """A new file to write to and read from.

    Raises:
        UnsafeFile: as `directory`. FileExistsError: something has that name, be it a link to nothing.
    """
    with directory(path.parent, below) as place, _naming(path):
        return _create(path.name, place)


@contextlib.contextmanager
def replacing(path: Path, below: Path | None = None) -> Iterator[io.BufferedRandom]:
    """A new file to be written; when the block ends it is synced and put in the place of `path`.

    Until then it lies beside `path`, under a name that nobody can foresee, and locked; those of processes that died on
    the way are removed on this occasion.

    Raises:
        UnsafeFile: what `path` names now is not a regular file, or as `directory`.
        OSError: the directory is not writable or the disk is full. `path` is then unchanged, as it is after any other
            exception.
    """
    with directory(path.parent, below) as place:
        with _naming(path):
            if (now := _status(path.name, place)) is not None:
                _require(stat.S_ISREG, path, now, "a regular file")
            _sweep(path.name, place)
            name, file = _temporary(path.name, place)
        try:
            with file:
                yield file
                with _naming(path):
                    file.flush()
                    os.fsync(file.fileno())
                    os.replace(name, path.name, src_dir_fd=place, dst_dir_fd=place)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=place)
            raise
        os.fsync(place)


def write_atomically(path: Path, data: bytes, below: Path | None = None) -> None:
    """Replace `path` by `data`: a reader sees the old file or the new one. Raises: as `replacing`."""
    with replacing(path, below) as file:
        file.write(data)


def open_regular(path: Path, below: Path | None = None) -> io.BufferedReader:
    """A file of specds' own to read; it is neither made nor waited for.

    Raises:
        UnsafeFile: it is not a regular file, or as `directory`. OSError: it is not there, or not for us.
    """
    return os.fdopen(_open(path, below, os.O_RDONLY), "rb")


def open_journal(path: Path, below: Path | None = None) -> io.BufferedRandom:
    """A file to be read and appended to; made if need be.

    Raises:
        UnsafeFile: it is not a regular file, has another name besides, or as `directory`.
    """
    handle = _open(path, below, os.O_RDWR | os.O_APPEND | os.O_CREAT)
    file = os.fdopen(handle, "a+b")
    try:
        # Written in place, it would change whatever else it is.
        _require_single(path, handle)
    except BaseException:
        file.close()
        raise
    return file


def open_lock(path: Path, below: Path | None = None, access: int = os.O_RDWR | os.O_CREAT) -> int:
    """A file that is only there to be locked; nothing is ever written to it. Closing the descriptor gives it back.

    Raises:
        UnsafeFile: it is not a regular file, or as `directory`. OSError: it cannot be made or opened.
    """
    return _open(path, below, access)


@contextlib.contextmanager
def locked(path: Path, below: Path | None = None, *, wait: bool = False) -> Iterator[None]:
    """While this lasts no other process has the lock of this name; that of a dead one does not count.

    Raises:
        BlockingIOError: another one has it, and `wait` is not set.
        UnsafeFile: as `open_lock`; or it has another name besides, so that waiting for it might never end.
    """
    handle = open_lock(path, below)
    try:
        if wait:
            _require_single(path, handle)
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield
    finally:
        os.close(handle)


def link(old: Path, new: Path, below: Path) -> None:
    """Give a file of specds' own, which never changes, a second name; where links are not possible, a copy.

    Raises:
        UnsafeFile: `old` is not a regular file, or as `directory`. FileExistsError: `new` is there.
    """
    with directory(old.parent, below) as source, directory(new.parent, below) as place:
        _require(stat.S_ISREG, old, _status(old.name, source), "a regular file")
        try:
            os.link(old.name, new.name, src_dir_fd=source, dst_dir_fd=place, follow_symlinks=False)
        except OSError:
            copy(old, new, old_below=below, below=below)


def copy(old: Path, new: Path, *, old_below: Path, below: Path) -> None:
    """A new file with the contents of another one of specds' own. Raises: as `open_regular` and `create`."""
    with open_regular(old, old_below) as source, create(new, below) as file:
        shutil.copyfileobj(source, file, _BLOCK)


def make_directory(path: Path, below: Path | None = None, *, new: bool = False) -> None:
    """Make a directory in one that is there.

    Args:
        new: it must not be there yet.

    Raises:
        UnsafeFile: something else has that name, or as `directory`. FileExistsError: it is there, and must be new.
    """
    with directory(path.parent, below) as place, _naming(path):
        try:
            os.mkdir(path.name, dir_fd=place)
        except FileExistsError:
            if new:
                raise
            _require(stat.S_ISDIR, path, _status(path.name, place), "a directory")


def remove_tree(path: Path, below: Path | None = None) -> None:
    """Remove a file, a link or a directory with all that is in it, if there is one; no link is followed.

    Raises:
        UnsafeFile: as `directory`. OSError: it cannot be removed.
    """
    with contextlib.suppress(FileNotFoundError), directory(path.parent, below) as place, _naming(path):
        now = os.stat(path.name, dir_fd=place, follow_symlinks=False)
        if stat.S_ISDIR(now.st_mode):
            shutil.rmtree(path.name, dir_fd=place)
        else:
            os.unlink(path.name, dir_fd=place)


def files_in(path: Path, below: Path | None = None) -> list[str]:
    """The names of all files in a directory and those in it, relative to it, in order; no file is opened.

    Raises:
        UnsafeFile: there is something that is neither a regular file nor a directory.
        OSError: a directory cannot be read.
    """
    names: list[str] = []
    waiting = [path]
    while waiting:
        at = waiting.pop()
        try:
            with directory(at, path if below is None else below) as place, os.scandir(place) as entries:
                kinds = [(entry.name, _kind(entry)) for entry in entries]
        except (FileNotFoundError, PermissionError):
            if at == path:
                raise
            continue  # a writer has removed it since, or it hides its files from us
        for name, kind in kinds:
            if kind == stat.S_IFDIR:
                waiting.append(at / name)
            elif kind == stat.S_IFREG:
                names.append((at / name).relative_to(path).as_posix())
            elif kind is not None:
                raise UnsafeFile(f"{at / name} is {_said(kind)}, not a regular file or a directory", _REFUSED)
    return sorted(names)


def target_of(path: Path) -> Path:
    """Where a file that the user named is to be put: what the user's own links to it lead to.

    Raises:
        OutputError: there is something that a finished file cannot take the place of.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        mode = stat.S_IFREG
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror or error}", "choose another path") from error
    if not stat.S_ISREG(mode):
        raise OutputError(f"cannot write {path}: it is not a file", "choose the path of a file")
    return Path(os.path.realpath(path))


def sync_directory(path: Path) -> None:
    """Make the names in a directory (a creation, a rename) survive a power cut."""
    with directory(path) as handle:
        os.fsync(handle)


def sync_file(path: Path, below: Path | None = None) -> None:
    """Make a finished file's bytes survive a power cut."""
    with open_regular(path, below) as file:
        os.fsync(file.fileno())


def _open(path: Path, below: Path | None, access: int) -> int:
    """A descriptor of a regular file; looked at before it is opened, which of a device may change something."""
    with directory(path.parent, below) as place, _naming(path):
        now = _status(path.name, place)
        if now is not None:
            _require(stat.S_ISREG, path, now, "a regular file")
        try:
            handle = os.open(path.name, access | _PLAIN, _MODE, dir_fd=place)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise UnsafeFile(f"{path} is a symbolic link, not a regular file", _REFUSED) from error
            raise
        try:
            _require(stat.S_ISREG, path, os.fstat(handle), "a regular file")
        except BaseException:
            os.close(handle)
            raise
        return handle


def _create(name: str, place: int) -> io.BufferedRandom:
    handle = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | _PLAIN, _MODE, dir_fd=place)
    return os.fdopen(handle, "w+b")


def _temporary(name: str, place: int) -> tuple[str, io.BufferedRandom]:
    """A new file that is locked as long as it is open, so that everybody can tell whether its owner lives."""
    while True:
        temporary = f"{_stem(name)}{secrets.token_hex(_RANDOM_BYTES)}{_TEMPORARY}"
        file = _create(temporary, place)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()  # it was swept before it was locked
            continue
        except OSError:
            return temporary, file  # no locks here: nobody can sweep it either
        if os.fstat(file.fileno()).st_nlink:
            return temporary, file
        file.close()


def _sweep(name: str, place: int) -> None:
    left = re.compile(re.escape(_stem(name)) + f"[0-9a-f]{{{2 * _RANDOM_BYTES}}}" + re.escape(_TEMPORARY))
    with os.scandir(place) as entries:
        leftovers = [
            entry.name for entry in entries if left.fullmatch(entry.name) and entry.is_file(follow_symlinks=False)
        ]
    for leftover in leftovers:
        with contextlib.suppress(OSError):
            handle = os.open(leftover, os.O_RDWR | _PLAIN, dir_fd=place)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(leftover, dir_fd=place)
            finally:
                os.close(handle)


def _stem(name: str) -> str:
    encoded = os.fsencode(name)
    return f".{name}." if len(encoded) <= _LONGEST_STEM else f".{hashlib.sha256(encoded).hexdigest()}."


def _status(name: str, place: int) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=place, follow_symlinks=False)
    except FileNotFoundError:
        return None


def _kind(entry: os.DirEntry[str]) -> int | None:
    """S_IFDIR and the like, without asking the disk where the directory says it; None: it is gone."""
    if entry.is_symlink():
        return stat.S_IFLNK
    if entry.is_file(follow_symlinks=False):
        return stat.S_IFREG
    if entry.is_dir(follow_symlinks=False):
        return stat.S_IFDIR
    try:
        return stat.S_IFMT(entry.stat(follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return None


def _require(kind: Callable[[int], bool], path: Path, status: os.stat_result | None, wanted: str) -> None:
    if status is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    if not kind(status.st_mode):
        raise UnsafeFile(f"{path} is {_said(stat.S_IFMT(status.st_mode))}, not {wanted}", _REFUSED)


def _require_single(path: Path, handle: int) -> None:
    if os.fstat(handle).st_nlink > 1:
        raise UnsafeFile(f"{path} is a file that has another name, too", "remove it: it is made anew")


def _said(kind: int) -> str:
    return {
        stat.S_IFLNK: "a symbolic link",
        stat.S_IFDIR: "a directory",
        stat.S_IFREG: "a file",
        stat.S_IFIFO: "a pipe",
        stat.S_IFSOCK: "a socket",
    }.get(kind, "a device")


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """The operating system knows only a last name here; its refusals are to name the path."""
    try:
        yield
    except OSError as error:
        if error.errno is not None:
            error.filename, error.filename2 = str(path), None
        raise
