"""What a Parquet file says of itself, read without Arrow: its footer, and the header in front of each page.

Arrow's own objects for a footer cannot be asked about one from elsewhere: they end the process where it does not hold
together (pyarrow 26: `RowGroupMetaData.column`, of a column whose size statistics do not fit its type). And Arrow takes
some hundred times as many bytes for a footer as it has. So it is read here first, and what Arrow would read otherwise
than it is read here (a field that stands twice, or is of another type, a number of more than 32 bits) is refused.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO, Any

from specds.parquet import TooLarge

_MAGIC = b"PAR1"
_TAIL = 8  # bytes: the footer's length, and the magic
_HEADER = 1 << 12
_LONGEST_HEADER = 1 << 20
_DEEPEST = 60
_MOST_FIELDS = 1_000  # of a page's header

# Kinds of values in Thrift's compact protocol.
_TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = range(1, 13)
_COUNT = -1  # of a list, only how many elements it has

_Shape = Any
"""What is wanted of a value: its kind, {field: shape} of a struct, [shape] of a list, or `_COUNT`."""

# Fields by their numbers in parquet.thrift.
_COLUMN: _Shape = {1: _I32, 2: [_I32], 3: [_BINARY], 5: _I64, 7: _I64, 9: _I64, 11: _I64}
_CHUNK: _Shape = {3: _COLUMN, 8: {}, 9: _BINARY}
_GROUP: _Shape = {1: [_CHUNK], 3: _I64}
_FOOTER: _Shape = {2: _COUNT, 3: _I64, 4: [_GROUP], 8: {}}
_PAGE: _Shape = {1: _I32, 2: _I32, 3: _I32, 5: {1: _I32, 2: _I32}, 7: {1: _I32, 2: _I32}, 8: {1: _I32, 4: _I32}}
# Each kind of page that holds values: the field of its own header, and of the encoding in that.
_DATA, _DICTIONARY, _DATA_2 = 0, 2, 3
_OWN = {_DATA: (5, 2), _DICTIONARY: (7, 2), _DATA_2: (8, 4)}


@dataclass(frozen=True, slots=True)
class Column:
    """What the footer says of one column in one row group.

    Attributes:
        path: its names, from the top down, with dots between them.
        kind: its physical type, as a number of parquet.thrift.
        encodings: those of its pages, as numbers of parquet.thrift.
        values: how many there are; empty lists and nulls count as one.
        start, end: bytes of the file that its pages take.
    """

    path: str
    kind: int
    encodings: tuple[int, ...]
    values: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Rows, and the columns that hold them."""

    rows: int
    columns: tuple[Column, ...]


@dataclass(frozen=True, slots=True)
class Footer:
    """The end of a file, which says what is in it.

    Attributes:
        rows: in all row groups.
        groups: the row groups.
    """

    rows: int
    groups: tuple[RowGroup, ...]


@dataclass(frozen=True, slots=True)
class Page:
    """The header of a page.

    Attributes:
        start, end: bytes of the file that the page takes behind its header.
        unpacked: bytes that it says to take unpacked.
        values: how many it holds; None: it is of a kind that holds none.
        encoding: of the values, as a number of parquet.thrift.
        dictionary: whether the values are a dictionary of those that follow.
    """

    start: int
    end: int
    unpacked: int
    values: int | None
    encoding: int
    dictionary: bool


def read_footer(stream: IO[bytes], *, most_bytes: int, most_columns: int) -> Footer:
    """The footer of a file; the stream's position changes.

    Args:
        stream: the file.
        most_bytes: of the footer.
        most_columns: of the file, in all row groups.

    Raises:
        TooLarge: there are more.
        ValueError: it is not a Parquet file, is encrypted, or its footer is damaged.
    """
    end = stream.seek(0, os.SEEK_END)
    stream.seek(max(0, end - _TAIL))
    tail = stream.read(_TAIL)
    size = int.from_bytes(tail[:4], "little")
    if len(tail) < _TAIL or tail[4:] != _MAGIC or size > end - _TAIL - len(_MAGIC):
        raise ValueError("it does not end as a Parquet file does")
    if size > most_bytes:
        raise TooLarge(f"a footer of {size:,} bytes")
    edge = end - _TAIL - size
    stream.seek(edge)
    try:
        reader = _Thrift(stream.read(size), "the footer is damaged", most_columns=most_columns)
        fields = reader.struct(_FOOTER)
    except IndexError:
        raise ValueError("the footer is damaged") from None
    if 8 in fields:
        raise ValueError("it is encrypted")
    names: dict[tuple[bytes, ...], str] = {}
    groups = tuple(
        RowGroup(_natural(group, 3), tuple(_column(chunk, edge, names) for chunk in group.get(1, ())))
        for group in fields.get(4, ())
    )
    rows = _natural(fields, 3)
    if rows != sum(group.rows for group in groups):
        raise ValueError("the footer is damaged: the row groups do not make up its rows")
    return Footer(rows, groups)


def _column(chunk: dict[int, Any], edge: int, names: dict[tuple[bytes, ...], str]) -> Column:
    about = chunk.get(3)
    if about is None or 8 in chunk or 9 in chunk:
        raise ValueError("a column is encrypted")
    path = tuple(about.get(3, ()))
    if path not in names:
        names[path] = b".".join(path).decode()
    # As Arrow finds the first page.
    start = _natural(about, 9)
    if 11 in about and 0 < about[11] < start:
        start = about[11]
    end = start + _natural(about, 7)
    if end > edge:
        raise ValueError("the footer is damaged: a column lies behind the end")
    return Column(names[path], _natural(about, 1), tuple(about.get(2, ())), _natural(about, 5), start, end)


