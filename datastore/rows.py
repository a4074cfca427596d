"""Rows of text files: JSON lines, Parquet and Hugging Face data sets as dictionaries, one at a time.

A row that cannot be read is a value, a PromptError beside its place, so that the rows after it are still read.
A file that cannot be read is an InputError. Places read "file:row N"; N counts from 1, in a text file as editors
count lines.
"""

from __future__ import annotations

import gzip
import itertools
import json
import os
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

FORMATS = ("jsonl", "parquet", "text")
MAX_LINE = 64 * 1024 * 1024  # bytes; a longer line is refused before it fills the memory
STDIN = "-"

Layout = tuple[str, ...]
Row = dict[str, object]

_SUFFIXES = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".parquet": "parquet"}
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
    """

    layouts: tuple[Layout, ...]
    also: tuple[str, ...] = ()
    hint: str = ""
    line: str = "text"


def format_of(path: str, format: str | None = None) -> str | None:
    """The format of a file: the one asked for, else by its name; None for standard input, to be told by its content.

    Raises:
        UsageError: no such format.
    """
    if format is not None:
        if format not in FORMATS:
            raise UsageError(f"unknown format {format!r}", f"one of {', '.join(FORMATS)}")
        return format
    if path == STDIN:
        return None
    return _SUFFIXES.get(Path(path.lower().removesuffix(".gz")).suffix, "text")


def check_file(path: str, *, missing: str = "check the path") -> None:
    """Refuse what cannot be opened as a file, without opening it: a named pipe can be opened only once.

    Args:
        path: a file, or "-".
        missing: the hint where there is no such file.

    Raises:
        InputError: no such file, a directory, or no permission.
    """
    if path == STDIN:
        return
    try:
        mode = Path(path).stat().st_mode
    except FileNotFoundError as error:
        raise InputError(f"{shown(path)}: no such file", missing) from error
    except (OSError, ValueError) as error:
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
                import pyarrow.parquet as pq

                found += pq.read_metadata(path).num_rows
            elif Path(path).stat().st_size > _COUNTED:
                return None
            else:
                found += sum(1 for _ in lines(path))
        except (InputError, OSError, ValueError):  # whoever reads it says what is wrong with it
            return None
    return found


def rows(
    path: str, wanted: Wanted, *, format: str | None = None, max_line: int = MAX_LINE
) -> Iterator[tuple[str, Row | PromptError]]:
    """Each row of a file with its place, as soon as it is there; a row that cannot be read is a PromptError.

    Args:
        path: a file, or "-" for standard input (JSON lines if its first line starts with "{", else plain text).
        wanted: the fields looked for; of a Parquet file only these are read.
        format: one of FORMATS; by the file's name if None.
        max_line: bytes; the longest line that is read.

    Raises:
        InputError: the file cannot be read, or is a Parquet file without the columns of any layout.
        UsageError: no such format.
    """
    kind = format_of(path, format)
    if kind == "parquet":
        yield from _parquet_rows(path, wanted)
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
    while True:
        try:
            row = next(iterator)
        except StopIteration:
            return
        except Exception as error:
            raise InputError(f"data set {name}, after row {number}: {_reason(error)}", "check the network") from error
        number += 1
        yield f"{name}:row {number}", row


def lines(path: str, *, max_line: int = MAX_LINE) -> Iterator[tuple[str, str | PromptError]]:
    """Each line of a text file that is not blank, with its place and without its end; ".gz" files are unpacked.

    A line that is longer than max_line bytes, is not UTF-8 or holds a NUL is a PromptError.

    Raises:
        InputError: the file cannot be read, is a damaged gzip file, or is UTF-16.
    """
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
            if not whole:
                yield where, PromptError(f"{where} is longer than {max_line:,} bytes", "split it into shorter rows")
                continue
            line = decoded(where, raw.rstrip(b"\r\n"))
            if isinstance(line, PromptError) or line.strip():
                yield where, line


def document(path: str, *, max_bytes: int = MAX_LINE) -> str | PromptError:
    """The whole of a text file; a PromptError where `lines` would give one.

    Raises:
        InputError: the file cannot be read, or is UTF-16.
    """
    with _opened(path) as stream:
        try:
            raw = stream.read(max_bytes + 1)
        except (OSError, EOFError, zlib.error) as error:
            raise _unreadable(path, error) from error
    if len(raw) > max_bytes:
        return PromptError(f"{shown(path)} is longer than {max_bytes:,} bytes", "split it into shorter files")
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
    try:
        value = json.loads(line, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        return PromptError(f"{where} is not JSON: {error.msg} at column {error.colno}", hint)
    except RecursionError:
        return PromptError(f"{where} is not usable JSON: too deeply nested", hint)
    except KeyError as error:
        return PromptError(f"{where} is not usable JSON: the key {error.args[0]} stands twice in one object", hint)
    except ValueError:
        # Python reads no integer of more than 4,300 digits, and advises to change the interpreter's settings.
        return PromptError(f"{where} is not usable JSON: a number has too many digits", hint)
    if isinstance(value, list):
        hint += "; `jq -c '.[]'` turns an array into lines"
    if not isinstance(value, dict):
        return PromptError(f"{where} must be an object, but is {kind_of(value)}", hint)
    return value


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


def is_unicode(text: str) -> bool:
    """Whether the text has a UTF-8 form: JSON escapes can spell half a surrogate pair, which has none."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


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


