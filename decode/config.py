"""Options of `specds decode` in a file, as `specds tune` writes it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specds.decode.method import Method, parse_budget, written_budget
from specds.errors import InputError, OutputError
from specds.files import target_of, write_atomically

_FORMAT = "specds decode options 1"
_FIELDS = {"drafter", "store", "set", "budget"}


def write_config(path: Path, everything: Method, groups: Mapping[str, Method], about: Any) -> None:
    """Write a method for all prompts, and those for groups of them; relative paths start at the file's folder.

    Args:
        about: where they come from; for people, not read again.

    Raises:
        OutputError: it cannot be written.
    """
    folder = path.resolve().parent

    def record(method: Method) -> dict[str, Any]:
        stores = [os.path.relpath(path.resolve(), folder) for path in method.paths]
        budget = written_budget(method.budget)
        return {"drafter": method.drafter, "store": stores, "set": dict(method.options), "budget": budget}

    body = {
        "format": _FORMAT,
        **record(everything),
        "groups": {name: record(options) for name, options in groups.items()},
        "about": about,
    }
    try:
        write_atomically(target_of(path), (json.dumps(body, indent=1) + "\n").encode())
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror or error}", "choose another --output") from error


def read_config(name: str) -> Method:
    """The method in `FILE`, or a group's in `FILE#GROUP`.

    Raises:
        InputError: there is no such file or group, or it holds something else.
    """
    path, group = Path(name), ""
    if not path.exists() and "#" in name:
        file, _, group = name.rpartition("#")
        path = Path(file)
    try:
        body = json.loads(path.read_bytes())
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}", "`specds tune` writes one") from error
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict) or body.get("format") != _FORMAT:
        raise InputError(f"{path} holds no options of `specds decode`", "`specds tune` writes one")
    if group:
        groups = body.get("groups")
        if not isinstance(groups, dict) or group not in groups:
            known = ", ".join(groups) if isinstance(groups, dict) and groups else "none"
            raise InputError(f"{path} has no group {group!r}", f"its groups: {known}")
        body = groups[group]
    else:
        body = {name: value for name, value in body.items() if name in _FIELDS}
    return _checked(path, body)


def _checked(path: Path, body: Any) -> Method:
    if not isinstance(body, dict) or set(body) != _FIELDS:
        raise InputError(f"{path}: options are {', '.join(sorted(_FIELDS))}, all of them and no others", "tune again")
    drafter, stores, settings, budget = body["drafter"], body["store"], body["set"], body["budget"]
    texts = [drafter, budget, *(stores if isinstance(stores, list) else [None])]
    texts += [*settings, *settings.values()] if isinstance(settings, dict) else [None]
    if not all(isinstance(text, str) for text in texts):
        raise InputError(f"{path}: an option is of another kind than `specds tune` writes", "tune again")
    try:
        nodes = parse_budget(budget)
    except ValueError as error:
        raise InputError(f"{path}: the budget {error}", "tune again") from error
    return Method(drafter, settings, tuple(path.parent / store for store in stores), nodes)
