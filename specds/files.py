"""Writing files so that a reader sees the old or the new one, and telling whether a file is still the same."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

_BLOCK = 1 << 20
_EDGE = 1 << 16
_PROBES = 256
_PROBE = 1 << 12


def sync_directory(path: Path) -> None:
    """Make the names in a directory (a creation, a rename) survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_file(path: Path) -> None:
    """Make a finished file's bytes survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A new file beside `path` to be written; when the block ends it is synced and put in the place of `path`.

    Raises:
        OSError: the directory is not writable or the disk is full; `path` is then unchanged, as it is after any
            other exception.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        sync_file(temporary)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def write_atomically(path: Path, data: bytes) -> None:
    """Replace `path` by `data`: temp file beside it, fsync, rename, fsync of the directory.

    Raises:
        OSError: the directory is not writable or the disk is full; `path` is then unchanged.
    """
    with replacing(path) as temporary:
        temporary.write_bytes(data)


def sha256(path: Path) -> str:
    """The sha256 of a whole file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def edge_digest(path: Path) -> str:
    """sha256 over a file's first and last 64 KiB: cheap whatever the size, finds truncation and foreign headers."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        digest.update(file.read(_EDGE))
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _EDGE))
        digest.update(file.read(_EDGE))
    return digest.hexdigest()


def sampled_digest(paths: Iterable[Path]) -> str:
    """One digest over large files: for each its size, its first MiB and 256 blocks of 4 KiB spread evenly.

    Two checkpoints of one architecture differ in it as soon as any sampled weight differs; reading takes
    milliseconds, where hashing every byte of a 7B model takes a minute.
    """
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            digest.update(size.to_bytes(8, "little"))
            file.seek(0)
            digest.update(file.read(_BLOCK))
            for probe in range(_PROBES):
                file.seek(size * probe // _PROBES)
                digest.update(file.read(_PROBE))
    return digest.hexdigest()