def read_page(stream: IO[bytes], start: int) -> Page:
    """The header of the page that starts here; the stream's position changes.

    Raises:
        ValueError: it is damaged.
    """
    size = _HEADER
    while True:
        stream.seek(start)
        data = stream.read(size)
        try:
            reader = _Thrift(data, "a page's header is damaged", most_fields=_MOST_FIELDS)
            fields = reader.struct(_PAGE)
            break
        except IndexError:
            if len(data) < size or size >= _LONGEST_HEADER:
                raise ValueError("a page's header is damaged") from None
            size *= 16
    first = start + reader.at
    kind, unpacked, packed = (_natural(fields, field) for field in (1, 2, 3))
    if kind not in _OWN:
        return Page(first, first + packed, unpacked, None, 0, False)
    field, encoding = _OWN[kind]
    own = fields.get(field, {})
    return Page(first, first + packed, unpacked, _natural(own, 1), _natural(own, encoding), kind == _DICTIONARY)


def _natural(fields: Mapping[int, Any], field: int) -> int:
    value = fields.get(field, -1)
    if value < 0:
        raise ValueError("a header is damaged")
    return int(value)


class _Thrift:
    """Structs of Thrift's compact protocol, as {field: value}; of what is not wanted only where it ends.

    Args:
        data: what begins with a struct; IndexError where it ends before that does.
        damaged: what a ValueError says.
        most_fields: of all structs together.
        most_columns: elements of all wanted lists of structs, and of lists that are counted.
    """

    def __init__(
        self, data: bytes, damaged: str, *, most_fields: int | None = None, most_columns: int | None = None
    ) -> None:
        self._data, self.at, self._damaged = data, 0, damaged
        self._fields = len(data) if most_fields is None else most_fields
        self._columns = len(data) if most_columns is None else most_columns

    def struct(self, wanted: Mapping[int, _Shape], depth: int = 0) -> dict[int, Any]:
        fields: dict[int, Any] = {}
        field = 0
        while head := self._byte():
            self._fields -= 1
            if depth > _DEEPEST or self._fields < 0:
                raise ValueError(self._damaged)
            field = field + (head >> 4) if head >> 4 else self._signed()
            shape = wanted.get(field)
            if shape is None:
                self._pass(head & 15, depth)
            elif field in fields:
                raise ValueError(self._damaged)
            else:
                fields[field] = self._value(head & 15, shape, depth)
        return fields

    def _value(self, kind: int, shape: _Shape, depth: int) -> Any:
        if isinstance(shape, dict) and kind == _STRUCT:
            return self.struct(shape, depth + 1)
        if shape == _COUNT and kind == _LIST:
            inner, count = self._elements()
            self._count(count)
            self._pass_elements(inner, count, depth)
            return count
        if isinstance(shape, list) and kind == _LIST:
            inner, count = self._elements()
            if isinstance(shape[0], dict):
                self._count(count)
            return [self._value(inner, shape[0], depth + 1) for _ in range(count)]
        if shape != kind:
            raise ValueError(self._damaged)
        if kind == _BINARY:
            size = self._varint()
            self._skip(size)
            return self._data[self.at - size : self.at]
        value = self._signed()
        if kind == _I32 and not -(1 << 31) <= value < 1 << 31:
            raise ValueError(self._damaged)
        return value

    def _pass(self, kind: int, depth: int) -> None:
        if kind in (_TRUE, _FALSE):
            return
        if kind in (_I16, _I32, _I64):
            self._varint()
        elif kind == _BINARY:
            self._skip(self._varint())
        elif kind == _STRUCT:
            self.struct({}, depth + 1)
        elif kind == _DOUBLE:
            self._skip(8)
        elif kind == _BYTE:
            self._skip(1)
        elif kind in (_LIST, _SET):
            self._pass_elements(*self._elements(), depth)
        elif kind == _MAP:
            count = self._varint()
            kinds = self._byte() if count else 0
            for _ in range(self._possible(count)):
                self._pass_element(kinds >> 4, depth)
                self._pass_element(kinds & 15, depth)
        else:
            raise ValueError(self._damaged)

    def _pass_elements(self, kind: int, count: int, depth: int) -> None:
        for _ in range(count):
            self._pass_element(kind, depth)

    def _pass_element(self, kind: int, depth: int) -> None:
        if depth > _DEEPEST:
            raise ValueError(self._damaged)
        self._pass(_BYTE if kind in (_TRUE, _FALSE) else kind, depth + 1)

    def _elements(self) -> tuple[int, int]:
        """The kind and the number of a list's elements."""
        head = self._byte()
        count = head >> 4
        return head & 15, self._possible(self._varint() if count == 15 else count)

    def _possible(self, count: int) -> int:
        """No element takes less than a byte."""
        if count > len(self._data) - self.at:
            raise IndexError
        return count

    def _count(self, count: int) -> None:
        self._columns -= count
        if self._columns < 0:
            raise TooLarge("more columns and row groups than are read")

    def _byte(self) -> int:
        self.at += 1
        return self._data[self.at - 1]

    def _skip(self, count: int) -> None:
        if self.at + count > len(self._data):
            raise IndexError
        self.at += count

    def _varint(self) -> int:
        value = shift = 0
        while True:
            byte = self._byte()
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                break
            if shift > 63:
                raise ValueError(self._damaged)
        if value >> 64:
            raise ValueError(self._damaged)
        return value

    def _signed(self) -> int:
        value = self._varint()
        return (value >> 1) ^ -(value & 1)
