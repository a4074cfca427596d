"""The rows of a CSV or TSV file, which names its columns first."""

from __future__ import annotations

import csv
from collections.abc import Iterator

from specds.errors import InputError, PromptError
from specds.limits import MAX_ROW
from specds.reading.fields import Row, Wanted, columns_of
from specds.reading.input_file import shown
from specds.reading.json_text import parse_value
from specds.reading.lines import decoded, raw_lines


def csv_rows(path: str, wanted: Wanted, delimiter: str, max_line: int) -> Iterator[tuple[str, Row | PromptError]]:
    """The rows below a line of column names. An empty cell counts as absent, a row of nothing else as blank."""
    names: list[str] | None = None
    columns: list[str] = []
    for where, record in csv_records(path, delimiter, max_line):
        if names is not None:
            yield where, record if isinstance(record, PromptError) else _csv_row(where, names, record, columns, wanted)
            continue
        if isinstance(record, PromptError):
            raise InputError(record.message, record.hint)
        names = [name.strip() for name in record]
        columns = columns_of(
            shown(path), names, wanted, f"the first row of a CSV file names its columns; {wanted.hint}"
        )


def csv_records(path: str, delimiter: str, max_line: int) -> Iterator[tuple[str, list[str] | PromptError]]:
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
            value = parse_value(f"{where}, field {name!r}", cell, "in a CSV file a list is written as JSON")
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
        self._lines = raw_lines(path, max_line)
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
