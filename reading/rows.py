"""Rows of files: JSON lines, CSV, TSV, Parquet and Hugging Face data sets as dictionaries, one at a time.

A row that cannot be read is a value, a PromptError beside its place, so that the rows after it are still read.
A file that cannot be read is an InputError. Places read "file:row N"; N counts from 1, in a text file as editors
count lines.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import itertools
import json
import os
import re
import stat
import sys
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from specds.caches import lend_cache
from specds.errors import InputError, PromptError, UsageError
from specds.limits import MAX_ROW
from specds.parquet import TooLarge, damage, why
from specds.printing import is_unicode

FORMATS = ("jsonl", "parquet", "csv", "tsv", "text")
STDIN = "-"

Layout = tuple[str, ...]
Row = dict[str, object]

PACKED = (".gz", ".zst")
"""Name endings of files that are unpacked as they are read."""

_SUFFIXES = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
    ".csv": "csv",
    ".tsv": "tsv",
}
_DELIMITERS = {"csv": ",", "tsv": "\t"}
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
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
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_BATCH_ROWS = 256
_COUNTED = 1 << 28  # bytes; to read a larger file twice takes longer than a total is worth
_SKIP_BYTES = 1 << 16
_UTF8_BOM = b"\xef\xbb\xbf"
_UTF16_BOMS = (b"\xff\xfe", b"\xfe\xff")
_RESAVE = "save it as UTF-8 text"


@dataclass(frozen=True, slots=True)
class Wanted:
    """The fields that a reader looks for in a row.

    Attributes:
        layouts: sets of fields, any one of which makes a row usable; the first that a row has whole is taken.
        also: fields that are read where they are there.
        hint: what to do about a row or a file that has no layout.
        line: the field that a line of plain text fills.
        lists: fields that hold lists; in a CSV file they are written as JSON.
    """

    layouts: tuple[Layout, ...]
    also: tuple[str, ...] = ()
    hint: str = ""
    line: str = "text"
    lists: tuple[str, ...] = ()


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
        raise _unreadable(path, error) from error
    if stat.S_ISDIR(mode):
        raise InputError(f"{shown(path)} is a directory", f"pass files or a glob: {shown(path).rstrip('/')}/*.jsonl")
    if not os.access(path, os.R_OK):
        raise InputError(f"{shown(path)} cannot be read: permission denied", "check its permissions")


def count_rows(paths: Sequence[str], format: str | None = None) -> int | None:
    """How many rows files have; None where that is not known before they are read: of a stream, or of a large file."""
    found = 0
    for path in paths:
        kind = format_of(path, format)
        if path == STDIN or not Path(path).is_file() or kind not in FORMATS:
            return None
        try:
            if kind == "parquet":
                from specds.parquet_bounds import rows_of

                found += rows_of(path)
            elif Path(path).stat().st_size > _COUNTED:
                return None
            elif kind in _DELIMITERS:
                records = sum(1 for _ in _csv_records(path, _DELIMITERS[kind], MAX_ROW.bytes))
                found += max(0, records - 1)  # the first names the columns
            else:
                found += sum(1 for _ in lines(path))
        except (InputError, OSError, ValueError):  # whoever reads it says what is wrong with it
            return None
    return found


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
        yield from _parquet_rows(path, wanted, max_line or MAX_ROW.bytes)
        return
    if kind in _DELIMITERS:
        yield from _csv_rows(path, wanted, _DELIMITERS[kind], max_line or MAX_ROW.bytes)
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
        raise InputError(f"data set {name}, split {split}: {_reason(error)}", hint) from error
    if columns is not None:
        stream = stream.select_columns(_columns(f"data set {name}", columns, wanted))
    iterator = iter(stream)
    max_row = MAX_ROW.bytes
    while True:
        try:
            row = next(iterator)
        except StopIteration:
            return
        except Exception as error:
            raise InputError(f"data set {name}, after row {number}: {_reason(error)}", "check the network") from error
        number += 1
        where = f"{name}:row {number}"
        yield where, row if _size(row) <= max_row else _too_long(where, max_row)


def lines(path: str, *, max_line: int | None = None) -> Iterator[tuple[str, str | PromptError]]:
    """Each line of a text file that is not blank, with its place and without its end; packed files are unpacked.

    A line that is longer than max_line bytes, is not UTF-8 or holds a NUL is a PromptError.

    Raises:
        InputError: the file cannot be read, is packed and damaged, or is UTF-16.
    """
    max_line = max_line or MAX_ROW.bytes
    for where, raw, whole in _raw_lines(path, max_line):
        if not whole:
            yield where, _too_long(where, max_line)
            continue
        line = decoded(where, raw.rstrip(b"\r\n"))
        if isinstance(line, PromptError) or line.strip():
            yield where, line


def _raw_lines(path: str, max_line: int) -> Iterator[tuple[str, bytes, bool]]:
    """Each line's place, its bytes with their end, and whether they are the whole of it."""
    with _opened(path) as stream:
        for number in itertools.count(1):
            where = f"{shown(path)}:row {number}"
            try:
                raw, whole = _read_line(stream, max_line)
            except (OSError, EOFError, zlib.error) as error:
                raise InputError(
                    f"{where} cannot be read: {_reason(error)}",
                    "the file is damaged or cut short: write or copy it again",
                ) from error
            if not raw:
                return
            if number == 1:
                if raw.startswith(_UTF16_BOMS):
                    raise InputError(f"{shown(path)} is UTF-16 text", _RESAVE)
                raw = raw.removeprefix(_UTF8_BOM)
            yield where, raw, whole


