"""Rows of files: JSON lines, CSV, TSV, Parquet and Hugging Face data sets as dictionaries, one at a time.

A row that cannot be read is a value, a PromptError beside its place, so that the rows after it are still read.
A file that cannot be read is an InputError. Places read "file:row N"; N counts from 1, in a text file as editors
count lines.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from specds.caches import lend_cache
from specds.errors import InputError, PromptError, UsageError
from specds.limits import MAX_ROW
from specds.reading.csv_rows import csv_records, csv_rows
from specds.reading.fields import Row, Wanted, columns_of
from specds.reading.input_file import PACKED, STDIN, reason, shown, unpacked
from specds.reading.json_text import parse
from specds.reading.lines import lines, too_long
from specds.reading.parquet_rows import parquet_rows

FORMATS = ("jsonl", "parquet", "csv", "tsv", "text")

_SUFFIXES = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
    ".csv": "csv",
    ".tsv": "tsv",
}
_DELIMITERS = {"csv": ",", "tsv": "\t"}
_CONVERT = "convert it to JSON lines, CSV or Parquet"
_UNREAD = {
    **dict.fromkeys((".xlsx", ".xls", ".xlsm", ".ods", ".numbers"), ("spreadsheets are not read", "save it as CSV")),
    **dict.fromkeys((".docx", ".doc", ".odt", ".rtf", ".pdf", ".epub"), ("documents are not read", "save it as text")),
    **dict.fromkeys((".arrow", ".feather", ".orc", ".avro"), ("this format is not read", _CONVERT)),
    **dict.fromkeys((".db", ".sqlite", ".sqlite3", ".duckdb"), ("data bases are not read", _CONVERT)),
    **dict.fromkeys((".pkl", ".pickle", ".pt", ".npy", ".npz"), ("Python objects are not read", _CONVERT)),
}
_UNPACK = ("files packed like this are not read", f"unpack it, or pack it as {' or '.join(PACKED)}")
_UNREAD_PACKED = dict.fromkeys((".bz2", ".xz", ".lz4", ".br", ".7z", ".zip", ".tar", ".tgz", ".rar", ".z"), _UNPACK)
_COUNTED = 1 << 28  # bytes; to read a larger file twice takes longer than a total is worth


def format_of(path: str, format: str | None = None) -> str | None:
    """The format of a file: the one asked for, else by its name; None for standard input, to be told by its content.

    Raises:
        UsageError: no such format.
        InputError: by its name it is something that is not read.
    """
    if format is not None and format not in FORMATS:
        raise UsageError(f"unknown format {format!r}", f"one of {', '.join(FORMATS)}")
    suffix = Path(unpacked(path).lower()).suffix
    unread = _UNREAD_PACKED if format is not None else _UNREAD | _UNREAD_PACKED
    if path != STDIN and suffix in unread:
        what, instead = unread[suffix]
        raise InputError(f"{shown(path)}: {what}", instead)
    if format is not None:
        return format
    return None if path == STDIN else _SUFFIXES.get(suffix, "text")


def count_rows(paths: Sequence[str], format: str | None = None) -> int | None:
    """How many rows files have; None where that is not known before they are read: of a stream, or of a large file."""
    total = 0
    for path in paths:
        kind = format_of(path, format)
        if path == STDIN or not Path(path).is_file() or kind not in FORMATS:
            return None
        try:
            if kind == "parquet":
                from specds.parquet_bounds import rows_of

                total += rows_of(path)
            elif Path(path).stat().st_size > _COUNTED:
                return None
            elif kind in _DELIMITERS:
                records = sum(1 for _ in csv_records(path, _DELIMITERS[kind], MAX_ROW.bytes))
                total += max(0, records - 1)  # the first names the columns
            else:
                total += sum(1 for _ in lines(path))
        except (InputError, OSError, ValueError):  # whoever reads it says what is wrong with it
            return None
    return total


def rows(
    path: str, wanted: Wanted, *, format: str | None = None, max_line: int | None = None
) -> Iterator[tuple[str, Row | PromptError]]:
    """Each row of a file with its place, as soon as it is there; a row that cannot be read is a PromptError.

    Args:
        path: a file, or "-" for standard input (JSON lines if its first line starts with "{", else plain text).
        wanted: the fields looked for; of a Parquet or CSV file only these are read.
        format: one of FORMATS; by the file's name if None.
        max_line: bytes; the longest row that is read; None: what `MAX_ROW` says.

    Raises:
        InputError: the file cannot be read, or is a Parquet or CSV file without the columns of any layout.
        UsageError: no such format.
    """
    kind = format_of(path, format)
    if kind == "parquet":
        yield from parquet_rows(path, wanted, max_line or MAX_ROW.bytes)
        return
    if kind in _DELIMITERS:
        yield from csv_rows(path, wanted, _DELIMITERS[kind], max_line or MAX_ROW.bytes)
        return
    for where, line in lines(path, max_line=max_line):
        if isinstance(line, PromptError):
            yield where, line
            continue
        if kind is None:
            kind = "jsonl" if line.lstrip().startswith("{") else "text"
        yield where, parse(where, line) if kind == "jsonl" else {wanted.line: line}


def dataset_rows(name: str, wanted: Wanted, *, split: str = "train") -> Iterator[tuple[str, Row | PromptError]]:
    """Each row of a Hugging Face data set, streamed.

    Args:
        name: "owner/name" or "owner/name:config" on the hub, or a directory that `datasets` can load.
        wanted: the fields looked for; where the columns are known, only these are read.
        split: the split's name.

    Raises:
        InputError: the data set or its split cannot be found or read, or has no columns of any layout.
    """
    lend_cache()
    import datasets

    repository, _, config = name.partition(":")
    number = 0
    # `datasets` raises whatever its network, file system and format layers raise: there is no narrower base class.
    try:
        stream = datasets.load_dataset(repository, config or None, split=split, streaming=True)
        columns: list[str] | None = stream.column_names
    except Exception as error:
        hint = "check the name (owner/name or owner/name:config), the split and the network"
        raise InputError(f"data set {name}, split {split}: {reason(error)}", hint) from error
    if columns is not None:
        stream = stream.select_columns(columns_of(f"data set {name}", columns, wanted))
    iterator = iter(stream)
    max_row = MAX_ROW.bytes
    while True:
        try:
            row = next(iterator)
        except StopIteration:
            return
        except Exception as error:
            raise InputError(f"data set {name}, after row {number}: {reason(error)}", "check the network") from error
        number += 1
        where = f"{name}:row {number}"
        yield where, row if _size(row) <= max_row else too_long(where, max_row)


def _size(value: object) -> int:
    """Bytes of a value's texts, about."""
    if isinstance(value, dict):
        return sum(map(_size, value.values()))
    if isinstance(value, list):
        return sum(map(_size, value)) + 8 * len(value)
    return len(value) if isinstance(value, str | bytes) else 8
