"""The verify cost curve: what a pass of the target over n tokens costs."""

from __future__ import annotations

import contextlib
import hashlib
import json
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from specds.decode.contracts import Step, Target
from specds.decode.draft import chain
from specds.errors import OutputError
from specds.files import write_atomically
from specds.model import LanguageModel, cache_directory
from specds.version import __version__

ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 32, 48, 64, 96, 128)
CONTEXTS = (64, 512, 2048)
# Close together where drafts are: a runtime's pass has steps there, where another row of registers begins.
_QUICK_ROWS = (1, 2, 3, 4, 6, 8, 10, 12, 14, 16, 24, 32, 64)
_QUICK_CONTEXT = 256
_QUICK_SECONDS = 2.5
_ALWAYS = 16
_FORMAT = "specds cost curve 1"
_CONTEXT_STEP = 64
# Passes that a measured point is worth; passes after which they are forgotten; how much longer one may be than others.
_TRUSTED, _FORGOTTEN, _LEAP = 4, 32, 2.0
# Fewest passes of a row count that a curve of passes knows it by; rows that the prompts' passes stand for.
_LEAST_PASSES, _PROMPT_ROWS = 10, 128
# How many tokens apart contexts must be for a straight line through them.
_APART = 32
MOST_ROWS = 4096
"""Most rows of a pass that a curve is about."""
# Passes after which a correction is not believed any more: the machine may be busier, or less busy, again.
_STALE = 512


