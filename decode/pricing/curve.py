"""The verify cost curve: what a pass of the target over n tokens costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

FORMAT = "specds cost curve 1"
_CONTEXT_STEP = 64
# Passes that a measured point is worth; passes after which they are forgotten; how much longer one may be than others.
_TRUSTED, _FORGOTTEN, _LEAP = 4, 32, 2.0
# Fewest passes of a row count that a curve of passes knows it by; rows that the prompts' passes stand for.
_LEAST_PASSES, _PROMPT_ROWS = 10, 128
# How many tokens apart contexts must be for a straight line through them.
_APART = 32
# Seconds; no pass takes less.
_LEAST_COST = 1e-9
MOST_ROWS = 4096
"""Most rows of a pass that a curve is about."""
# Passes after which a correction is not believed any more: the machine may be busier, or less busy, again.
_STALE = 512


@dataclass(frozen=True, slots=True)
class Load:
    """What a pass is made of besides drafts.

    Attributes:
        contexts: of each request that writes, the tokens behind which it does.
        prompt_rows: tokens of prompts that the pass takes in.
    """

    contexts: Sequence[int]
    prompt_rows: int


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

    @property
    def measured(self) -> CostCurve:
        """See `Prices.measured`."""
        return self

    def costs(self, load: Load, most: int) -> NDArray[np.float64]:
        """See `Prices.costs`."""
        return pass_costs(self, load, most)

    def learn(self, load: Load, rows: int, seconds: float) -> None:
        """See `Prices.learn`: what was measured stays."""

    def record(self) -> dict[str, Any]:
        """The curve as JSON, as `measurement.save` writes it."""
        return {"format": FORMAT, "rows": self.rows, "contexts": self.contexts, "seconds": self.seconds.tolist()}


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

    @property
    def measured(self) -> CostCurve:
        """The curve before anything was learned."""

    def at(self, context: int) -> NDArray[np.float64]:
        """float64[largest n + 1]: entry n is T(n) behind so many tokens; see `CostCurve.at`."""

    def costs(self, load: Load, most: int) -> NDArray[np.float64]:
        """float64[most + 2]: entry 1 + n is what a pass takes with n draft nodes; the time that parts of prompts would
        take by themselves is left out.
        """

    def learn(self, load: Load, rows: int, seconds: float) -> None:
        """What a pass over `rows` query tokens took."""


def pass_costs(prices: Prices, load: Load, most: int) -> NDArray[np.float64]:
    """See `Prices.costs`.

    Each request looks at its own context: what that takes beyond the shortest context measured is added once for each.
    """
    requests = len(load.contexts)
    context = sum(load.contexts) // requests
    first = load.prompt_rows + requests
    every = _longer(prices.at(context), first + most + 1)
    cost = np.empty(most + 2)
    cost[0], cost[1:] = 0.0, every[first : first + most + 1]
    if load.prompt_rows:
        # Where more query tokens seem to cost nothing, they still cost what they do beyond.
        least = _slope_beyond(every) * np.arange(requests, requests + most + 1)
        cost[1:] = np.maximum(cost[1:] - every[load.prompt_rows], np.maximum(least, _LEAST_COST))
    if requests > 1:
        cost[1:] += (requests - 1) * max(0.0, float(every[1] - prices.at(0)[1]))
    return cost


def _longer(every: NDArray[np.float64], length: int) -> NDArray[np.float64]:
    """T(n) for n below `length`, beyond what is known in a straight line, as over its last half."""
    known = len(every) - 1
    if length <= known + 1:
        return every
    return np.concatenate([every, every[known] + _slope_beyond(every) * np.arange(1, length - known)])


def _slope_beyond(every: NDArray[np.float64]) -> float:
    """Seconds of one more query token, over the last half of what is known."""
    known = len(every) - 1
    return float(every[known] - every[known // 2]) / max(known - known // 2, 1)


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
        self._priced: tuple[int, int, int, int] | None = None
        self._costs = self._expected = np.ones(2)

    @property
    def rows(self) -> tuple[int, ...]:
        """See `Prices.rows`."""
        return self._curve.rows

    @property
    def measured(self) -> CostCurve:
        """See `Prices.measured`."""
        return self._curve

    def at(self, context: int) -> NDArray[np.float64]:
        """See `Prices.at`."""
        known = np.flatnonzero((self._seen > 0) & (self._passes - self._last < _STALE))
        expected = self._curve.at(context)
        if not len(known):
            return expected
        factors = self._factors[known]
        corrected = expected * np.interp(
            np.arange(len(expected)), known, factors, left=min(factors[0], 1.0), right=min(factors[-1], 1.0)
        )
        # More rows never cost less. Where they seem to, what passes took is believed before what was measured.
        last = known[-1]
        corrected[: last + 1] = np.minimum.accumulate(corrected[last::-1])[::-1]
        return np.maximum.accumulate(corrected)

    def costs(self, load: Load, most: int) -> NDArray[np.float64]:
        """See `Prices.costs`; looked up again when the load is another."""
        context = sum(load.contexts) // len(load.contexts)
        known = self._priced
        same = known is not None and known[:3] == (len(load.contexts), load.prompt_rows, most)
        if known is None or not same or abs(context - known[3]) > _CONTEXT_STEP:
            self._priced = (len(load.contexts), load.prompt_rows, most, context)
            self._costs, self._expected = pass_costs(self, load, most), pass_costs(self._curve, load, most)
        return self._costs

    def learn(self, load: Load, rows: int, seconds: float) -> None:
        """See `Prices.learn`. A pass that reads prompts says nothing, nor does one of more rows than were measured."""
        if load.prompt_rows or not load.contexts or self._priced is None or rows >= len(self._factors):
            return
        expected = float(self._expected[1 + rows - len(load.contexts)])
        if self._passes - self._last[rows] >= _STALE:
            self._factors[rows], self._seen[rows] = 1.0, 0.0
        factor, seen = self._factors[rows], self._seen[rows]
        # A pause of the machine is not the pass's.
        observed = min(seconds / expected, factor * _LEAP)
        # What was measured counts as much as some passes.
        self._factors[rows] += (observed - factor) / min(seen + 1 + _TRUSTED, _FORGOTTEN)
        self._seen[rows] += 1
        self._passes += 1
        self._last[rows] = self._passes
