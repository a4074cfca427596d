"""The file of a faiss index, read as faiss reads it, but checked."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from specds.datastore.ann_shape import IndexShape

_NAME = "index.faiss"
NAMES = frozenset([_NAME])
"""The names of all files that an index has."""

_CHUNK = 1 << 20  # numbers read at a time
_INNER_PRODUCT = 0
_QUANTIZERS = {"int8": 0, "half": 4}
_BITS = 8


class _Reader:
    """The bytes of a file, from front to end."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self._size, self.at = file, size, 0

    def skip(self, count: int) -> int:
        """Go past so many bytes; where they start."""
        start = self.at
        if count > self._size - start:
            raise ValueError(f"it ends after {self._size:,} bytes")
        self.at += count
        return start

    def take(self, form: str) -> tuple[Any, ...]:
        size = struct.calcsize(form)
        self._file.seek(self.skip(size))
        return struct.unpack(form, self._file.read(size))

    def integers(self, count: int) -> NDArray[np.uint64]:
        self._file.seek(self.skip(8 * count))
        return np.frombuffer(self._file.read(8 * count), "<u8")

    def expect(self, what: str, form: str, *values: Any) -> None:
        taken = self.take(form)
        if taken != values:
            raise ValueError(f"its {what} is {', '.join(map(str, taken))}, not {', '.join(map(str, values))}")

    def finish(self) -> None:
        if self.at != self._size:
            raise ValueError(f"{self._size - self.at:,} bytes too many")


@dataclass(frozen=True, slots=True)
class _Lists:
    """Where things are in a faiss file: `floats`, (offset, count) of all that are not codes; `lists`, (offset, keys)
    of each inverted list, codes of `code_size` bytes first and then ids.
    """

    floats: list[tuple[int, int]]
    lists: list[tuple[int, int]]
    code_size: int


def _lists_of(path: Path, shape: IndexShape) -> _Lists:
    """Read a faiss index as faiss's index_write.cpp writes those that `ann.build` makes: class, lists, all lengths."""
    with path.open("rb") as file:
        reader = _Reader(file, path.stat().st_size)
        rows, dims = shape.keys, shape.dims
        floats: list[tuple[int, int]] = []

        def index(fourcc: bytes, count: int) -> None:
            reader.expect("class", "<4s", fourcc)
            header = reader.take("<iqqqBi")
            if (header[0], header[1], header[4], header[5]) != (dims, count, 1, _INNER_PRODUCT):
                raise ValueError(f"it has {header[1]:,} keys of {header[0]} numbers, not {count:,} of {dims}")

        def numbers(count: int) -> None:
            reader.expect("length", "<Q", count)
            floats.append((reader.skip(4 * count), count))

        def quantizer() -> None:
            kind, _, _, wide, size, trained = reader.take("<iifQQQ")
            learned = 2 * dims if shape.kept == "int8" else 0
            if (kind, wide, size, trained) != (_QUANTIZERS[shape.kept], dims, code_size, learned):
                raise ValueError("its scalar quantizer is of another kind")
            floats.append((reader.skip(4 * trained), trained))

        products = math.gcd(dims, max(1, dims // 2))
        code_size = {"float32": 4 * dims, "half": 2 * dims, "int8": dims, "none": products}[shape.kept]
        if not shape.leaves:
            index(b"IxFI" if shape.kept == "float32" else b"IxSQ", rows)
            if shape.kept == "float32":
                numbers(rows * dims)
            else:
                quantizer()
                reader.expect("length", "<Q", rows * code_size)
                reader.skip(rows * code_size)
            reader.finish()
            return _Lists(floats, [], code_size)
        index({"float32": b"IwFl", "none": b"IwPQ"}.get(shape.kept, b"IwSq"), rows)
        cells, _ = reader.take("<QQ")
        if cells != shape.leaves:
            raise ValueError(f"it has {cells:,} cells, not {shape.leaves:,}")
        index(b"IxFI", cells)
        numbers(cells * dims)
        reader.expect("direct map", "<BQ", 0, 0)
        if shape.kept in _QUANTIZERS:
            quantizer()
            reader.expect("code size", "<Q", code_size)
            _flag(reader)
        elif shape.kept == "none":
            _flag(reader)
            reader.expect("product quantizer", "<QQQQ", code_size, dims, products, _BITS)
            numbers((1 << _BITS) * dims)
        # Lists on disk ("ilod") would name a file.
        reader.expect("kind of inverted lists", "<4sQQ", b"ilar", cells, code_size)
        lists = []
        for count in _list_sizes(reader, cells, rows):
            lists.append((reader.skip(count * (code_size + 8)), count))
        reader.finish()
        return _Lists(floats, lists, code_size)


def _flag(reader: _Reader) -> None:
    (flag,) = reader.take("<B")
    if flag > 1:
        raise ValueError(f"a truth value is {flag}")


def _list_sizes(reader: _Reader, cells: int, rows: int) -> Iterator[int]:
    form, length = reader.take("<4sQ")
    if form == b"full" and length == cells:
        sizes = reader.integers(cells)
    elif form == b"sprs" and length % 2 == 0 and length <= 2 * cells:
        pairs = reader.integers(length).reshape(-1, 2)
        if (pairs[:, 0] >= cells).any() or (np.diff(pairs[:, 0].astype(np.int64)) <= 0).any():
            raise ValueError("its inverted lists are not in order")
        sizes = pairs[:, 1]
    else:
        raise ValueError("the sizes of its inverted lists are damaged")
    if (sizes > rows).any() or int(sizes.sum()) != rows:
        raise ValueError(f"its inverted lists do not hold {rows:,} keys")
    yield from sizes.tolist()


def check_files(directory: Path, shape: IndexShape) -> None:
    """The index's class, lists and all lengths; see `ann_files.check_files`."""
    _lists_of(directory / _NAME, shape)


def check_contents(directory: Path, shape: IndexShape) -> None:
    """Every number by which faiss finds its way; see `ann_files.check_contents`."""
    path = directory / _NAME
    layout = _lists_of(path, shape)
    data = np.memmap(path, np.uint8, "r")
    seen = np.zeros(shape.keys if layout.lists else 0, np.bool_)
    for start, count in layout.lists:
        end = start + count * layout.code_size
        ids = np.frombuffer(data, "<i8", count, end) if count else np.zeros(0, np.int64)
        if count and (ids.min() < 0 or ids.max() >= shape.keys):
            raise ValueError("an inverted list names a key that there is not")
        seen[ids] = True
        if shape.kept == "float32" and not _all_finite(data, start, count * shape.dims):
            raise ValueError("it holds a value that is not a number")
    if not seen.all():
        raise ValueError("its inverted lists name a key twice")
    if not all(_all_finite(data, start, count) for start, count in layout.floats):
        raise ValueError("it holds a value that is not a number")


def _all_finite(data: NDArray[np.uint8], start: int, count: int) -> bool:
    return all(
        bool(np.isfinite(np.frombuffer(data, "<f4", min(_CHUNK, count - at), start + 4 * at)).all())
        for at in range(0, count, _CHUNK)
    )
