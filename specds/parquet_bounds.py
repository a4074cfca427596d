"""What reading a Parquet file will take, by its own headers, before it is read.

A page of a few bytes can stand for a billion values (runs of equal ones, dictionaries), and Arrow makes room for as
many as the header of a page says, whatever the file's metadata said before. So the headers are read first.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import numpy as np

from specds.limits import MAX_ROW
from specds.parquet import TooLarge
from specds.parquet_headers import Column, Footer, read_footer, read_page

# In units of the longest row: the largest page, values of a row group, bytes of a batch, and bytes of the footer.
_PAGE, _VALUES_OF_GROUP, _BATCH, _FOOTER = 64, 8, 16, 4
# Arrow takes a kilobyte for each column of a row group.
_COLUMN_BYTES = 1 << 10
# What is gone through as a whole may take so many times the file's own bytes (traces and results take ten), or what is
# small. A field of a record that is held takes so many bytes besides.
_UNFOLDED, _SMALL = 100, 64
_FIELD = 64
_KINDS = ("BOOLEAN", "INT32", "INT64", "INT96", "FLOAT", "DOUBLE", "BYTE_ARRAY", "FIXED_LEN_BYTE_ARRAY")
_TEXTS = (_KINDS.index("BYTE_ARRAY"), _KINDS.index("FIXED_LEN_BYTE_ARRAY"))
# PLAIN, PLAIN_DICTIONARY, RLE, BIT_PACKED, RLE_DICTIONARY: none in which texts share bytes, but for dictionaries.
_PLAIN = {0, 2, 3, 4, 8}


@dataclass(frozen=True, slots=True)
class ColumnChunk:
    """What the pages of one column in one row group say of themselves.

    Attributes:
        path: its name; with dots where it is part of a list or a struct.
        values: how many there are; empty lists and nulls count as one.
        largest: bytes of the largest page, unpacked; no single text is longer.
        repeats: whether texts may share bytes, so that they are longer than the pages together.
        nested: whether it is part of a list or a struct, so that a row may hold several values.
    """

    path: str
    values: int
    largest: int
    repeats: bool
    nested: bool


class BoundedFile:
    """A Parquet file from elsewhere: a context in which it is read within bounds that `MAX_ROW` raises.

    Args:
        stream: the file; its position changes.
        options: of `pyarrow.parquet.ParquetFile`.

    Attributes:
        schema: the Arrow schema; in batches, texts of lists and structs may be dictionaries.

    Raises:
        TooLarge: the footer is larger than is read.
        ValueError: it is damaged.
        and what pyarrow raises on damaged files.
    """

    def __init__(self, stream: IO[bytes], **options: Any) -> None:
        import pyarrow.parquet as pq

        self._stream = stream
        self._footer = _footer(stream)
        self._size = stream.seek(0, os.SEEK_END)
        self._folded = _folded(self._footer)
        self._file = pq.ParquetFile(stream, read_dictionary=sorted(self._folded), **options)
        self.schema = pq.ParquetFile(stream, metadata=self._file.metadata).schema_arrow
        self._lists = _lists(self._file.schema, self._footer)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    @property
    def rows(self) -> int:
        """How many there are."""
        return self._footer.rows

    @property
    def groups(self) -> Sequence[int]:
        """The rows of each row group."""
        return [group.rows for group in self._footer.groups]

    def batches(self, columns: Sequence[str], rows: int, *, whole: bool = False) -> Iterator[Any]:
        """Record batches of up to so many rows, fewer where they might be large.

        Args:
            columns: names of top-level columns.
            rows: of a batch.
            whole: all of them are gone through for one answer; small files of many rows are refused.

        Raises:
            TooLarge: a row group has more values, or a larger page, than is read at once.
            ValueError: a column is missing or twice there; the pages are not where the footer says, or hold other
                numbers of values.
            and what pyarrow raises on damaged files.
        """
        for name in columns:
            if self.schema.names.count(name) != 1:  # Arrow passes over names that are not there
                raise ValueError(f"it has no column {name!r}, or more than one")
        left = self._most()
        for group, count in enumerate(self.groups):
            if not count:  # then there may be no page
                continue
            most = batch_rows(self.chunks(group, columns), count, rows)
            for batch in self._file.iter_batches(most, row_groups=[group], columns=list(columns)):
                every = batch.to_struct_array()
                _check_folded(every)
                if whole and (left := left - unfolded_bytes(every)) < 0:
                    raise _unfolds()
                yield batch

    def records(self, columns: Sequence[str], rows: int) -> Iterator[list[dict[str, Any]]]:
        """Up to so many rows at a time, of a file that is gone through as a whole; see `batches`.

        Raises:
            TooLarge: also where a single row takes more bytes than `MAX_ROW`.
        """
        for batch in self.batches(columns, rows, whole=True):
            yield from _records(batch)

    def held(self, columns: Sequence[str], rows: int) -> list[dict[str, Any]]:
        """All rows; see `records`."""
        left = self._most()
        found: list[dict[str, Any]] = []
        for batch in self.batches(columns, rows):
            left -= unfolded_bytes(batch.to_struct_array()) + batch.num_rows * batch.num_columns * _FIELD
            if left < 0:
                raise _unfolds()
            for some in _records(batch):
                found += some
        return found

    def _most(self) -> int:
        return max(_SMALL * MAX_ROW.bytes, _UNFOLDED * self._size)

    def chunks(self, group: int, columns: Sequence[str]) -> list[ColumnChunk]:
        """The column chunks of a row group that hold some columns, none where it has no rows; see `batches`."""
        about = self._footer.groups[group]
        if not about.rows:
            return []
        wanted = tuple(f"{name}." for name in columns)
        return [
            self._chunk(place, column, about.rows)
            for place, column in enumerate(about.columns)
            if f"{column.path}.".startswith(wanted)
        ]

    def _chunk(self, place: int, column: Column, rows: int) -> ColumnChunk:
        values = largest = 0
        shares = False
        start = column.start
        while start < column.end:
            page = read_page(self._stream, start)
            start = page.end
            largest = max(largest, page.unpacked)
            if page.values is None:
                continue
            if page.dictionary:
                shares = True
                if page.values > page.unpacked:  # Arrow makes room for them before it looks for them
                    raise ValueError(f"a dictionary of {column.path} cannot hold what it says")
                continue
            if page.encoding not in _PLAIN:
                shares = True
                if place in self._folded:
                    raise ValueError(f"a page of {column.path} is in an encoding that the footer does not name")
            values += page.values
        listed = self._lists[place]
        if start != column.end or values != column.values or (not listed and values != rows):
            raise ValueError(f"the pages of {column.path} are not what the file's metadata says")
        repeats = shares and column.kind in _TEXTS and place not in self._folded
        return ColumnChunk(column.path, values, largest, repeats, listed or "." in column.path)


def _unfolds() -> TooLarge:
    return TooLarge(f"it holds more than {_UNFOLDED} times its own bytes")


def rows_of(path: str) -> int:
    """How many rows a file says to have.

    Raises:
        OSError, ValueError: it cannot be read, or is damaged.
    """
    with Path(path).open("rb") as stream:
        return _footer(stream).rows


def _footer(stream: IO[bytes]) -> Footer:
    bound = MAX_ROW.bytes
    return read_footer(stream, most_bytes=_FOOTER * bound, most_columns=_PAGE * bound // _COLUMN_BYTES)


def _folded(footer: Footer) -> set[int]:
    """The nested texts that Arrow can keep as a dictionary and numbers, so that a text takes its bytes once."""
    plain: dict[int, bool] = {}
    for group in footer.groups:
        for place, column in enumerate(group.columns):
            folds = "." in column.path and column.kind == _TEXTS[0] and set(column.encodings) <= _PLAIN
            plain[place] = folds and plain.get(place, True)
    return {place for place, folds in plain.items() if folds}


def _lists(schema: Any, footer: Footer) -> list[bool]:
    """Of each column, whether a row may hold several of its values.

    Raises:
        ValueError: a row group has other columns than the schema, by which Arrow reads.
    """
    columns = [schema.column(place) for place in range(len(schema))]
    kinds = [(column.path, _KINDS.index(column.physical_type)) for column in columns]
    for group in footer.groups:
        if [(column.path, column.kind) for column in group.columns] != kinds:
            raise ValueError("a row group has other columns than the file")
    return [column.max_repetition_level > 0 for column in columns]


def _records(batch: Any) -> Iterator[list[dict[str, Any]]]:
    size = unfolded_bytes(batch.to_struct_array())
    if size <= MAX_ROW.bytes:
        yield batch.to_pylist()
    elif batch.num_rows == 1:
        raise TooLarge(f"a row takes {size:,} bytes")
    else:
        half = batch.num_rows // 2
        yield from _records(batch.slice(0, half))
        yield from _records(batch.slice(half))


def batch_rows(chunks: Sequence[ColumnChunk], count: int, most: int) -> int:
    """Rows of a row group's batches: `most`, or fewer where they might be large.

    Args:
        chunks: the row group's column chunks.
        count: its rows.

    Raises:
        TooLarge: as `BoundedFile.batches`.
    """
    bound = MAX_ROW.bytes
    for chunk in chunks:
        said = f"{chunk.path} has {chunk.values:,} values in a row group, and pages of {chunk.largest:,} bytes"
        if chunk.largest > _PAGE * bound or (chunk.nested and chunk.values > _VALUES_OF_GROUP * bound):
            raise TooLarge(said)
        if chunk.nested:
            if chunk.repeats and chunk.values * chunk.largest > _PAGE * bound:
                raise TooLarge(f"{said}, in an encoding in which they may share bytes")
            most = min(most, max(1, count * bound // max(chunk.values, 1)))
        elif chunk.repeats:
            most = min(most, max(1, _BATCH * bound // max(chunk.largest, 1)))
    return most


def unfolded_bytes(array: Any) -> int:
    """Bytes of an Arrow array's texts and numbers, each counted as often as it stands there."""
    import pyarrow as pa

    kind = array.type
    if pa.types.is_dictionary(kind):
        lengths = _lengths(array.dictionary)
        indices = array.indices.drop_null()
        return int(lengths[np.asarray(indices)].sum()) if len(indices) else 0
    inner = _inner(array)
    if inner is None:
        return int(array.nbytes)
    return sum(map(unfolded_bytes, inner)) + (0 if pa.types.is_struct(kind) else 8 * len(array))


