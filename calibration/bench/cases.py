"""Which prompts a benchmark asks, and the identity of what it asks."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specds.calibration.bench.figures import ALL
from specds.errors import InputError
from specds.reading.prompts import BadRow, Prompt, read_prompts


@dataclass(frozen=True, slots=True)
class Case:
    """A prompt that is measured.

    Attributes:
        key: unique in a run: the prompt's id, with a number after it where several prompts have the same.
        group: the row of the tables that it counts in.
    """

    key: str
    group: str
    prompt: Prompt | BadRow


def choose_cases(
    files: Sequence[str],
    *,
    limit: int | None = None,
    group: str | None = None,
    turns: int | None = None,
    format: str | None = None,
    prompt_field: str = "prompt",
) -> list[Case]:
    """The prompts of a run: of each group the same number, at even distances.

    Args:
        files: prompt files; `F.jsonl=16` has a limit of its own.
        limit: prompts of each group; None: all.
        group: the field that groups rows; None: a group is a file.
        turns: most turns of a prompt that are answered; None: all.

    Raises:
        InputError: no prompts, or a file that cannot be read.
    """
    cases: list[Case] = []
    seen: set[str] = set()
    for text in files:
        file, most = _with_limit(text, limit)
        held: dict[str, list[Prompt | BadRow]] = {}
        for row in read_prompts([file], format=format, prompt_field=prompt_field, group_field=group):
            name = (row.group if isinstance(row, Prompt) else None) or Path(file).name.partition(".")[0]
            held.setdefault(name, []).append(row)
        for name, rows in held.items():
            for row in _spread(rows, most):
                key = next(key for number in itertools.count(1) if (key := _numbered(row.id, number)) not in seen)
                seen.add(key)
                prompt = row
                if isinstance(row, Prompt):
                    prompt = Prompt(row.id, row.turns[:turns], row.raw, row.reference, row.group)
                cases.append(Case(key, f"{ALL} (file)" if name == ALL else name, prompt))
    if not cases:
        raise InputError(f"no prompts in {', '.join(files)}", "one prompt a line, as JSON or as plain text")
    return cases


def identity(cases: Sequence[Case]) -> str:
    """A digest of the prompts as they are asked: a run goes on only with the same."""
    content = [
        [case.key, case.group, case.prompt.content if isinstance(case.prompt, Prompt) else None] for case in cases
    ]
    return hashlib.sha256(json.dumps(content, ensure_ascii=True).encode()).hexdigest()


def _with_limit(text: str, limit: int | None) -> tuple[str, int | None]:
    file, equals, number = text.rpartition("=")
    if equals and number.isascii() and number.isdigit() and int(number) > 0 and not Path(text).exists():
        return file, int(number)
    return text, limit


def _spread(rows: list[Prompt | BadRow], limit: int | None) -> list[Prompt | BadRow]:
    if limit is None or limit >= len(rows):
        return rows
    return [rows[number * len(rows) // limit] for number in range(limit)]


def _numbered(name: str, number: int) -> str:
    return name if number == 1 else f"{name}#{number}"
