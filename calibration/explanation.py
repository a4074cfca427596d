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
        seconds: of all parts.
        drafting: of these in the drafter.
        plain: seconds that as many passes over one token as there are tokens would have taken.
        row: seconds that one more row of a pass takes.
        sources: the largest share first.
    """

    drafter: str
    steps: int
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
    passes = np.array([[1.0, len(row["draft_sources"])] for row in later]).reshape(-1, 2)
    # A GPU works on while the CPU waits for the result in the verifier.
    took = np.array([row["forward_seconds"] + row["verify_seconds"] for row in later])
    single, more = pass_line(passes, took)
    seconds = sum(row[f"{part}_seconds"] for row in rows for part in ("draft", "forward", "verify", "commit"))
    first = sum(row["forward_seconds"] + row["verify_seconds"] for row in rows if row["step"] == 0)
    drafted: dict[str, int] = {}
    accepted: dict[str, int] = {}
    alone: dict[str, int] = {}
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
            seconds - asked.get(name, 0.0) + alone.get(name, 0) * single - lonely.get(name, 0) * more,
        )
        for name in names
    ]
    tokens = sum(row["committed"] for row in rows)
    prompts = len(rows) - len(later)
    return Explanation(
        str(rows[0]["drafter"]),
        len(rows),
        tokens,
        sum(len(row["draft_sources"]) for row in rows),
        sum(row["accepted"] for row in rows),
        seconds,
        sum(row["draft_seconds"] for row in rows),
        first + (tokens - prompts) * single,
        more,
        tuple(sources),
    )


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