@dataclass(frozen=True, slots=True)
class CostCurve:
    """T(n): seconds of one pass over n rows (the last committed token and n - 1 drafted ones).

    Attributes:
        rows: ascending, from 1.
        contexts: ascending: committed tokens behind which it was measured.
        seconds: float64[contexts, rows]; never falls along the rows.
    """

    rows: tuple[int, ...]
    contexts: tuple[int, ...]
    seconds: NDArray[np.float64]

    def at(self, context: int) -> NDArray[np.float64]:
        """float64[largest n + 1]: entry n is T(n) behind so many tokens, linear between what was measured.

        Beyond the longest context it goes on as between the two longest. Entry 0 is 0.
        """
        table = np.maximum.accumulate(self.seconds, axis=0)
        line = table[0]
        if len(self.contexts) > 1:
            above = int(np.clip(np.searchsorted(self.contexts, context), 1, len(self.contexts) - 1))
            low, high = self.contexts[above - 1], self.contexts[above]
            share = max(0.0, (context - low) / (high - low))
            line = table[above - 1] + share * (table[above] - table[above - 1])
        every = np.interp(np.arange(self.rows[-1] + 1), self.rows, np.maximum.accumulate(line))
        every[0] = 0.0
        return every

    def predict(self, rows: NDArray[np.int64], contexts: NDArray[np.int64]) -> NDArray[np.float64]:
        """float64[n]: T(rows) behind contexts, pass by pass; what was not measured goes on in straight lines.

        Args:
            rows, contexts: int64[n], rows from 1 on.
        """
        table = np.maximum.accumulate(np.maximum.accumulate(self.seconds, axis=0), axis=1)

        def along(points: tuple[int, ...], values: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
            """The points below, and how far beyond them on the way to the next; none when there is one point."""
            if len(points) == 1:
                return np.zeros(len(values), np.int64), np.zeros(len(values))
            below = np.clip(np.searchsorted(points, values, "right") - 1, 0, len(points) - 2)
            low, high = np.array(points)[below], np.array(points)[below + 1]
            return below, np.maximum(0.0, (values - low) / (high - low))

        column, right = along(self.rows, rows)
        line, down = along(self.contexts, contexts)
        more, further = np.minimum(column + 1, len(self.rows) - 1), np.minimum(line + 1, len(self.contexts) - 1)
        upper = table[line, column] * (1 - right) + table[line, more] * right
        lower = table[further, column] * (1 - right) + table[further, more] * right
        return upper * (1 - down) + lower * down

    def record(self) -> dict[str, Any]:
        """The curve as JSON, as `save` writes it."""
        return {"format": _FORMAT, "rows": self.rows, "contexts": self.contexts, "seconds": self.seconds.tolist()}


@dataclass(frozen=True, slots=True)
class Passes:
    """Passes that a run made, for a curve of the run itself.

    Attributes:
        rows: int64[n]: rows of each.
        contexts: int64[n]: committed tokens behind which it ran.
        seconds: float64[n].
        prompts: int64[m]: tokens of prompts, of first turns only: of later ones the beginning is known already.
        prompt_seconds: float64[m].
    """

    rows: NDArray[np.int64]
    contexts: NDArray[np.int64]
    seconds: NDArray[np.float64]
    prompts: NDArray[np.int64]
    prompt_seconds: NDArray[np.float64]

    def curve(self) -> CostCurve | None:
        """T(n) by medians over passes of as many rows; None without ten of one row and ten of another number.

        Behind longer contexts every pass takes as much more as those of one row do, by a straight line. What prompts of
        several lengths took stands for a pass over many rows.
        """
        alone = self.rows == 1
        if not alone.any():
            return None
        low, high = int(self.contexts.min()), int(self.contexts.max())
        slope = _slope(self.contexts[alone], self.seconds[alone])
        level = self.seconds - slope * self.contexts
        points = {
            int(count): float(np.median(level[self.rows == count]))
            for count, passes in zip(*np.unique(self.rows, return_counts=True), strict=True)
            if passes >= _LEAST_PASSES
        }
        if 1 not in points or len(points) < 2:
            return None
        row = _slope(self.prompts, self.prompt_seconds) if len(self.prompts) else 0.0
        if row > 0:
            most = max(_PROMPT_ROWS, max(points) + 1)
            points[most] = max(0.0, float(np.median(self.prompt_seconds - row * self.prompts))) + row * most
        contexts = (low, high) if high > low else (low,)
        levels = np.maximum.accumulate(list(points.values()))
        table = levels[None, :] + slope * np.array(contexts)[:, None]
        return CostCurve(tuple(points), contexts, np.maximum(table, 1e-9))


def _slope(contexts: NDArray[np.int64], seconds: NDArray[np.float64]) -> float:
    """Seconds that each token adds, by the medians of the shorter half and the longer one; 0 where these are close."""
    middle = float(np.median(contexts))
    short, long = contexts <= middle, contexts > middle
    if not long.any():
        return 0.0
    apart = float(np.median(contexts[long]) - np.median(contexts[short]))
    if apart < _APART:
        return 0.0
    return max(0.0, float(np.median(seconds[long]) - np.median(seconds[short])) / apart)


class Prices(Protocol):
    """What passes cost, as far as one who chooses drafts must know."""

    @property
    def rows(self) -> tuple[int, ...]:
        """Ascending, from 1: row counts that are known; the last is the most there may be."""

    def at(self, context: int) -> NDArray[np.float64]:
        """float64[largest n + 1]: entry n is T(n) behind so many tokens; see `CostCurve.at`."""


class Corrected:
    """A curve that the passes of a run correct: the machine may be busier, or less busy, than when it was measured.

    Between row counts that passes had lately, corrections are interpolated. Beyond them the nearest one holds if it is
    for the better; if it is for the worse, what was measured does, so that more rows, or fewer, are tried before they
    are ruled out.

    Args:
        curve: as it was measured.
    """

    def __init__(self, curve: CostCurve) -> None:
        self._curve = curve
        self._factors = np.ones(curve.rows[-1] + 1)
        self._seen = np.zeros(curve.rows[-1] + 1)
        self._last, self._passes = np.zeros(curve.rows[-1] + 1, np.int64), 0
        self._expected, self._context = curve.at(0), 0

    @property
    def rows(self) -> tuple[int, ...]:
        """See `Prices.rows`."""
        return self._curve.rows

    def at(self, context: int) -> NDArray[np.float64]:
        """See `Prices.at`."""
        known = np.flatnonzero((self._seen > 0) & (self._passes - self._last < _STALE))
        expected = self._curve.at(context)
        if not len(known):
            return expected
        factors = self._factors[known]
        found = expected * np.interp(
            np.arange(len(expected)), known, factors, left=min(factors[0], 1.0), right=min(factors[-1], 1.0)
        )
        # More rows never cost less. Where they seem to, what passes took is believed before what was measured.
        last = known[-1]
        found[: last + 1] = np.minimum.accumulate(found[last::-1])[::-1]
        return np.maximum.accumulate(found)

    def observe(self, step: Step) -> None:
        """Learn from a pass over a draft; the prompt's says nothing."""
        rows = len(step.draft) + 1
        if not step.index or rows >= len(self._factors):
            return
        if abs(step.position - self._context) > _CONTEXT_STEP:
            self._expected, self._context = self._curve.at(step.position), step.position
        # On a GPU the wait for a pass is where its result is read.
        seconds = step.forward_seconds + step.verify_seconds
        if self._passes - self._last[rows] >= _STALE:
            self._factors[rows], self._seen[rows] = 1.0, 0.0
        factor, seen = self._factors[rows], self._seen[rows]
        # A pause of the machine is not the pass's.
        found = min(seconds / self._expected[rows], factor * _LEAP)
        # What was measured counts as much as some passes.
        self._factors[rows] += (found - factor) / min(seen + 1 + _TRUSTED, _FORGOTTEN)
        self._seen[rows] += 1
        self._passes += 1
        self._last[rows] = self._passes


def measure(
    target: Target,
    *,
    vocabulary: int,
    rows: Sequence[int] = ROWS,
    contexts: Sequence[int] = CONTEXTS,
    repeats: int = 7,
    seconds: float = float("inf"),
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> CostCurve:
    """Measure a target: medians over repeats that are interleaved over the row counts.

    Args:
        vocabulary: token ids below it are fed; which ones does not matter to a dense model.
        seconds: when this much time is spent, leave out counts above 16 that are not measured yet, and repeat no more.
        progress: called with (passes done, passes in all).
    """
    began = 0.0
    random = np.random.default_rng(0)
    found = np.zeros((len(contexts), len(rows)))
    measured = len(rows)
    passes, total = 0, len(contexts) * repeats * len(rows)
    for number, context in enumerate(contexts):
        target.prefill(random.integers(0, vocabulary, context).tolist())
        samples: list[list[float]] = [[] for _ in rows]
        for repeat in range(repeats):
            for place, count in enumerate(rows[:measured]):
                draft = chain(random.integers(0, vocabulary, count - 1), [0.5] * (count - 1))
                if repeat == 0:  # what is allocated, captured or compiled at first use
                    float(target.forward(0, draft).logits[-1, 0])
                    began = began or time.perf_counter()
                start = time.perf_counter()
                float(target.forward(0, draft).logits[-1, 0])
                samples[place].append(time.perf_counter() - start)
                passes += 1
                progress(passes, total)
                if repeat == 0 and count >= _ALWAYS and time.perf_counter() - began > seconds:
                    measured = place + 1
                    break
            if time.perf_counter() - began > seconds:
                break
        found[number, :measured] = [float(np.median(one)) for one in samples[:measured]]
    # More rows and a longer context never cost less; where they seem to, the machine was busy.
    smooth = np.maximum.accumulate(np.maximum.accumulate(found[:, :measured], axis=1), axis=0)
    return CostCurve(tuple(rows[:measured]), tuple(contexts), smooth)


def quick(target: Target, vocabulary: int, context_length: int) -> CostCurve:
    """A curve good enough to choose drafts by, in two or three seconds."""
    context = max(1, min(_QUICK_CONTEXT, context_length - _QUICK_ROWS[-1]))
    rows = [count for count in _QUICK_ROWS if context + count <= context_length] or [1]
    return measure(target, vocabulary=vocabulary, rows=rows, contexts=[context], repeats=3, seconds=_QUICK_SECONDS)


def known(target: Target, model: LanguageModel, runtime: str) -> CostCurve:
    """The kept curve of this model on this machine; where there is none a quick one, which is kept then."""
    import torch

    path = profile_path(model, runtime, torch.get_num_threads())
    curve = load(path)
    if curve is None:
        curve = quick(target, model.config.vocab_size, model.context_length)
        with contextlib.suppress(OutputError):  # a read-only cache costs two seconds a run, no more
            save(curve, path)
    return curve


def profile_path(model: LanguageModel, runtime: str, threads: int) -> Path:
    """Where the curve of a model on this machine is kept: by model, dtype, device, runtime, threads and version."""
    device = str(model.device)
    if model.device.type == "cuda":
        import torch

        device = torch.cuda.get_device_name(model.device)
    machine = [device, platform.node(), platform.processor()]
    parts = [model.fingerprint, model.dtype, *machine, runtime, str(threads), __version__]
    name = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
    return cache_directory() / "profiles" / f"{name}.json"


def save(curve: CostCurve, path: Path) -> None:
    """Write a curve, whole or not at all.

    Raises:
        OutputError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, (json.dumps(curve.record(), indent=1) + "\n").encode())
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror or error}", "set XDG_CACHE_HOME") from error


def load(path: Path) -> CostCurve | None:
    """A kept curve; None if there is none, or what is there is none."""
    try:
        if not path.is_file():  # a pipe would be waited for
            return None
        record = json.loads(path.read_bytes())
        rows, contexts = tuple(map(int, record["rows"])), tuple(map(int, record["contexts"]))
        seconds = np.array(record["seconds"], np.float64)
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
    ascending = all(list(one) == sorted(set(one)) for one in (rows, contexts))
    fits = seconds.shape == (len(contexts), len(rows)) and bool(np.isfinite(seconds).all() and (seconds > 0).all())
    if record.get("format") != _FORMAT or not rows or rows[0] != 1 or rows[-1] > MOST_ROWS or not ascending or not fits:
        return None
    return CostCurve(rows, contexts, seconds)
