"""Options of `specds decode` in a file, as `specds tune` writes it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specds.errors import InputError, OutputError
from specds.files import target_of, write_atomically

_FORMAT = "specds decode options 1"
_FIELDS = {"drafter", "store", "set", "budget"}


@dataclass(frozen=True, slots=True)
class DecodeOptions:
    """What a configuration says to `decode`.

    Attributes:
        drafter: a name.
        stores: paths; relative ones in the file start at the file's folder.
        settings: the drafter's options, as text.
        budget: a number or `auto`.
    """

    drafter: str
    stores: tuple[Path, ...]
    settings: Mapping[str, str]
    budget: str


def write_config(path: Path, everything: DecodeOptions, groups: Mapping[str, DecodeOptions], about: Any) -> None:
    """Write options for all prompts and for groups of them.

    Args:
        about: where they come from; for people, not read again.

    Raises:
        OutputError: it cannot be written.
    """
    folder = path.resolve().parent

    def record(options: DecodeOptions) -> dict[str, Any]:
        stores = [os.path.relpath(store.resolve(), folder) for store in options.stores]
        return {"drafter": options.drafter, "store": stores, "set": options.settings, "budget": options.budget}

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


def read_config(name: str) -> DecodeOptions:
    """Options from `FILE`, or a group's from `FILE#GROUP`.

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


def _checked(path: Path, body: Any) -> DecodeOptions:
    if not isinstance(body, dict) or set(body) != _FIELDS:
        raise InputError(f"{path}: options are {', '.join(sorted(_FIELDS))}, all of them and no others", "tune again")
    drafter, stores, settings, budget = body["drafter"], body["store"], body["set"], body["budget"]
    texts = [drafter, budget, *(stores if isinstance(stores, list) else [None])]
    texts += [*settings, *settings.values()] if isinstance(settings, dict) else [None]
    if not all(isinstance(text, str) for text in texts):
        raise InputError(f"{path}: an option is of another kind than `specds tune` writes", "tune again")
    return DecodeOptions(drafter, tuple(path.parent / store for store in stores), settings, budget)
