"""The figures of a result: everything that its report shows, computed from its Parquet files."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specds.calibration.bench.judge import PLAIN
from specds.calibration.bench.results import Row, read_steps
from specds.decode.draft import along_paths

ALL = "all"
GENERATE = "hf-generate"
BUDGETS = (1, 2, 4, 8, 16, 32, 64)
LENGTHS = ("0", "1", "2", "3", "4", "5–7", "8 or more")
LEAST_TRIED = 5
FEW = 5
"""Prompts below which a group says little: its intervals are too narrow."""
DEPTHS = 12

_RESAMPLES = 2_000
_TAIL = 2.5
_LEAST_STEPS = 3
_STEP_COLUMNS = [
    "prompt",
    "method",
    "step",
    "drafted",
    "accepted",
    "committed",
    "draft_parents",
    "draft_scores",
    "path",
    "forward_seconds",
    "verify_seconds",
]
_SUMS = ("new_tokens", "steps", "drafted", "accepted", "path_drafted", "rescued")
_PARTS = ("claimed", "draft", "forward", "verify", "commit")

Samples = NDArray[np.int64]
Estimate = dict[str, float | None]


def resamples(prompts: int) -> Samples:
    """int64[resamples, prompts]: which prompts each bootstrap sample holds; the same for all methods: paired."""
    return np.random.default_rng(0).integers(0, prompts, (_RESAMPLES, prompts))


def estimate(value: float, drawn: NDArray[np.float64]) -> Estimate:
    """A figure with its 95 % interval, the bootstrap's percentiles; there is none of a single prompt."""
    if drawn.shape[-1] == 0 or not np.isfinite(drawn).all():
        return {"value": value, "low": None, "high": None}
    low, high = np.percentile(drawn, [_TAIL, 100 - _TAIL])
    return {"value": value, "low": float(low), "high": float(high)}


def ratio(top: NDArray[np.float64], bottom: NDArray[np.float64], samples: Samples) -> Estimate | None:
    """Sum over sum, over prompts; None where nothing is below, or something is not known."""
    if not (bottom.sum() > 0 and np.isfinite(top).all()):
        return None
    below = bottom[samples].sum(axis=1)
    drawn = top[samples].sum(axis=1)[below > 0] / below[below > 0]
    return estimate(float(top.sum() / bottom.sum()), drawn if len(top) > 1 else np.empty(0))


def middle(values: NDArray[np.float64], samples: Samples) -> Estimate:
    """Median over prompts."""
    drawn = np.median(values[samples], axis=1) if len(values) > 1 else np.empty(0)
    return estimate(float(np.median(values)), drawn)


def complete_prompts(rows: Sequence[Row]) -> list[str]:
    """The prompts that every contender answered at every repeat: only these are compared."""
    broken = {row["prompt"] for row in rows if row["error"]}
    return [prompt for prompt in dict.fromkeys(row["prompt"] for row in rows) if prompt not in broken]


