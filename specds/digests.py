"""Digests of files: of all their bytes, of their ends, or of samples."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Iterable
from pathlib import Path

from specds.files import open_regular

_BLOCK = 1 << 20
_EDGE = 1 << 16
_PROBES = 256
_PROBE = 1 << 12


def sha256(path: Path, below: Path | None = None) -> str:
    """The sha256 of a whole file, in hex; of a file of specds' own where `below` is given, see `open_regular`."""
    with _reading(path, below) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def edge_digest(path: Path, below: Path | None = None) -> str:
    """sha256 over a file's first and last 64 KiB: cheap whatever the size, finds truncation and foreign headers."""
    digest = hashlib.sha256()
    with _reading(path, below) as file:
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


def _reading(path: Path, below: Path | None) -> io.BufferedReader:
    return path.open("rb") if below is None else open_regular(path, below)