def _lengths(texts: Any) -> Any:
    """int64[n]: bytes of each text of a string or binary array."""
    import pyarrow as pa

    large = pa.types.is_large_string(texts.type) or pa.types.is_large_binary(texts.type)
    if not (large or pa.types.is_string(texts.type) or pa.types.is_binary(texts.type)):
        raise ValueError("a dictionary of what is no text")
    dtype = np.dtype(np.int64 if large else np.int32)
    offsets = np.frombuffer(texts.buffers()[1] or b"", dtype, len(texts) + 1, texts.offset * dtype.itemsize)
    return np.diff(offsets).astype(np.int64)


def _check_folded(array: Any) -> None:
    """Refuse numbers that no text of a dictionary has: Arrow does not look, and would read what lies elsewhere."""
    import pyarrow as pa

    kind = array.type
    if pa.types.is_dictionary(kind):
        indices = array.indices.drop_null()
        numbers = np.asarray(indices)
        if len(numbers) and not 0 <= numbers.min() <= numbers.max() < len(array.dictionary):
            raise ValueError("a value stands for a text that its dictionary lacks")
    else:
        for field in _inner(array) or ():
            _check_folded(field)


def _inner(array: Any) -> list[Any] | None:
    """What the rows of an array of lists, maps or structs hold; None of others."""
    import pyarrow as pa

    types, kind = pa.types, array.type
    if types.is_struct(kind):
        return list(array.flatten())
    if types.is_map(kind):
        if not len(array):
            return []
        begin, end = array.offsets[0].as_py(), array.offsets[-1].as_py()
        return [array.keys.slice(begin, end - begin), array.items.slice(begin, end - begin)]
    lists = (types.is_list, types.is_large_list, types.is_fixed_size_list, types.is_list_view, types.is_large_list_view)
    return [array.flatten()] if any(is_such(kind) for is_such in lists) else None
