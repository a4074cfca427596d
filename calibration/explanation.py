"""Where the speed of a run came from: its trace, source by source, and what it would have been without each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from specds.calibration.trace import read_trace
from specds.errors import InputError
from specds.reading.input_file import shown

_COLUMNS = (
    "prompt",
    "turn",
    "step",
    "forward_pass",
    "pass_tokens",
    "drafter",
    "committed",
    "accepted",
    "draft_sources",
    "path",
    "asked",
    "asked_seconds",
    "draft_seconds",
    "forward_seconds",
    "verify_seconds",
    "commit_seconds",
)


@dataclass(frozen=True, slots=True)
class Share:
    """What one source contributed.

    Attributes:
        name: the source.
        drafted: verified nodes that it proposed, alone or with others.
        accepted: of these the committed ones.
        alone: committed nodes that nobody else proposed.
        seconds: what asking it took; None if that was not measured by itself.
        without: seconds that the run would have taken without it.
    """

    name: str
    drafted: int
    accepted: int
    alone: int
    seconds: float | None
    without: float


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a trace says.

    Attributes:
        drafter: whose trace it is.
        steps, tokens, drafted, accepted: counted, prompts' own passes included.
        passes: forward passes that the steps were part of.
        seconds: of all parts; of passes that requests shared, their shares.
        drafting: of these in the drafter.
        plain: seconds that one token a step would have taken, with as many requests in each pass.
        row: seconds that one more query token of a pass takes.
        sources: the largest share first.
    """

    drafter: str
    steps: int
    passes: int
    tokens: int
    drafted: int
    accepted: int
    seconds: float
    drafting: float
    plain: float
    row: float
    sources: tuple[Share, ...]


def explain(path: str) -> Explanation:
    """Read a trace and share out what it saved.

    Without a source the nodes that only it proposed are not verified, which saves their rows; each of them that was
    accepted breaks the path, and takes a pass of its own. What that source's absence would have let others propose
    later in the text is not known from a trace; `specds replay` with `auto?without=…` knows.

    Raises:
        InputError: it cannot be read, is not a trace, or is empty.
    """
    rows = read_trace(path, _COLUMNS)
    if any(len(row["asked"]) != len(row["asked_seconds"]) for row in rows):
        raise InputError(f"{shown(path)} is not a trace: a field is empty", "give a file that `decode --trace` wrote")
    if not rows:
        raise InputError(f"{shown(path)} holds no steps", "give a file that `decode --trace` wrote")
    later = [row for row in rows if row["step"] > 0]
    passes = _passes(later)
    one, more = _line(passes)
    # What a token a step takes of each step's pass.
    token = {id(row): (one + more * (len(steps) - 1)) / len(steps) for steps in passes for row in steps}
    seconds = sum(row[f"{part}_seconds"] for row in rows for part in ("draft", "forward", "verify", "commit"))
    first = sum(row["forward_seconds"] + row["verify_seconds"] for row in rows if row["step"] == 0)
    drafted: dict[str, int] = {}
    accepted: dict[str, int] = {}
    alone: dict[str, int] = {}
    lost: dict[str, float] = {}
    lonely: dict[str, int] = {}
    asked: dict[str, float] = {}
    for row in rows:
        for name, spent in zip(row["asked"], row["asked_seconds"], strict=True):
            asked[name] = asked.get(name, 0.0) + spent
        taken = set(row["path"][: row["accepted"]])
        for node, names in enumerate(row["draft_sources"]):
            parts = names.split("+")
            for name in parts:
                drafted[name] = drafted.get(name, 0) + 1
                accepted[name] = accepted.get(name, 0) + (node in taken)
            if len(parts) == 1:
                alone[names] = alone.get(names, 0) + (node in taken)
                lost[names] = lost.get(names, 0.0) + (token[id(row)] if node in taken else 0.0)
                lonely[names] = lonely.get(names, 0) + 1
    # A source that was asked and never drafted from costs, too.
    names = sorted({*drafted, *(set(asked) - {"tree"})}, key=lambda name: (-accepted.get(name, 0), name))
    sources = [
        Share(
            name,
            drafted.get(name, 0),
            accepted.get(name, 0),
            alone.get(name, 0),
            asked.get(name),
            seconds - asked.get(name, 0.0) + lost.get(name, 0.0) - lonely.get(name, 0) * more,
        )
        for name in names
    ]
    return Explanation(
        str(rows[0]["drafter"]),
        len(rows),
        len({row["forward_pass"] for row in rows}),
        sum(row["committed"] for row in rows),
        sum(len(row["draft_sources"]) for row in rows),
        sum(row["accepted"] for row in rows),
        seconds,
        sum(row["draft_seconds"] for row in rows),
        first + sum(row["committed"] * token[id(row)] for row in later),
        more,
        tuple(sources),
    )


def _passes(later: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The steps behind prompts, pass by pass."""
    passes: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for number, row in enumerate(later):
        alone = len(row["draft_sources"]) + 1 == row["pass_tokens"]
        # The answers of a bench are counted each by itself; none of them shares a pass.
        passes.setdefault(("alone", number) if alone else ("shared", row["forward_pass"]), []).append(row)
    return list(passes.values())


def _line(passes: list[list[dict[str, Any]]]) -> tuple[float, float]:
    """See `pass_line`; passes that read prompts, too, are left out as far as there are others."""
    tokens = [sum(len(row["draft_sources"]) + 1 for row in steps) for steps in passes]
    # A GPU works on while the CPU waits for the result in the verifier.
    took = [sum(row["forward_seconds"] + row["verify_seconds"] for row in steps) for steps in passes]
    whole = [count == steps[0]["pass_tokens"] for count, steps in zip(tokens, passes, strict=True)]
    kept = np.array(whole if any(whole) else [True] * len(passes), np.bool_)
    rows = np.array([[1.0, count - 1] for count in tokens]).reshape(-1, 2)
    return pass_line(rows[kept], np.array(took)[kept])


def pass_line(passes: Any, took: Any) -> tuple[float, float]:
    """Seconds of a pass over one token, and of each further row, as a straight line that does not fall.

    Args:
        passes: float64[n, 2]: 1, and the rows beyond the first.
        took: float64[n], seconds.
    """
    if not len(took):
        return 0.0, 0.0
    if np.ptp(passes[:, 1]) == 0:
        return float(took.mean()), 0.0
    (single, more), *_ = np.linalg.lstsq(passes, took, rcond=None)
    if more < 0 or single <= 0:
        return float(took.mean()), 0.0
    return float(single), float(more)
