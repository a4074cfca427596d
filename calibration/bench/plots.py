"""Plots as inline SVG: no script, no font, no file. Every mark carries the numbers that it shows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

WIDTH = 400
HUES = 8

_LETTER = 6.6  # px that a letter of a label takes, at most
_LONGEST = 24
_ROW = 22
_HEIGHT = 230
_DASHES = ("", "6 3", "2 3")


@dataclass(frozen=True, slots=True)
class Interval:
    """A row of a dot plot: a value and its interval, which may be unknown."""

    name: str
    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True)
class Line:
    """A series of a line plot.

    Attributes:
        points: (x, y), by ascending x.
        hue: its colour's number; series of one method have one colour in all plots.
        marks: whether points are shown alone, without a line.
    """

    name: str
    points: Sequence[tuple[float, float]]
    hue: int
    marks: bool = False


def intervals(title: str, rows: Sequence[Interval], reference: float, label: str) -> str:
    """A dot plot: a row each, with a line at `reference`."""
    left = _margin([row.name for row in rows])
    ends = [reference, *(end for row in rows for end in (row.low, row.value, row.high) if end is not None)]
    ticks = nice_ticks(min(0.0, *ends), max(ends), 5)
    height = 14 + _ROW * len(rows) + 34
    x = _scale(ticks[0], ticks[-1], left, WIDTH - 16)
    parts = _x_axis(ticks, x, height - 34, label)
    parts.append(f'<line class="reference" x1="{x(reference):.1f}" x2="{x(reference):.1f}" y1="6" y2="{height - 34}"/>')
    for number, row in enumerate(rows):
        y = 14 + _ROW * (number + 0.5)
        tip = f"{row.name}: {row.value:.3f}"
        parts.append(_name(row.name, left, y))
        if row.low is not None and row.high is not None:
            tip += f" ({row.low:.3f} to {row.high:.3f})"
            parts.append(f'<line class="whisker" x1="{x(row.low):.1f}" x2="{x(row.high):.1f}" y1="{y}" y2="{y}"/>')
        data = _data(series=row.name, value=row.value, low=row.low, high=row.high)
        parts.append(f'<circle class="dot" cx="{x(row.value):.1f}" cy="{y}" r="4.5" {data}>{_tip(tip)}</circle>')
    return _svg(title, height, parts)


def shares(title: str, rows: Sequence[tuple[str, Sequence[float]]], labels: Sequence[str], axis: str) -> str:
    """Stacked bars: each row's shares of 1, one for each label."""
    left = _margin([name for name, _ in rows])
    height = 14 + _ROW * len(rows) + 34
    x = _scale(0.0, 1.0, left, WIDTH - 16)
    parts = _x_axis([0.0, 0.25, 0.5, 0.75, 1.0], x, height - 34, axis, percent=True)
    for number, (name, values) in enumerate(rows):
        y = 14 + _ROW * number + 3
        parts.append(_name(name, left, y + _ROW / 2 - 3))
        start = 0.0
        for place, (value, label) in enumerate(zip(values, labels, strict=True)):
            if value > 0:
                tip = f"{name}: {label} in {value:.1%} of steps"
                data = _data(series=name, label=label, value=value)
                parts.append(
                    f'<rect class="step{place}" x="{x(start):.1f}" y="{y}" width="{x(start + value) - x(start):.1f}" '
                    f'height="{_ROW - 6}" {data}>{_tip(tip)}</rect>'
                )
            start += value
    return _svg(title, height, parts)


