"""Two results side by side: what was changed, and what came of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from specds.calibration.bench.figures import ALL, Estimate, middle, resamples
from specds.calibration.bench.judge import PLAIN
from specds.calibration.bench.results import SUMMARY, Row, checked_sessions, read_json, read_rows
from specds.errors import InputError

Pair = list[Any]
# A figure of a result is smaller, whatever is measured.
_MOST = 1e30


def compare(first: Path, second: Path) -> dict[str, Any]:
    """What two results say.

    `changed`: options, machine, versions and commit that are not the same, each as [first, second]. `only`: the
    methods and groups that one of them lacks. `groups`: for each group and method of both, `speedup`, `mat` and
    `tokens_per_second` as [first, second], `overlap` of each (None where an interval is missing), and `paired`: over
    the prompts that both hold, the median of the second's tokens/s over the first's, with its interval.

    Raises:
        InputError: one of them is not a result.
    """
    summaries = [read_json(path / SUMMARY) for path in (first, second)]
    try:
        return _compare([first, second], summaries, [read_rows(path) for path in (first, second)])
    except (KeyError, TypeError, IndexError, AttributeError, ValueError, RecursionError) as error:
        raise InputError(f"{first} or {second} is not a result of `specds bench`", "measure again") from error


def _compare(paths: list[Path], summaries: list[dict[str, Any]], rows: list[list[Row]]) -> dict[str, Any]:
    first, second = summaries
    names = [[_name(method["name"]) for method in summary["methods"]] for summary in summaries]
    groups = [{_name(group["group"]): group["methods"] for group in summary["groups"]} for summary in summaries]
    speeds = [_speeds(some) for some in rows]
    both = [name for name in names[0] if name in names[1]]
    table = []
    for group in groups[0]:
        if group not in groups[1]:
            continue
        for method in both:
            figures = [some[group][method] for some in groups]
            pairs = {
                "speedup": [_estimate(figure["speedup"][PLAIN]) for figure in figures],
                "mat": [_estimate(figure["mat"]) for figure in figures],
                "tokens_per_second": [_estimate(figure["tokens_per_second"]) for figure in figures],
            }
            overlap = {name: overlaps(*pair) for name, pair in pairs.items()}
            paired = _paired(speeds, method, group if len(groups[0]) > 1 and group != ALL else None)
            table.append({"group": group, "method": method, **pairs, "overlap": overlap, "paired": paired})
    return {
        "results": [str(path) for path in paths],
        "valid": [summary["valid"] is True for summary in summaries],
        "changed": _changed(first, second),
        "only": {
            "methods": [_without(*names), _without(*reversed(names))],
            "groups": [_without(*map(list, groups)), _without(*map(list, reversed(groups)))],
        },
        "groups": table,
    }


def overlaps(first: dict[str, Any] | None, second: dict[str, Any] | None) -> bool | None:
    """Whether two intervals overlap; None where one of them is missing."""
    if first is None or second is None or first["low"] is None or second["low"] is None:
        return None
    return bool(first["low"] <= second["high"] and second["low"] <= first["high"])


def _changed(first: dict[str, Any], second: dict[str, Any]) -> dict[str, dict[str, Pair]]:
    last = [checked_sessions(summary["sessions"])[-1] for summary in (first, second)]
    sides = {
        "options": [first["options"], second["options"]],
        "machine": [session["machine"] for session in last],
        "versions": [session["versions"] for session in last],
        "git": [session["git"] or {} for session in last],
    }
    return {
        what: {name: [a.get(name), b.get(name)] for name in {**a, **b} if a.get(name) != b.get(name)}
        for what, (a, b) in sides.items()
    }


def _name(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("a name is not text")
    return value


def _estimate(value: Any) -> Estimate | None:
    if value is None:
        return None
    estimate = {name: value[name] for name in ("value", "low", "high")}
    numbers = [number for name, number in estimate.items() if number is not None or name == "value"]
    if not all(isinstance(number, int | float) and abs(number) < _MOST for number in numbers):
        raise TypeError("a figure is not a number")
    return estimate


def _speeds(rows: list[Row]) -> dict[tuple[str, str, str], float]:
    """(group, prompt, method) → tokens a second, median over repeats; the same prompt has the same token ids."""
    speeds: dict[tuple[str, str, str], list[float]] = {}
    for row in rows:
        if not row["error"]:
            prompt = str((row["prompt"], row["prompt_tokens"][0]))
            speeds.setdefault((row["group"], prompt, row["method"]), []).append(row["new_tokens"] / row["seconds"])
    return {key: float(np.median(values)) for key, values in speeds.items()}


def _paired(speeds: list[dict[tuple[str, str, str], float]], method: str, group: str | None) -> dict[str, Any] | None:
    first, second = speeds
    keys = [key for key in first if key in second and key[2] == method and group in (None, key[0])]
    if not keys:
        return None
    values = np.array([second[key] / first[key] for key in keys])
    return {**middle(values, resamples(len(values))), "prompts": len(keys)}


def _without(names: list[str], others: list[str]) -> list[str]:
    return [name for name in names if name not in others]
