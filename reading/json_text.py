"""JSON as a row or a value, or what is wrong with it."""

from __future__ import annotations

import json

from specds.errors import PromptError
from specds.reading.fields import Row, kind_of, listed


def parse(where: str, line: str) -> Row | PromptError:
    """One line of JSON as a row; else what is wrong with it."""
    hint = "each line must be one JSON object"
    value = parse_value(where, line, hint)
    if isinstance(value, list):
        hint += "; `jq -c '.[]'` turns an array into lines"
    if not isinstance(value, dict | PromptError):
        return PromptError(f"{where} must be an object, but is {kind_of(value)}", hint)
    return value


def parse_value(where: str, text: str, hint: str) -> object:
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


def _object(pairs: list[tuple[str, object]]) -> Row:
    row = dict(pairs)
    if len(row) != len(pairs):
        # Taking one of the two would be a guess about what the writer meant.
        keys = [key for key, _ in pairs]
        twice = next(key for key in row if keys.count(key) > 1)
        raise KeyError(listed([repr(twice)]))
    return row
