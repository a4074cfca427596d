"""The fields of a row: which a reader looks for, which a row or a file has, and what they hold."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from specds.errors import InputError, PromptError
from specds.printing import is_unicode

Layout = tuple[str, ...]
Row = dict[str, object]


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


def layout_of(where: str, row: Row, wanted: Wanted) -> Layout:
    """The first layout whose fields the row has; a null counts as absent, as Parquet knows no other absence.

    Raises:
        PromptError: there is none.
    """
    for layout in wanted.layouts:
        if all(row.get(field) is not None for field in layout):
            return layout
    fields = listed([repr(key) + (" (null)" if value is None else "") for key, value in row.items()])
    raise PromptError(f"{where} must have {_asked(wanted)}, but has {fields}", wanted.hint)


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


def columns_of(name: str, columns: list[str], wanted: Wanted, hint: str = "") -> list[str]:
    """The columns to read; InputError if they are of no layout, as then no row can be used, or one stands twice."""
    if not any(set(layout) <= set(columns) for layout in wanted.layouts):
        raise InputError(
            f"{name} must have {_asked(wanted)}, but has {listed(map(repr, columns))}", hint or wanted.hint
        )
    fields = dict.fromkeys([*itertools.chain(*wanted.layouts), *wanted.also])
    if twice := [field for field in fields if columns.count(field) > 1]:
        raise InputError(f"{name} has the column {twice[0]!r} twice", "leave one of them out")
    return [field for field in fields if field in columns]


def _asked(wanted: Wanted) -> str:
    return " or ".join(" with ".join(repr(field) for field in layout) for layout in wanted.layouts)