def _parquet_rows(path: str, wanted: Wanted) -> Iterator[tuple[str, Row | PromptError]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    if path == STDIN or path.lower().endswith(".gz"):
        raise InputError(
            f"{shown(path)}: Parquet is read from an unpacked file only", "write it to a file and pass that"
        )
    broken = (OSError, pa.ArrowException)
    with _opened(path) as stream:
        try:
            file = pq.ParquetFile(stream)
        except broken as error:
            raise InputError(
                f"{shown(path)} is not a Parquet file: {_reason(error)}", "write or copy it again"
            ) from error
        columns = _columns(shown(path), file.schema_arrow.names, wanted)
        number = 0
        batches = file.iter_batches(batch_size=_BATCH_ROWS, columns=columns)
        while True:
            try:
                batch = next(batches, None)
            except broken as error:
                raise InputError(
                    f"{shown(path)} is damaged after row {number}: {_reason(error)}", "write or copy it again"
                ) from error
            if batch is None:
                return
            for row in _batch_rows(batch):
                number += 1
                where = f"{shown(path)}:row {number}"
                yield where, PromptError(f"{where} is not UTF-8", _RESAVE) if row is None else row


def _batch_rows(batch: Any) -> Iterator[Row | None]:
    """The rows of an Arrow batch; None for one whose text is not UTF-8, which Arrow does not check as it reads."""
    try:
        yield from batch.to_pylist()
    except UnicodeDecodeError:
        for index in range(batch.num_rows):
            try:
                yield from batch.slice(index, 1).to_pylist()
            except UnicodeDecodeError:
                yield None


def _columns(name: str, found: list[str], wanted: Wanted) -> list[str]:
    """The columns to read; InputError if they are of no layout, as then no row can be used."""
    if not any(set(layout) <= set(found) for layout in wanted.layouts):
        raise InputError(f"{name} must have {_asked(wanted)}, but has {listed(map(repr, found))}", wanted.hint)
    fields = dict.fromkeys([*itertools.chain(*wanted.layouts), *wanted.also])
    return [field for field in fields if field in found]


def _asked(wanted: Wanted) -> str:
    return " or ".join(" with ".join(repr(field) for field in layout) for layout in wanted.layouts)


@contextmanager
def _opened(path: str) -> Iterator[IO[bytes]]:
    if path == STDIN:
        if sys.stdin is None:
            raise InputError("stdin is closed", "pass a file, or pipe prompts in")
        yield sys.stdin.buffer
        return
    check_file(path)
    try:
        stream = cast(IO[bytes], gzip.open(path) if path.lower().endswith(".gz") else Path(path).open("rb"))  # noqa: SIM115
    except OSError as error:
        raise _unreadable(path, error) from error
    with stream:
        yield stream


def _read_line(stream: IO[bytes], max_line: int) -> tuple[bytes, bool]:
    """The next line and whether that is the whole of it; of a line that is too long the rest is skipped."""
    line = stream.readline(max_line + 1)
    if len(line) <= max_line or line.endswith(b"\n"):
        return line, True
    while (rest := stream.readline(_SKIP_BYTES)) and not rest.endswith(b"\n"):
        pass
    return line[:4], False


def _unreadable(path: str, error: Exception) -> InputError:
    return InputError(f"{shown(path)} cannot be read: {_reason(error)}", "check the path and the file")


def _reason(error: Exception) -> str:
    """The first line of what an error says, without Python's errno notation."""
    text = (isinstance(error, OSError) and error.strerror) or str(error).strip() or type(error).__name__
    return text.splitlines()[0]
