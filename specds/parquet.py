"""Parquet files that somebody else may have written: what pyarrow raises where one is not what it seems."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from specds.errors import SpecdsError, first_line
from specds.limits import MAX_ROW
from specds.printing import is_unicode

# Sums and quotients of what is smaller stay finite.
_MOST = 1e100
# Larger integers Arrow takes for no floating-point numbers, also where they are exact.
_MOST_WHOLE = 1 << 53


class TooLarge(ValueError):
    """Reading the file would take more memory than `MAX_ROW` allows."""


def damage() -> tuple[type[Exception], ...]:
    """What reading a damaged or strange file can raise: names that are not UTF-8, dates beyond all calendars, …"""
    import pyarrow as pa

    return pa.ArrowException, OSError, ValueError, KeyError, TypeError, OverflowError


def why(error: Exception) -> str:
    """What is wrong with a file, in a few words of one line."""
    if isinstance(error, UnicodeDecodeError):
        return "a name or a text in it is not UTF-8"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, TooLarge):
        return f"it takes too much memory to read: {error}; {MAX_ROW.hint}"
    return first_line(error)[:200]


@contextlib.contextmanager
def reading(refused: Callable[[str], SpecdsError]) -> Iterator[None]:
    """Whatever pyarrow raises in this block becomes the error that `refused` makes of the reason."""
    try:
        yield
    except damage() as error:
        raise refused(why(error)) from error


def require_columns(held: Any, wanted: Any) -> None:
    """Refuse a file whose columns are not those that its writer would have made.

    Args:
        held: the Arrow schema of the file.
        wanted: fields that must be there, by name and type; more may be.

    Raises:
        ValueError: one is missing, twice there, or of another type.
    """
    for field in wanted:
        places = held.get_all_field_indices(field.name)
        if len(places) != 1:
            raise ValueError(f"it has {'no' if not places else 'more than one'} column {field.name!r}")
        kind = held.field(places[0]).type
        if kind != field.type:
            raise ValueError(f"its column {field.name!r} is {kind}, not {field.type}"[:200])


def fits(value: Any, kind: Any) -> bool:
    """Whether a value is of an Arrow type, as JSON or `to_pylist` give it: nothing is coerced, floats are finite."""
    import pyarrow as pa

    if pa.types.is_list(kind):
        return isinstance(value, list) and all(fits(one, kind.value_type) for one in value)
    if pa.types.is_boolean(kind):
        return isinstance(value, bool)
    if pa.types.is_integer(kind):
        top = 1 << kind.bit_width - 1
        return isinstance(value, int) and not isinstance(value, bool) and -top <= value < top
    if pa.types.is_floating(kind):
        if isinstance(value, float):
            return abs(value) < _MOST
        return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= _MOST_WHOLE
    return isinstance(value, str) and is_unicode(value)