def lines(
    title: str, series: Sequence[Line], x_label: str, y_label: str, *, doubling: bool = False, least: float = 0.0
) -> str:
    """A line plot; `doubling` puts equal distances between doublings of x, with 0 before 1. y begins at `least`."""
    every = [point for line in series for point in line.points]
    y_ticks = nice_ticks(min([least, *(y for _, y in every)]), max([y for _, y in every], default=1.0), 5)
    left = 14 + _LETTER * max(len(_number(tick)) for tick in y_ticks)
    widest = max([x for x, _ in every], default=1.0)
    if doubling:
        x_ticks = [2.0**power for power in range(max(1, math.ceil(math.log2(max(widest, 2)))) + 1)]
        x_ticks = [0.0, *x_ticks] if any(x == 0 for x, _ in every) else x_ticks
    else:
        x_ticks = [float(tick) for tick in range(1, max(2, int(widest)) + 1, max(1, int(widest) // 8))]
    place = _doubled if doubling else float
    scale = _scale(place(x_ticks[0]), max(place(x_ticks[-1]), place(widest)), left, WIDTH - 16)
    y = _scale(y_ticks[0], y_ticks[-1], _HEIGHT - 40, 24)
    parts = _x_axis(x_ticks, lambda tick: scale(place(tick)), _HEIGHT - 40, x_label)
    parts.append(f'<text class="label" x="4" y="12">{escape(y_label)}</text>')
    for tick in y_ticks:
        parts.append(f'<line class="grid" x1="{left:.1f}" x2="{WIDTH - 16}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>')
        parts.append(
            f'<text class="tick" x="{left - 5:.1f}" y="{y(tick) + 4:.1f}" text-anchor="end">{_number(tick)}</text>'
        )
    for line in series:
        spots = [(scale(place(one)), y(other)) for one, other in line.points]
        if not line.marks:
            path = " ".join(f"{one:.1f},{other:.1f}" for one, other in spots)
            dash = _DASHES[line.hue // HUES % len(_DASHES)]
            style = f' stroke-dasharray="{dash}"' if dash else ""
            parts.append(f'<polyline class="line hue{line.hue % HUES}"{style} points="{path}"/>')
        for (one, other), point in zip(spots, line.points, strict=True):
            data = _data(series=line.name, x=point[0], y=point[1])
            tip = _tip(f"{line.name}: {_number(point[0])}, {point[1]:.4g}")
            radius = 4.5 if line.marks else 2.6
            parts.append(
                f'<circle class="point hue{line.hue % HUES}{" alone" if line.marks else ""}" cx="{one:.1f}" '
                f'cy="{other:.1f}" r="{radius}" {data}>{tip}</circle>'
            )
    return _svg(title, _HEIGHT, parts)


def legend(series: Sequence[Line]) -> str:
    """The names of a line plot's series, with their colours; wraps where the page is narrow."""
    items = []
    for line in series:
        dash = _DASHES[line.hue // HUES % len(_DASHES)]
        style = f' stroke-dasharray="{dash}"' if dash and not line.marks else ""
        key = (
            f'<circle class="point hue{line.hue % HUES} alone" cx="11" cy="6" r="4.5"/>'
            if line.marks
            else f'<line class="line hue{line.hue % HUES}"{style} x1="0" x2="22" y1="6" y2="6"/>'
        )
        items.append(f'<li><svg class="key" viewBox="0 0 22 12" aria-hidden="true">{key}</svg>{escape(line.name)}</li>')
    return f'<ul class="legend">{"".join(items)}</ul>'


def nice_ticks(low: float, high: float, count: int) -> list[float]:
    """About `count` round numbers from at most `low` to at least `high`."""
    span = high - low if high > low else max(abs(high), 1.0)
    rough = span / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(max(high, low + span) / step - 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]


def _doubled(x: float) -> float:
    return math.log2(x) if x >= 1 else -1.0 + x


def _scale(low: float, high: float, start: float, end: float) -> Any:
    span = (high - low) or 1.0
    return lambda value: start + (value - low) / span * (end - start)


def _margin(names: Sequence[str]) -> float:
    return 14 + _LETTER * max((len(_short(name)) for name in names), default=0)


def _short(name: str) -> str:
    return name if len(name) <= _LONGEST else name[: _LONGEST - 1] + "…"


def _name(name: str, left: float, y: float) -> str:
    text = escape(_short(name)) + _tip(name)
    return f'<text class="name" x="{left - 8:.1f}" y="{y + 4:.1f}" text-anchor="end">{text}</text>'


def _x_axis(ticks: Sequence[float], x: Any, bottom: float, label: str, *, percent: bool = False) -> list[str]:
    parts = []
    for tick in ticks:
        text = f"{tick:.0%}" if percent else _number(tick)
        parts.append(f'<line class="grid" x1="{x(tick):.1f}" x2="{x(tick):.1f}" y1="8" y2="{bottom}"/>')
        parts.append(f'<text class="tick" x="{x(tick):.1f}" y="{bottom + 14}" text-anchor="middle">{text}</text>')
    parts.append(f'<text class="label" x="{WIDTH - 16}" y="{bottom + 30}" text-anchor="end">{escape(label)}</text>')
    return parts


def _number(value: float) -> str:
    return f"{value:g}" if abs(value) < 1e4 else f"{value:,.0f}"


def _data(**values: object) -> str:
    return " ".join(f'data-{name}="{escape(str(value))}"' for name, value in values.items() if value is not None)


def _tip(text: str) -> str:
    return f"<title>{escape(text)}</title>"


def _svg(title: str, height: float, parts: Sequence[str]) -> str:
    box = f'viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{escape(title)}"'
    return f'<svg class="plot" {box}>{"".join(parts)}</svg>'
