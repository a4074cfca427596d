"""What a GGUF file says that it holds, checked before a library believes it.

The `gguf` package reads on where a list is longer than the file, for ever, and transformers makes room for as large a
network as the metadata says, before it looks for the weights.
"""

from __future__ import annotations

import math
import mmap
import struct
from pathlib import Path
from typing import Any

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
# Bytes of the types of values; strings and lists say how long they are.
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _LIST = 8, 9
# How many layers there are; transformers makes a list as long.
_LAYERS = b".block_count"
_INTEGERS = {4: "<I", 5: "<i", 10: "<Q", 11: "<q"}
_MOST_DIMENSIONS = 4
# The smallest type of weights takes more than a bit for each.
_MOST_A_BYTE = 8


def weights_in(path: Path) -> int:
    """How many numbers a file's tensors hold, by a walk through its whole header.

    Raises:
        ValueError: it is damaged, of a version that is not read, or describes more layers than it has tensors.
        OSError: it cannot be read.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            return _Header(data).weights()
        except struct.error:
            raise ValueError("it ends within its header") from None


class _Header:
    def __init__(self, data: mmap.mmap) -> None:
        self._data, self._at = data, 0

    def weights(self) -> int:
        magic, version = self._take("<4sI")
        if magic != MAGIC or version not in _VERSIONS:
            raise ValueError("it is no GGUF file of version 2 or 3")
        tensors, values = self._take("<QQ")
        for _ in range(self._possible(values)):
            key = self._string()
            (kind,) = self._take("<I")
            if key.endswith(_LAYERS) and kind in _INTEGERS:
                (layers,) = struct.unpack_from(_INTEGERS[kind], self._data, self._at)
                if layers > tensors:
                    raise ValueError(f"it describes {layers:,} layers, and has {tensors:,} tensors")
            self._pass_value(kind)
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
        return weights

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

    def _string(self) -> bytes:
        begin = self._at + 8
        self._pass_string()
        return self._data[begin : self._at]

    def _pass_string(self) -> None:
        self._pass(*self._take("<Q"))

    def _take(self, layout: str) -> tuple[Any, ...]:
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