def groups_of(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """For each group, and for all, what each method made of its prompts.

    Seconds and tokens of a prompt are medians over repeats, counts are means. Speedup is the median over prompts of
    the other's time per token over the method's; MAT, acceptance and tokens/s are sums over sums. Intervals are 95 %,
    by bootstrap over prompts.
    """
    prompts = complete_prompts(rows)
    methods = list(dict.fromkeys(row["method"] for row in rows))
    of: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        of[row["method"], row["prompt"]].append(row)
    group = {row["prompt"]: row["group"] for row in rows}
    names = list(dict.fromkeys(group[prompt] for prompt in prompts))
    chosen = {name: [prompt for prompt in prompts if group[prompt] == name] for name in names}
    if len(names) > 1:
        chosen[ALL] = prompts
    groups = []
    for name, some in chosen.items():
        samples = resamples(len(some))
        tables = {method: _table([of[method, prompt] for prompt in some]) for method in methods}
        figures = {method: _figures(tables[method], tables, samples) for method in methods}
        for method in methods:
            figures[method] |= _texts([row for prompt in some for row in of[method, prompt]])
        tokens = int(tables[PLAIN]["new_tokens"].sum())
        groups.append({"group": name, "prompts": len(some), "tokens": tokens, "methods": figures})
    return groups


Table = Mapping[str, NDArray[np.float64]]


def _table(prompts: Sequence[Sequence[Row]]) -> Table:
    """float64[prompts] of each measured column, over repeats."""

    def column(name: str, over: Any) -> NDArray[np.float64]:
        values = [[np.nan if row[name] is None else float(row[name]) for row in rows] for rows in prompts]
        return np.array([over(row_values) for row_values in values])

    columns = {name: column(name, np.mean) for name in _SUMS}
    columns |= {f"{part}_seconds": column(f"{part}_seconds", np.mean) for part in _PARTS}
    columns["seconds"] = column("seconds", np.median)
    each = [[row["seconds"] / row["new_tokens"] for row in rows] for rows in prompts]
    columns["per_token"] = np.array([np.median(times) for times in each])
    columns["spread"] = np.array([(max(times) - min(times)) / np.median(times) for times in each])
    return columns


def _figures(table: Table, tables: Mapping[str, Table], samples: Samples) -> dict[str, Any]:
    speedup = {
        base: middle(tables[base]["per_token"] / table["per_token"], samples)
        for base in (PLAIN, GENERATE)
        if base in tables
    }
    return {
        "tokens": float(table["new_tokens"].sum()),
        "seconds": float(table["seconds"].sum()),
        "tokens_per_second": ratio(table["new_tokens"], table["seconds"], samples),
        "speedup": speedup,
        "mat": ratio(table["new_tokens"], table["steps"], samples),
        "acceptance": ratio(table["accepted"], table["path_drafted"], samples),
        "node_acceptance": ratio(table["accepted"], table["drafted"], samples),
        "drafted_per_step": ratio(table["drafted"], table["steps"], samples),
        "drafting": ratio(table["draft_seconds"], table["claimed_seconds"], samples),
        "rescued": None if np.isnan(table["rescued"]).any() else float(table["rescued"].sum()),
        "spread": float(np.median(table["spread"])),
    }


def _texts(rows: Sequence[Row]) -> dict[str, Any]:
    def mean(values: Iterable[Any]) -> float | None:
        some = [float(value) for value in values if value is not None]
        return float(np.mean(some)) if some else None

    known = [row for row in rows if row.get("log_p") is not None]
    tokens = sum(row["new_tokens"] for row in known)
    return {
        "answers": len(rows),
        "same": sum(bool(row["same"]) for row in rows),
        "near_ties": sum(bool(row["near_tie"]) for row in rows),
        "log_p": sum(row["log_p"] for row in known) / tokens if tokens else None,
        "rouge_l": mean(row.get("rouge_l") for row in rows),
        "rouge_l_plain": mean(row.get("rouge_l_plain") for row in rows),
        "correct": mean(row.get("correct") for row in rows),
        "graded": sum(row.get("correct") is not None for row in rows),
    }


def steps_of(path: Path, prompts: Sequence[str]) -> dict[str, dict[str, Any]]:
    """What the steps of each of our methods show, prefills left out.

    `lengths`: how many steps accepted so many tokens. `depth`: of the steps whose draft went on to a depth beyond what
    was accepted before it, how many accepted a token there. `budget`: MAT of the same steps, had only the likeliest so
    many nodes been verified (the text would have gone on otherwise: an estimate, and only up to what was drafted).
    `shares` and `rate` are what is plotted of them, `low` and `high` the rate's interval. `cost`: median seconds of a
    pass with its verification, by rows.
    """
    wanted = set(prompts)
    seen_of: dict[str, _Seen] = defaultdict(_Seen)
    for batch in read_steps(path, _STEP_COLUMNS):
        for row in batch:
            if row["prompt"] in wanted:
                seen_of[row["method"]].add(row)
    return {method: seen.figures() for method, seen in seen_of.items()}


class _Seen:
    """Counts over the steps of one method."""

    def __init__(self) -> None:
        self.prefills = self.steps = self.most = self.tokens = 0
        self.lengths: Counter[int] = Counter()
        self.tried: dict[int, Counter[str]] = defaultdict(Counter)
        self.taken: dict[int, Counter[str]] = defaultdict(Counter)
        self.kept: Counter[int] = Counter()
        self.cost: dict[int, list[float]] = defaultdict(list)

    def add(self, row: Row) -> None:
        if row["step"] == 0:
            self.prefills += 1
            return
        accepted, parents = row["accepted"], row["draft_parents"]
        self.steps += 1
        self.most = max(self.most, row["drafted"])
        self.lengths[accepted] += 1
        self.cost[1 + row["drafted"]].append(row["forward_seconds"] + row["verify_seconds"])
        path = row["path"][:accepted]
        for depth, node in enumerate((-1, *path)):
            if node in parents:
                self.tried[depth + 1][row["prompt"]] += 1
                self.taken[depth + 1][row["prompt"]] += depth < accepted
        self.tokens += row["committed"]
        kept = dict.fromkeys(BUDGETS, 0)
        if path:
            # Trimming keeps the likeliest nodes, the first of equals, so that a budget keeps those of a lower rank.
            chance = along_paths(np.array(parents, np.int32), np.array(row["draft_scores"], np.float64))
            rank = np.empty(len(chance), np.int64)
            rank[np.argsort(-chance, kind="stable")] = np.arange(len(chance))
            kept = {budget: int((rank[path] < budget).sum()) for budget in BUDGETS}
        for budget, nodes in kept.items():
            # Of a step that a stop token ended, the target's own token may be missing.
            self.kept[budget] += min(row["committed"], nodes + 1)

    def figures(self) -> dict[str, Any]:
        passes = self.prefills + self.steps
        curve = [(0, self.steps), *((budget, self.kept[budget]) for budget in BUDGETS if budget < self.most)]
        if self.most:
            curve.append((self.most, self.tokens))
        return {
            "steps": self.steps,
            "lengths": [self.lengths[length] for length in range(max(self.lengths, default=0) + 1)],
            "shares": self._shares(),
            "depth": [self._depth(depth) for depth in sorted(self.tried)],
            "budget": [{"budget": budget, "mat": (self.prefills + tokens) / passes} for budget, tokens in curve],
            "cost": [
                {"rows": rows, "steps": len(seconds), "seconds": float(np.median(seconds))}
                for rows, seconds in sorted(self.cost.items())
                if len(seconds) >= _LEAST_STEPS
            ],
        }

    def _shares(self) -> list[float]:
        """The share of steps that accepted as many tokens as each of LENGTHS says."""
        some: Counter[int] = Counter()
        for length, count in self.lengths.items():
            some[min(length, 5) if length < 8 else 6] += count
        return [some[place] / (self.steps or 1) for place in range(len(LENGTHS))]

    def _depth(self, depth: int) -> dict[str, Any]:
        prompts = list(self.tried[depth])
        tried, taken = (
            np.array([counts[depth][prompt] for prompt in prompts], np.float64) for counts in (self.tried, self.taken)
        )
        counts_at = {"depth": depth, "tried": int(tried.sum()), "accepted": int(taken.sum())}
        rate: Estimate = {"value": None, "low": None, "high": None}
        if depth <= DEPTHS and tried.sum() >= LEAST_TRIED:
            rate = ratio(taken, tried, resamples(len(prompts))) or rate
        return {**counts_at, "rate": rate["value"], "low": rate["low"], "high": rate["high"]}


def passes_of(steps: Mapping[str, Mapping[str, Any]]) -> list[dict[str, float]]:
    """Seconds of this run's passes by rows: the methods' medians, weighted by how many steps had them."""
    sums: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for figures in steps.values():
        for size in figures["cost"]:
            sums[size["rows"]][0] += size["steps"] * size["seconds"]
            sums[size["rows"]][1] += size["steps"]
    return [{"rows": rows, "seconds": total / count} for rows, (total, count) in sorted(sums.items())]
