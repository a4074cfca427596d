"""Where specds keeps what it could make again: one rule for converted models, cost curves and compiled code.

What lies in such a place is trusted, and machine code in it runs. So it must belong to the user, or to root who may
have filled it when an image was made, and nobody else may be able to write there.
"""

from __future__ import annotations

import contextlib
import grp
import os
import pwd
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from specds.errors import Notice, OutputError

_ROOT = 0
_PRIVATE = 0o700
_MEMORY = "/dev/shm"
_NOWHERE = "/"
SUGGESTION = "set XDG_CACHE_HOME to a directory that only you can write to"


class StartUpWarning(Notice):
    """Starting takes longer than it need, and something can be done about it."""


def cache_directory(kind: str) -> Path:
    """The directory to keep a kind of thing in, made if need be.

    `$XDG_CACHE_HOME/specds/KIND`, by default `~/.cache/specds/KIND`; where that cannot be written, or others can write
    there, `specds-UID/KIND` among the temporary files.

    Raises:
        OutputError: neither will do.
    """
    for root in _roots():
        if claim(root) and claim(root / kind):
            return root / kind
    raise OutputError(
        f"there is no place to keep {kind}: neither the cache nor a temporary directory will do", SUGGESTION
    )


def cache_directories(kind: str) -> Iterator[Path]:
    """Where things of a kind may have been kept: read-only places, if any, and after them `cache_directory`."""
    for root in _roots():
        writable = claim(root) and claim(root / kind)
        if writable or (trusted(root) and trusted(root / kind)):
            yield root / kind
        if writable:
            return


def lend_cache() -> None:
    """Give the Hugging Face libraries a cache of ours where the home directory, which they take, cannot be written.

    Only before they are imported: they look once.
    """
    if "HF_HOME" in os.environ:
        return
    theirs = next((root.with_name("huggingface") for root in _roots() if root != _temporary()), None)
    # What lies in a read-only one can be read.
    if theirs is not None and (theirs.is_dir() or _can_be_made(theirs)):
        return
    with contextlib.suppress(OutputError):
        os.environ["HF_HOME"] = str(cache_directory("huggingface"))


def lend_temporary() -> None:
    """Give Python a directory for temporary files where it has none: libraries ask for one when they are imported.

    Where only memory can be written, that is it; where nothing can, a name that says so to whoever writes there.
    """
    if _temporary() is None:
        if os.access(_MEMORY, os.W_OK | os.X_OK):
            os.environ["TMPDIR"] = tempfile.tempdir = _MEMORY
        else:
            tempfile.tempdir = _NOWHERE
            # torch makes a directory when it is imported, and is content with one that is there.
            os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", _NOWHERE)


def lasts(directory: Path) -> bool:
    """Whether a cache directory is more than a temporary one."""
    temporary = _temporary()
    return temporary is None or not directory.is_relative_to(temporary)


def claim(directory: Path) -> bool:
    """Whether a directory, made if need be, can be written by this user and by nobody else but root."""
    try:
        if not directory.is_dir():
            directory.parent.mkdir(parents=True, exist_ok=True)
            directory.mkdir(mode=_PRIVATE, exist_ok=True)
    except OSError:
        return False
    return trusted(directory) and os.access(directory, os.W_OK | os.X_OK)


def trusted(directory: Path) -> bool:
    """Whether there is such a directory, this user's or root's, that nobody else can write to."""
    try:
        # Of a link, both ends: whoever may change the link decides what is found behind it.
        entry, target = directory.lstat(), directory.stat()
    except OSError:
        return False
    return entry.st_uid in (_ROOT, os.geteuid()) and is_private(target)


def is_private(status: os.stat_result) -> bool:
    """Whether this is a directory, this user's or root's, that nobody else can write to."""
    ours = stat.S_ISDIR(status.st_mode) and status.st_uid in (_ROOT, os.geteuid())
    if not ours or status.st_mode & stat.S_IWOTH:
        return False
    return not status.st_mode & stat.S_IWGRP or _is_alone_in(status.st_gid)


def _is_alone_in(group: int) -> bool:
    """Whether a group is the user's own, as most systems give each user one, and nobody else is in it."""
    try:
        name = pwd.getpwuid(os.geteuid()).pw_name
        entry = grp.getgrgid(group)
    except KeyError:
        return False
    return entry.gr_name == name and set(entry.gr_mem) <= {name}


def _can_be_made(directory: Path) -> bool:
    above = next((folder for folder in directory.parents if folder.exists()), None)
    return above is not None and above.is_dir() and os.access(above, os.W_OK | os.X_OK)


def _roots() -> Iterator[Path]:
    base = os.environ.get("XDG_CACHE_HOME") or ""
    # The XDG specification says that a relative path is to be ignored.
    if base and Path(base).is_absolute():
        yield Path(base) / "specds"
    elif (home := _home()) is not None:
        yield home / ".cache" / "specds"
    temporary = _temporary()
    if temporary is not None:
        yield temporary


def _home() -> Path | None:
    try:
        return Path.home()
    except RuntimeError:  # no HOME, and the user is not listed: as in many a container
        return None


def _temporary() -> Path | None:
    try:
        directory = Path(tempfile.gettempdir())
        # The last that Python tries is where the command runs, which is not a place for a cache.
        if directory == Path.cwd() and not any(name in os.environ for name in ("TMPDIR", "TEMP", "TMP")):
            return None
    except FileNotFoundError:  # nowhere that could be written
        return None
    return directory / f"specds-{os.geteuid()}"
