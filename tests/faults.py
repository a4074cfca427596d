"""Crashes at every point where a command changes files: before each call, and in the middle of each file's bytes."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_DIED = 86
_FAILED = 1
_SECONDS = 120
_EVENTS = ("os.rename", "os.remove", "os.link", "os.symlink", "os.mkdir", "os.rmdir", "os.truncate", "shutil.rmtree")


@dataclass(frozen=True, slots=True)
class Point:
    """Where a process died.

    Attributes:
        call: before its so many-th call that changes a file or makes a change last; None: at `size`.
        size: when a file was to grow beyond so many bytes, in whatever library wrote it; None: at `call`.
    """

    call: int | None = None
    size: int | None = None


def crash_points(prepare: Callable[[], object], command: Callable[[], object], root: Path) -> Iterator[Point]:
    """Run a command again and again, each time in a process that dies at another point.

    Points are before each open for writing, rename or replace, unlink, link, mkdir, rmdir, truncate of something
    below `root`, and each fsync; then, for each size of a file that the whole run leaves below `root`, with the
    first byte of such a file written, half of it, and all but the last one. What a process wrote before it died
    stays, but for what Python's own buffers held, as with kill -9.

    Args:
        prepare: makes the state that each run starts from; called in this process before each.
        command: what is run, in a fork of this process; what it needs is best imported and compiled before.
        root: where the files are.

    Yields:
        the point, after the process died there and before the next `prepare`.

    Raises:
        AssertionError: a run ended in another way than by dying where it should.
    """
    call = 0
    while True:
        call += 1
        prepare()
        before = _sizes(root)
        code = _run(command, root, call, None)
        if code == 0:
            break
        assert code == _DIED, f"the command failed by itself before change {call}: {code}"
        yield Point(call=call)
    assert call > 1, "the command changes no file"
    written = {size for path, size in _sizes(root).items() if before.get(path) != size}
    for limit in sorted({part for size in written for part in (1, size // 2, size - 1) if 0 < part < size}):
        prepare()
        code = _run(command, root, None, limit)
        # A limit that only a replaced file of the same name would reach is none.
        if code == 0:
            continue
        assert code == -signal.SIGXFSZ, f"the command failed by itself with files of {limit} bytes: {code}"
        yield Point(size=limit)


def _sizes(root: Path) -> dict[Path, int]:
    return {path: path.stat().st_size for path in root.rglob("*") if path.is_file()}


def _run(command: Callable[[], object], root: Path, call: int | None, size: int | None) -> int:
    """The exit code of a command in a process of its own; that of a signal is negative."""
    child = os.fork()
    if child == 0:
        code = _FAILED
        try:
            signal.alarm(_SECONDS)
            null = os.open(os.devnull, os.O_RDWR)
            for stream in (0, 1, 2):
                os.dup2(null, stream)
            if size is not None:
                signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
                resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
            if call is not None:
                _die_before(call, str(root))
            with contextlib.suppress(BaseException):
                command()
                code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _die_before(wanted: int, root: str) -> None:
    """End this process before the n-th thing that it does to a file below root. An audit hook sees all that goes
    through Python, however it is called; fsync, which has no event, is wrapped."""
    count = 0

    def happens() -> None:
        nonlocal count
        count += 1
        if count == wanted:
            os._exit(_DIED)

    def below(path: object) -> bool:
        # A name without a directory is looked up in one that is open.
        return isinstance(path, str | Path) and (str(path).startswith(root) or not Path(path).is_absolute())

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, mode, flags = arguments
            writes = isinstance(mode, str) and set(mode) & set("wax+")
            writes = writes or flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            if writes and below(path):
                happens()
        elif event in _EVENTS and any(map(below, arguments[:2])):
            happens()

    sync = os.fsync

    def fsync(handle: int) -> None:
        happens()
        sync(handle)

    os.fsync = fsync
    sys.addaudithook(audit)
