"""The rows of a Parquet file, read in batches that fit into memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from specds.errors import InputError, PromptError
from specds.limits import MAX_ROW
from specds.parquet import TooLarge, damage, why
from specds.reading.fields import Row, Wanted, columns_of
from specds.reading.input_file import STDIN, opened, shown, unpacked
from specds.reading.lines import RESAVE, too_long

_BATCH_ROWS = 256


def parquet_rows(path: str, wanted: Wanted, max_row: int) -> Iterator[tuple[str, Row | PromptError]]:
    """Each row of a Parquet file with its place, of the wanted columns; see `rows`."""
    from specds.parquet_bounds import BoundedFile

    if path == STDIN or unpacked(path) != path:
        raise InputError(
            f"{shown(path)}: Parquet is read from an unpacked file only", "write it to a file and pass that"
        )
    broken = damage()
    with opened(path) as stream:
        try:
            file = BoundedFile(stream)
            names = file.schema.names
        except TooLarge as error:
            raise _too_much(path, error) from error
        except broken as error:
            raise InputError(f"{shown(path)} is not a Parquet file: {why(error)}", "write or copy it again") from error
        columns = columns_of(shown(path), names, wanted)
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
            yield where, too_long(where, max_row)
        else:
            row = _one_row(batch.slice(index, 1))
            yield where, PromptError(f"{where} {row}", RESAVE) if isinstance(row, str) else row


def _one_row(batch: Any) -> Row | str:
    """The only row of a batch; where Python does not know its values (a date beyond the year 9999), what is wrong."""
    try:
        row: Row = batch.to_pylist()[0]
    except UnicodeDecodeError:
        return "is not UTF-8"
    except damage() as error:
        return f"cannot be read: {why(error)}"
    return row