def document(path: str, *, max_bytes: int | None = None) -> str | PromptError:
    """The whole of a text file; a PromptError where `lines` would give one.

    Raises:
        InputError: the file cannot be read, or is UTF-16.
    """
    max_bytes = max_bytes or MAX_ROW.bytes
    with _opened(path) as stream:
        try:
            raw = stream.read(max_bytes + 1)
        except (OSError, EOFError, zlib.error) as error:
            raise _unreadable(path, error) from error
    if len(raw) > max_bytes:
        return _too_long(shown(path), max_bytes)
    if raw.startswith(_UTF16_BOMS):
        raise InputError(f"{shown(path)} is UTF-16 text", _RESAVE)
    return decoded(shown(path), raw.removeprefix(_UTF8_BOM))


def decoded(where: str, raw: bytes) -> str | PromptError:
    """Text from bytes that should be UTF-8 without NULs; else what is wrong with them."""
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        return PromptError(f"{where} is not UTF-8: byte 0x{raw[error.start]:02x} at offset {error.start}", _RESAVE)
    if "\0" in text:
        return PromptError(f"{where} holds a NUL byte: binary data or UTF-16", _RESAVE)
    return text


def parse(where: str, line: str) -> Row | PromptError:
    """One line of JSON as a row; else what is wrong with it."""
    hint = "each line must be one JSON object"
    value = _json(where, line, hint)
    if isinstance(value, list):
        hint += "; `jq -c '.[]'` turns an array into lines"
    if not isinstance(value, dict | PromptError):
        return PromptError(f"{where} must be an object, but is {kind_of(value)}", hint)
    return value


