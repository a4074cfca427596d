"""What reading a Parquet file will take, by its own page headers, before it is read.

A page of a few bytes can stand for a billion values (runs of equal ones, dictionaries), and Arrow makes room for as
many as the header of a page says, whatever the file's metadata said before. So the headers are read first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any

import numpy as np

from specds.limits import MAX_ROW

# In units of the longest row: the largest page, values of a row group, and bytes of a batch.
_PAGE, _VALUES_OF_GROUP, _BATCH = 64, 8, 16
_PLAIN = {"PLAIN", "RLE", "BIT_PACKED", "PLAIN_DICTIONARY", "RLE_DICTIONARY"}
_HEADER = 1 << 12
_LONGEST_HEADER = 1 << 20
_DEEPEST = 8
_MOST_FIELDS = 1_000
# parquet.thrift: fields of PageHeader, and the number of values in each kind of page's own header
_UNCOMPRESSED, _COMPRESSED = 2, 3
_DATA_PAGES = 5, 8
_VALUES = 1


class TooLarge(ValueError):
    """Reading the file would take more memory than `MAX_ROW` allows."""


@dataclass(frozen=True, slots=True)
class ColumnChunk:
    """What the pages of one column in one row group say of themselves.

    Attributes:
        path: its name; with dots where it is part of a list or a struct.
        values: how many there are; empty lists and nulls count as one.
        largest: bytes of the largest page, unpacked; no single text is longer.
        repeats: whether texts may share bytes, so that they are longer than the pages together.
    """

    path: str
    values: int
    largest: int
    repeats: bool

    @property
    def nested(self) -> bool:
        """Whether a row may hold several values."""
        return "." in self.path


def open_parquet(stream: IO[bytes], **options: Any) -> Any:
    """A `pyarrow.parquet.ParquetFile` for `bounded_batches`.

    Raises: what pyarrow raises on damaged files.
    """
    import pyarrow.parquet as pq

    metadata = pq.read_metadata(stream)
    return pq.ParquetFile(stream, metadata=metadata, read_dictionary=sorted(_folded(metadata)), **options)


def bounded_batches(stream: IO[bytes], file: Any, columns: Sequence[str], rows: int) -> Iterator[Any]:
    """Record batches of up to so many rows, fewer where they might be large, within bounds that `MAX_ROW` raises.

    Args:
        stream: the file once more; its position changes.
        file: what `open_parquet` made of it.
        columns: names of top-level columns.

    Raises:
        TooLarge: a row group has more values, or a larger page, than is read at once.
        ValueError: the pages are not where the metadata says, or hold other numbers of values.
        and what pyarrow raises on damaged files.
    """
    for group in range(file.metadata.num_row_groups):
        chunks = column_chunks(stream, file.metadata, group, columns)
        count = file.metadata.row_group(group).num_rows
        yield from file.iter_batches(batch_rows(chunks, count, rows), row_groups=[group], columns=list(columns))


def column_chunks(stream: IO[bytes], metadata: Any, group: int, columns: Sequence[str]) -> list[ColumnChunk]:
    """The column chunks of a row group that hold some columns; see `bounded_batches`."""
    about = metadata.row_group(group)
    folded = _folded(metadata)
    chunks = (about.column(number) for number in range(about.num_columns))
    return [_chunk(stream, one, folded) for one in chunks if one.path_in_schema.partition(".")[0] in columns]


def _folded(metadata: Any) -> set[str]:
    """The nested texts that Arrow can keep as a dictionary and numbers, so that a text takes its bytes once."""
    found: dict[str, bool] = {}
    for group in range(metadata.num_row_groups):
        about = metadata.row_group(group)
        for number in range(about.num_columns):
            column = about.column(number)
            path = column.path_in_schema
            if "." in path:
                plain = column.physical_type == "BYTE_ARRAY" and set(column.encodings) <= _PLAIN
                found[path] = plain and found.get(path, True)
    return {path for path, plain in found.items() if plain}


def batch_rows(chunks: Sequence[ColumnChunk], count: int, most: int) -> int:
    """Rows of a row group's batches: `most`, or fewer where they might be large.

    Args:
        chunks: the row group's column chunks.
        count: its rows.

    Raises:
        TooLarge: as `bounded_batches`.
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
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return unfolded_bytes(array.flatten()) + 8 * len(array)
    if pa.types.is_struct(kind):
        return sum(unfolded_bytes(field) for field in array.flatten())
    return int(array.nbytes)


