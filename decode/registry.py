"""Looking up registered classes, and turning `name=value` text into their options."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from specds.errors import UsageError


def load(registry: Mapping[str, str], name: str, what: str) -> Any:
    """The class registered under a name as `module:Class`; its module is imported now.

    Raises:
        UsageError: no such name; the message lists those there are.
    """
    if name not in registry:
        raise UsageError(f"no {what} {name!r}", f"one of {', '.join(registry)}")
    module, _, attribute = registry[name].partition(":")
    return getattr(import_module(module), attribute)


def option(default: Any, help: str, *, least: float | None = None, tries: Sequence[Any] | None = None) -> Any:
    """A field of an options dataclass.

    Args:
        help: one line.
        least: the smallest value allowed.
        tries: values that a search looks at beside the default; by default of numbers some smaller and larger ones.
    """
    return dataclasses.field(default=default, metadata={"help": help, "least": least, "tries": tries})


def choices(cls: Any) -> dict[str, list[str]]:
    """Values that a search looks at, option by option, as text; options without any are left out."""
    found: dict[str, list[str]] = {}
    for field in dataclasses.fields(cls):
        default: Any = field.default
        tries, least = field.metadata.get("tries"), field.metadata.get("least")
        if tries is None:
            number = isinstance(default, int | float) and not isinstance(default, bool) and default
            factors = (0.25, 0.5, 2, 4) if isinstance(default, int) else (0.5, 2)
            tries = [type(default)(default * factor) for factor in factors] if number else []
        values = [value for value in dict.fromkeys(tries) if value != default and (least is None or value >= least)]
        if values:
            found[field.name] = [str(value) for value in values]
    return found


def ordered(small: str, low: float, large: str, high: float) -> None:
    """Refuse a range that is empty.

    Raises:
        UsageError: the lower end is above the upper.
    """
    if low > high:
        raise UsageError(f"{small} is {low} and {large} is {high}", f"{small} is at most {large}")


def parse_options(cls: Any, settings: Mapping[str, str], owner: str) -> Any:
    """An options dataclass from text.

    Args:
        cls: the dataclass; its fields are int, float, str or bool.
        settings: field name → text.
        owner: whose options they are, for messages.

    Raises:
        UsageError: an unknown field, text that is not of the field's type, a value below the least allowed, or
            values that contradict each other.
    """
    fields = {field.name: field for field in dataclasses.fields(cls)}
    types = typing.get_type_hints(cls)
    values: dict[str, Any] = {}
    for name, text in settings.items():
        if name not in fields:
            known = ", ".join(fields) or "none at all"
            raise UsageError(f"{owner} has no option {name!r}", f"its options: {known}")
        values[name] = _parse(types[name], text, f"{owner} option {name}")
        least = fields[name].metadata.get("least")
        if least is not None and values[name] < least:
            raise UsageError(f"{owner} option {name} is {text}", f"at least {least:g}")
    return cls(**values)


def describe_options(cls: Any) -> list[tuple[str, str, str]]:
    """(name, default, help) of each option, in order."""
    return [(field.name, str(field.default), str(field.metadata.get("help", ""))) for field in dataclasses.fields(cls)]


def _parse(kind: Any, text: str, what: str) -> Any:
    if kind is bool:
        words = {
            "true": True,
            "yes": True,
            "on": True,
            "1": True,
            "false": False,
            "no": False,
            "off": False,
            "0": False,
        }
        if text.lower() in words:
            return words[text.lower()]
        raise UsageError(f"{what} is {text!r}", "true or false")
    try:
        return kind(text)
    except ValueError:
        raise UsageError(f"{what} is {text!r}", f"a value of type {kind.__name__}") from None
