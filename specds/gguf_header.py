"""What a GGUF file says that it holds, checked before a library believes it.

The `gguf` package reads on where a list is longer than the file, for ever, and transformers makes room for as large a
network as the metadata says, before it looks for the weights.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
# Bytes of the types of values; strings and lists say how long they are.
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _LIST = 8, 9
_MOST_DIMENSIONS = 4
# The smallest type of weights takes more than a bit for each.
_MOST_A_BYTE = 8


@dataclass(frozen=True, slots=True)
class Contents:
    """The tensors of a file.

    Attributes:
        tensors: how many there are.
        weights: numbers in all of them.
    """

    tensors: int
    weights: int


def read_contents(path: Path) -> Contents:
    """What tensors a file holds, by a walk through its whole header.

    Raises:
        ValueError: it is damaged, or of a version that is not read.
        OSError: it cannot be read.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            return _Header(data).contents()
        except struct.error:
            raise ValueError("it ends within its header") from None


class _Header:
    def __init__(self, data: mmap.mmap) -> None:
        self._data, self._at = data, 0

    def contents(self) -> Contents:
        magic, version = self._take("<4sI")
        if magic != MAGIC or version not in _VERSIONS:
            raise ValueError("it is no GGUF file of version 2 or 3")
        tensors, values = self._take("<QQ")
        for _ in range(self._possible(values)):
            self._pass_string()
            self._pass_value(*self._take("<I"))
        weights = 0
        for _ in range(self._possible(tensors)):
            self._pass_string()
            (dimensions,) = self._take("<I")
            if dimensions > _MOST_DIMENSIONS:
                raise ValueError(f"a tensor has {dimensions} dimensions")
            weights += math.prod(self._take(f"<{dimensions}Q"))
            self._take("<IQ")  # type and offset
        if weights > _MOST_A_BYTE * len(self._data):
            raise ValueError("its tensors are larger than the file")
        return Contents(tensors, weights)

    def _pass_value(self, kind: int) -> None:
        if kind == _STRING:
            self._pass_string()
        elif kind == _LIST:
            inner, count = self._take("<IQ")
            if inner == _STRING:
                for _ in range(self._possible(count)):
                    self._pass_string()
            else:
                self._pass(self._size(inner) * count)
        else:
            self._pass(self._size(kind))

    def _pass_string(self) -> None:
        self._pass(*self._take("<Q"))

    def _take(self, layout: str) -> tuple[int, ...]:
        taken = struct.unpack_from(layout, self._data, self._at)
        self._at += struct.calcsize(layout)
        return taken

    def _pass(self, count: int) -> None:
        self._at += count
        self._possible(0)

    def _possible(self, count: int) -> int:
        """Nothing takes less than a byte."""
        if count > len(self._data) - self._at:
            raise ValueError("it says to hold more than it has bytes")
        return count

    @staticmethod
    def _size(kind: int) -> int:
        if kind not in _SIZES:
            raise ValueError(f"a value is of the unknown type {kind}")
        return _SIZES[kind]