def _lengths(texts: Any) -> Any:
    """int64[n]: bytes of each text of a string or binary array."""
    import pyarrow as pa

    large = pa.types.is_large_string(texts.type) or pa.types.is_large_binary(texts.type)
    dtype = np.dtype(np.int64 if large else np.int32)
    offsets = np.frombuffer(texts.buffers()[1] or b"", dtype, len(texts) + 1, texts.offset * dtype.itemsize)
    return np.diff(offsets).astype(np.int64)


def _chunk(stream: IO[bytes], column: Any, folded: set[str]) -> ColumnChunk:
    # As Arrow finds the first page.
    start = column.data_page_offset
    if column.has_dictionary_page and 0 < column.dictionary_page_offset < start:
        start = column.dictionary_page_offset
    end = start + column.total_compressed_size
    values = largest = 0
    while start < end:
        start, page = _page(stream, start)
        largest = max(largest, _number(page, _UNCOMPRESSED))
        own = next((page[kind] for kind in _DATA_PAGES if kind in page), None)
        if own is not None:
            values += _number(own, _VALUES)
        start += _number(page, _COMPRESSED)
    path = column.path_in_schema
    if start != end or values != column.num_values:
        raise ValueError(f"the pages of {path} are not what the file's metadata says")
    text = column.physical_type in ("BYTE_ARRAY", "FIXED_LEN_BYTE_ARRAY")
    repeats = text and path not in folded and (column.has_dictionary_page or not set(column.encodings) <= _PLAIN)
    return ColumnChunk(path, values, largest, repeats)


def _page(stream: IO[bytes], start: int) -> tuple[int, dict[int, Any]]:
    """The header of the page that starts here, and where its data starts."""
    size = _HEADER
    while True:
        stream.seek(start)
        data = stream.read(size)
        try:
            reader = _Thrift(data)
            page = reader.struct()
        except IndexError:
            if len(data) < size or size >= _LONGEST_HEADER:
                raise ValueError("a page's header is damaged") from None
            size *= 16
            continue
        return start + reader.at, page


def _number(fields: Any, field: int) -> int:
    # Where a struct should be, a damaged header may have a number.
    value = fields.get(field) if isinstance(fields, dict) else None
    if not isinstance(value, int) or value < 0:
        raise ValueError("a page's header is damaged")
    return value


class _Thrift:
    """Structs of Thrift's compact protocol, as {field: value}; of containers only where they end."""

    def __init__(self, data: bytes) -> None:
        self._data, self.at, self._left = data, 0, _MOST_FIELDS

    def struct(self, depth: int = 0) -> dict[int, Any]:
        fields: dict[int, Any] = {}
        field = 0
        while head := self._byte():
            self._left -= 1
            if depth > _DEEPEST or self._left < 0:
                raise ValueError("a page's header is damaged")
            field = field + (head >> 4) if head >> 4 else self._integer()
            fields[field] = self._value(head & 15, depth)
        return fields

    def _value(self, kind: int, depth: int) -> Any:
        match kind:
            case 1 | 2:
                return kind == 1
            case 3:
                return self._byte()
            case 4 | 5 | 6:
                return self._integer()
            case 7:
                return self._skip(8)
            case 8:
                return self._skip(self._varint())
            case 12:
                return self.struct(depth + 1)
        raise ValueError("a page's header is damaged")  # no page header has lists, sets or maps

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
                return value
            if shift > 63:
                raise ValueError("a page's header is damaged")

    def _integer(self) -> int:
        value = self._varint()
        return (value >> 1) ^ -(value & 1)