def _json(where: str, text: str, hint: str) -> object:
    """What some JSON says; a PromptError where it is none."""
    try:
        return json.loads(text, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        return PromptError(f"{where} is not JSON: {error.msg} at column {error.colno}", hint)
    except RecursionError:
        return PromptError(f"{where} is not usable JSON: too deeply nested", hint)
    except KeyError as error:
        return PromptError(f"{where} is not usable JSON: the key {error.args[0]} stands twice in one object", hint)
    except ValueError:
        # Python reads no integer of more than 4,300 digits, and advises to change the interpreter's settings.
        return PromptError(f"{where} is not usable JSON: a number has too many digits", hint)


def layout_of(where: str, row: Row, wanted: Wanted) -> Layout:
    """The first layout whose fields the row has; a null counts as absent, as Parquet knows no other absence.

    Raises:
        PromptError: there is none.
    """
    for layout in wanted.layouts:
        if all(row.get(field) is not None for field in layout):
            return layout
    found = listed([repr(key) + (" (null)" if value is None else "") for key, value in row.items()])
    raise PromptError(f"{where} must have {_asked(wanted)}, but has {found}", wanted.hint)


def text_of(where: str, field: str, value: object, *, blank: bool = False) -> str:
    """A field's value as text that can be written as UTF-8, and is not blank unless `blank` allows it.

    Raises:
        PromptError: it is not.
    """
    if not isinstance(value, str):
        raise PromptError(f"{where}, field {field!r} must be a string, but is {kind_of(value)}", "put text there")
    if not blank and not value.strip():
        raise PromptError(f"{where}, field {field!r} must not be empty", "put text there or leave the row out")
    if not is_unicode(value):
        raise PromptError(
            f"{where}, field {field!r} holds half of a surrogate pair (\\ud800 to \\udfff)", "repair its text"
        )
    return value


def id_of(row: Row | PromptError, number: int) -> str:
    """The row's own "id" or "question_id" as text; its number where it has none that can be printed."""
    if isinstance(row, dict):
        for field in ("id", "question_id"):
            value = row.get(field)
            if isinstance(value, str | int | float) and not isinstance(value, bool):
                text = str(value)
                if text.strip() and is_unicode(text):
                    return text
    return str(number)


def kind_of(value: object) -> str:
    """What a value is, in JSON's words."""
    match value:
        case None:
            return "null"
        case bool():
            return "a truth value"
        case str():
            return "a string"
        case int() | float():
            return "a number"
        case list():
            return "an array"
        case dict():
            return "an object"
        case bytes():
            return "binary data"
    return f"a {type(value).__name__}"


def listed(names: Iterable[str]) -> str:
    """Names for one line of a message: the first twelve, each cut at 40 characters."""
    every = list(names)
    short = [name if len(name) <= 40 else name[:37] + "..." for name in every[:12]]
    if len(every) > len(short):
        short.append(f"{len(every) - len(short)} more")
    return ", ".join(short) or "nothing"


def shown(path: str) -> str:
    """A path that can be printed, on one line, whatever bytes it holds."""
    if path == STDIN:
        return "stdin"
    if not path:
        return "''"
    return path if path.isprintable() else ascii(path)[1:-1]


def _object(pairs: list[tuple[str, object]]) -> Row:
    row = dict(pairs)
    if len(row) != len(pairs):
        # Taking one of the two would be a guess about what the writer meant.
        keys = [key for key, _ in pairs]
        twice = next(key for key in row if keys.count(key) > 1)
        raise KeyError(listed([repr(twice)]))
    return row


def _csv_rows(path: str, wanted: Wanted, delimiter: str, max_line: int) -> Iterator[tuple[str, Row | PromptError]]:
    """The rows below a line of column names. An empty cell counts as absent, a row of nothing else as blank."""
    names: list[str] | None = None
    columns: list[str] = []
    for where, record in _csv_records(path, delimiter, max_line):
        if names is not None:
            yield where, record if isinstance(record, PromptError) else _csv_row(where, names, record, columns, wanted)
            continue
        if isinstance(record, PromptError):
            raise InputError(record.message, record.hint)
        names = [name.strip() for name in record]
        columns = _columns(shown(path), names, wanted, f"the first row of a CSV file names its columns; {wanted.hint}")


def _csv_records(path: str, delimiter: str, max_line: int) -> Iterator[tuple[str, list[str] | PromptError]]:
    """Each record's place and cells, the column names' first; blank ones are skipped."""
    # The limit is one of the whole process; it is only ever raised, and every record is bounded by its own bytes.
    csv.field_size_limit(max(csv.field_size_limit(), max_line))
    source = _CsvLines(path, max_line)
    reader = csv.reader(source, delimiter=delimiter, strict=True)
    while True:
        source.begin()
        record: list[str] | PromptError | None
        try:
            record = next(reader, None)
        except PromptError as error:
            record = error
        except csv.Error as error:
            reason = "a quote is never closed" if source.ended else shown(str(error).partition(" - ")[0])
            record = PromptError(
                f"{source.where} is not valid CSV: {reason}",
                'put fields with separators, quotes or line breaks in "quotes", and write a quote in them twice',
            )
        if record is None:
            return
        record = source.problem or record
        if isinstance(record, PromptError) or any(record):
            yield source.where, record


def _csv_row(where: str, names: list[str], cells: list[str], columns: list[str], wanted: Wanted) -> Row | PromptError:
    if len(cells) != len(names):
        return PromptError(
            f"{where} has {len(cells)} fields, and the first row names {len(names)}",
            'put fields with separators, quotes or line breaks in "quotes"',
        )
    row: Row = {}
    for name in columns:
        cell = cells[names.index(name)]
        value: object = cell or None
        if cell and name in wanted.lists:
            value = _json(f"{where}, field {name!r}", cell, "in a CSV file a list is written as JSON")
        if isinstance(value, PromptError):
            return value
        row[name] = value
    return row


class _CsvLines:
    """A file's lines for `csv.reader`, which joins those that a quoted field runs over.

    Attributes:
        where: the place of the record's first line.
        problem: why the record cannot be used, though it can be told from the next.
        ended: whether there are no more lines.
    """

    def __init__(self, path: str, max_line: int) -> None:
        self._lines = _raw_lines(path, max_line)
        self._most, self._size = max_line, 0
        self.where = ""
        self.problem: PromptError | None = None
        self.ended = False

    def begin(self) -> None:
        """A record begins with the next line."""
        self.where, self.problem, self._size = "", None, 0

    def __iter__(self) -> _CsvLines:
        return self

    def __next__(self) -> str:
        line = next(self._lines, None)
        if line is None:
            self.ended = True
            raise StopIteration
        where, raw, whole = line
        self.where = self.where or where
        self._size += len(raw)
        if not whole or self._size > self._most:
            raise PromptError(
                f"{self.where} is longer than {self._most:,} bytes",
                f"split it into shorter rows, or close a quote that was left open; {MAX_ROW.hint}",
            )
        text = decoded(where, raw)
        if isinstance(text, PromptError):
            self.problem = self.problem or text
            return raw.decode(errors="replace").replace("\0", " ")
        return text


def _too_long(where: str, most: int) -> PromptError:
    return PromptError(f"{where} is longer than {most:,} bytes", f"split it into shorter ones, or {MAX_ROW.hint}")


def _parquet_rows(path: str, wanted: Wanted, max_row: int) -> Iterator[tuple[str, Row | PromptError]]:
    from specds.parquet_bounds import BoundedFile

    if path == STDIN or unpacked(path) != path:
        raise InputError(
            f"{shown(path)}: Parquet is read from an unpacked file only", "write it to a file and pass that"
        )
    broken = damage()
    with _opened(path) as stream:
        try:
            file = BoundedFile(stream)
            names = file.schema.names
        except TooLarge as error:
            raise _too_much(path, error) from error
        except broken as error:
            raise InputError(f"{shown(path)} is not a Parquet file: {why(error)}", "write or copy it again") from error
        columns = _columns(shown(path), names, wanted)
        number = 0
        batches = file.batches(columns, _BATCH_ROWS)
        while True:
            try:
                batch = next(batches, None)
            except TooLarge as error:
                raise _too_much(path, error) from error
            except broken as error:
                raise InputError(
                    f"{shown(path)} is damaged after row {number}: {why(error)}", "write or copy it again"
                ) from error
            if batch is None:
                return
            yield from _batch_rows(path, number, batch, max_row)
            number += batch.num_rows


def _too_much(path: str, error: TooLarge) -> InputError:
    return InputError(f"{shown(path)} takes too much memory to read: {error}", MAX_ROW.hint)


def _batch_rows(path: str, before: int, batch: Any, max_row: int) -> Iterator[tuple[str, Row | PromptError]]:
    """The rows of an Arrow batch. Arrow does not check on reading that text is UTF-8, or that Python has such dates."""
    from specds.parquet_bounds import unfolded_bytes

    every = batch.to_struct_array()
    together: list[Row] | None = None
    with contextlib.suppress(*damage()):
        together = batch.to_pylist() if unfolded_bytes(every) <= max_row else None
    for index in range(batch.num_rows):
        where = f"{shown(path)}:row {before + index + 1}"
        if together is not None:
            yield where, together[index]
        elif unfolded_bytes(every.slice(index, 1)) > max_row:
            yield where, _too_long(where, max_row)
        else:
            row = _one_row(batch.slice(index, 1))
            yield where, PromptError(f"{where} {row}", _RESAVE) if isinstance(row, str) else row


def _one_row(batch: Any) -> Row | str:
    """The only row of a batch; where Python does not know its values (a date beyond the year 9999), what is wrong."""
    try:
        row: Row = batch.to_pylist()[0]
    except UnicodeDecodeError:
        return "is not UTF-8"
    except damage() as error:
        return f"cannot be read: {why(error)}"
    return row


def _size(value: object) -> int:
    """Bytes of a value's texts, about."""
    if isinstance(value, dict):
        return sum(map(_size, value.values()))
    if isinstance(value, list):
        return sum(map(_size, value)) + 8 * len(value)
    return len(value) if isinstance(value, str | bytes) else 8


def _columns(name: str, found: list[str], wanted: Wanted, hint: str = "") -> list[str]:
    """The columns to read; InputError if they are of no layout, as then no row can be used, or one stands twice."""
    if not any(set(layout) <= set(found) for layout in wanted.layouts):
        raise InputError(f"{name} must have {_asked(wanted)}, but has {listed(map(repr, found))}", hint or wanted.hint)
    fields = dict.fromkeys([*itertools.chain(*wanted.layouts), *wanted.also])
    if twice := [field for field in fields if found.count(field) > 1]:
        raise InputError(f"{name} has the column {twice[0]!r} twice", "leave one of them out")
    return [field for field in fields if field in found]


def _asked(wanted: Wanted) -> str:
    return " or ".join(" with ".join(repr(field) for field in layout) for layout in wanted.layouts)


@contextmanager
def _opened(path: str) -> Iterator[IO[bytes]]:
    """A file's bytes, unpacked where its name or its first bytes say that it is packed."""
    if path == STDIN:
        if sys.stdin is None:
            raise InputError("stdin is closed", "pass a file, or pipe prompts in")
        buffer = sys.stdin.buffer
        yield _unpacking(path, buffer) if isinstance(buffer, io.BufferedReader) else buffer
        return
    check_file(path)
    try:
        stream = Path(path).open("rb")  # noqa: SIM115
    except OSError as error:
        raise _unreadable(path, error) from error
    with stream:
        yield _unpacking(path, stream)


def _unpacking(path: str, stream: io.BufferedReader) -> IO[bytes]:
    try:
        head = stream.peek(len(_ZSTD))
    except OSError as error:
        raise _unreadable(path, error) from error
    if path.lower().endswith(".gz") or head.startswith(_GZIP):
        return cast(IO[bytes], gzip.GzipFile(fileobj=stream))
    if path.lower().endswith(".zst") or head.startswith(_ZSTD):
        import pyarrow as pa

        return io.BufferedReader(pa.CompressedInputStream(stream, "zstd"))
    return stream


def _read_line(stream: IO[bytes], max_line: int) -> tuple[bytes, bool]:
    """The next line and whether that is the whole of it; of a line that is too long the rest is skipped."""
    line = stream.readline(max_line + 1)
    if len(line) <= max_line or line.endswith(b"\n"):
        return line, True
    while (rest := stream.readline(_SKIP_BYTES)) and not rest.endswith(b"\n"):
        pass
    return line[:4], False


def _elsewhere(path: str, scheme: str) -> InputError:
    hint = "download it and pass the file"
    if scheme.lower() == "hf://":
        hint += "; `specds ingest owner/name` reads a data set of the hub"
    return InputError(f"{shown(path)}: nothing is read over {scheme}", hint)


def _unreadable(path: str, error: Exception) -> InputError:
    return InputError(f"{shown(path)} cannot be read: {_reason(error)}", "check the path and the file")


def _reason(error: Exception) -> str:
    """The first line of what an error says, without Python's errno notation."""
    text = (isinstance(error, OSError) and error.strerror) or str(error).strip() or type(error).__name__
    return text.splitlines()[0]
