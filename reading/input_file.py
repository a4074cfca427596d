"""A file that is read: whether it can be, what it is called in messages, and its bytes, unpacked."""

from __future__ import annotations

import gzip
import io
import os
import re
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, cast

from specds.errors import InputError

STDIN = "-"

PACKED = (".gz", ".zst")
"""Name endings of files that are unpacked as they are read."""

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"


def unpacked(path: str) -> str:
    """A file's name without the ending that says how it is packed: "a.jsonl" for "a.jsonl.gz"."""
    return next((path[: -len(ending)] for ending in PACKED if path.lower().endswith(ending)), path)


def check_file(path: str, *, missing: str = "check the path") -> None:
    """Refuse what cannot be opened as a file, without opening it: a named pipe can be opened only once.

    Args:
        path: a file, or "-".
        missing: the hint where there is no such file.

    Raises:
        InputError: no such file, an address on another machine, a directory, or no permission.
    """
    if path == STDIN:
        return
    try:
        mode = Path(path).stat().st_mode
    except (OSError, ValueError) as error:
        if address := _URL.match(path):
            raise _elsewhere(path, address[0]) from error
        if isinstance(error, FileNotFoundError):
            raise InputError(f"{shown(path)}: no such file", missing) from error
        raise unreadable(path, error) from error
    if stat.S_ISDIR(mode):
        raise InputError(f"{shown(path)} is a directory", f"pass files or a glob: {shown(path).rstrip('/')}/*.jsonl")
    if not os.access(path, os.R_OK):
        raise InputError(f"{shown(path)} cannot be read: permission denied", "check its permissions")


def shown(path: str) -> str:
    """A path that can be printed, on one line, whatever bytes it holds."""
    if path == STDIN:
        return "stdin"
    if not path:
        return "''"
    return path if path.isprintable() else ascii(path)[1:-1]


@contextmanager
def opened(path: str) -> Iterator[IO[bytes]]:
    """A file's bytes, unpacked where its name or its first bytes say that it is packed."""
    if path == STDIN:
        if sys.stdin is None:
            raise InputError("stdin is closed", "pass a file, or pipe prompts in")
        buffer = sys.stdin.buffer
        if not isinstance(buffer, io.BufferedReader):
            yield buffer
            return
        # Python ends with an error of its own where a thread still waits in the buffer of sys.stdin.
        yield _unpacking(path, open(buffer.fileno(), "rb", closefd=False))  # noqa: SIM115
        return
    check_file(path)
    try:
        stream = Path(path).open("rb")  # noqa: SIM115
    except OSError as error:
        raise unreadable(path, error) from error
    with stream:
        yield _unpacking(path, stream)


def _unpacking(path: str, stream: io.BufferedReader) -> IO[bytes]:
    try:
        head = stream.peek(len(_ZSTD))
    except OSError as error:
        raise unreadable(path, error) from error
    if path.lower().endswith(".gz") or head.startswith(_GZIP):
        return cast(IO[bytes], gzip.GzipFile(fileobj=stream))
    if path.lower().endswith(".zst") or head.startswith(_ZSTD):
        import pyarrow as pa

        return io.BufferedReader(pa.CompressedInputStream(stream, "zstd"))
    return stream


def _elsewhere(path: str, scheme: str) -> InputError:
    hint = "download it and pass the file"
    if scheme.lower() == "hf://":
        hint += "; `specds ingest owner/name` reads a data set of the hub"
    return InputError(f"{shown(path)}: nothing is read over {scheme}", hint)


def unreadable(path: str, error: Exception) -> InputError:
    """What is said of a file that the system does not let us read."""
    return InputError(f"{shown(path)} cannot be read: {reason(error)}", "check the path and the file")


def reason(error: Exception) -> str:
    """The first line of what an error says, without Python's errno notation."""
    text = (isinstance(error, OSError) and error.strerror) or str(error).strip() or type(error).__name__
    return text.splitlines()[0]
