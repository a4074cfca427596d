"""Plots as SVG: no script, no font, no file. Every mark carries the numbers that it shows."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape as html_escape
from typing import Any

from specds.printing import printable

WIDTH = 400
HUES = 8

_LETTER = 6.6  # px that a letter of a label takes, at most
_LONGEST = 24
_ROW = 22
_HEIGHT = 230
_DASHES = ("", "6 3", "2 3")
_KEY_WIDTH, _KEY_HEIGHT = 30, 18
_SAVED_WIDTH = 800
_DECADES = 3


def escape(text: str) -> str:
    """Text for a page or an SVG file, in which there is nothing that XML knows no character for."""
    return html_escape(printable(text))


@dataclass(frozen=True, slots=True)
class Plot:
    """A drawing and the names of its series.

    Attributes:
        title: said to who cannot see it.
        height: of a drawing that is WIDTH wide.
        parts: SVG elements.
        keys: (name, SVG element of 22 × 12) of each series; none where names stand in the drawing.
    """

    title: str
    height: float
    parts: Sequence[str]
    keys: Sequence[tuple[str, str]] = ()

    def inline(self) -> str:
        """For a page that has the style; the keys wrap where it is narrow."""
        box = f'viewBox="0 0 {WIDTH} {self.height:g}" role="img" aria-label="{escape(self.title)}"'
        drawing = f'<svg class="plot" {box}>{"".join(self.parts)}</svg>'
        items = "".join(
            f'<li><svg class="key" viewBox="0 0 22 12" aria-hidden="true">{mark}</svg>{escape(name)}</li>'
            for name, mark in self.keys
        )
        return drawing + (f'<ul class="legend">{items}</ul>' if items else "")

    def file(self, style: str) -> str:
        """An SVG file, with its keys and a style that `settled` made."""
        keys = []
        for number, (name, mark) in enumerate(self.keys):
            top = self.height + _KEY_HEIGHT * number
            keys.append(f'<g transform="translate(14 {top:g})">{mark}</g>')
            keys.append(f'<text class="name" x="{14 + _KEY_WIDTH}" y="{top + 10:g}">{escape(name)}</text>')
        height = self.height + _KEY_HEIGHT * len(self.keys)
        size = f'width="{_SAVED_WIDTH}" height="{_SAVED_WIDTH * height / WIDTH:g}" viewBox="0 0 {WIDTH} {height:g}"'
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="plot" {size} font-family="sans-serif">'
            f"<title>{escape(self.title)}</title><style>{style}</style>"
            f'<rect class="paper" width="{WIDTH}" height="{height:g}"/>{"".join((*self.parts, *keys))}</svg>\n'
        )


@dataclass(frozen=True, slots=True)
class Interval:
    """A row of a dot plot: a value and its interval, which may be unknown."""

    name: str
    value: float
    low: float | None
    high: float | None
    best: bool = False


@dataclass(frozen=True, slots=True)
class Line:
    """A series of a line plot.

    Attributes:
        points: (x, y), by ascending x.
        hue: its colour's number; series of one method have one colour in all plots.
        marks: whether points are shown alone, without a line.
        band: (low, high) at each point, where they are known.
    """

    name: str
    points: Sequence[tuple[float, float]]
    hue: int
    marks: bool = False
    band: Sequence[tuple[float, float] | None] = ()


def settled(style: str) -> str:
    """A style in which no colour is a variable, as other programs than browsers know none."""
    colours = dict(re.findall(r"--(\w+): (#\w+)", style))
    variable = re.compile(r"var\(--(\w+)\)")
    rules = []
    for selector, body in re.findall(r"([^{}]+)\{([^{}]*)\}", style):
        if "var(--hue)" in body:
            every = [
                (f"{selector.strip()}.hue{hue}", body.replace("var(--hue)", colours[f"hue{hue}"]))
                for hue in range(HUES)
            ]
        else:
            every = [(selector.strip(), body)]
        for name, rule in every:
            if not rule.strip().startswith("--"):
                rules.append(f"{name} {{{variable.sub(lambda match: colours[match[1]], rule).strip()}}}")
    return "".join(rules)


def interval_ticks(rows: Sequence[Interval], reference: float) -> list[float]:
    """An axis on which all of some rows can be shown."""
    ends = [reference, *(end for row in rows for end in (row.low, row.value, row.high) if end is not None)]
    return nice_ticks(min(0.0, *ends), max(ends), 5)


def intervals(title: str, rows: Sequence[Interval], reference: float, label: str, ticks: Sequence[float]) -> Plot:
    """A dot plot: a row each, with a line at `reference`, over an axis that several plots can share."""
    left = _margin([row.name for row in rows])
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
        kind = "dot best" if row.best else "dot"
        parts.append(f'<circle class="{kind}" cx="{x(row.value):.1f}" cy="{y}" r="4.5" {data}>{_tip(tip)}</circle>')
    return Plot(title, height, parts)


def shares(title: str, rows: Sequence[tuple[str, Sequence[float]]], labels: Sequence[str], axis: str) -> Plot:
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
    keys = [(label, f'<rect class="step{place}" x="5" width="12" height="12"/>') for place, label in enumerate(labels)]
    return Plot(title, height, parts, keys)


def lines(
    title: str,
    series: Sequence[Line],
    x_label: str,
    y_label: str,
    *,
    doubling: bool = False,
    log: bool = False,
    least: float = 0.0,
) -> Plot:
    """A line plot.

    Args:
        doubling: equal distances between doublings of x, with 0 before 1.
        log: equal distances between equal ratios of y, all of which are above 0; else y begins at `least`.
    """
    every = [point for line in series for point in line.points]
    heights = [y for _, y in every] + [end for line in series for ends in line.band for end in ends or ()]
    if log:
        y_ticks = log_ticks(min(heights), max(heights))
    else:
        y_ticks = nice_ticks(min([least, *heights]), max(heights, default=1.0), 5)
    left = 14 + _LETTER * max(len(_number(tick)) for tick in y_ticks)
    widest = max([x for x, _ in every], default=1.0)
    if doubling:
        x_ticks = [2.0**power for power in range(max(1, math.ceil(math.log2(max(widest, 2)))) + 1)]
        x_ticks = [0.0, *x_ticks] if any(x == 0 for x, _ in every) else x_ticks
    else:
        x_ticks = [float(tick) for tick in range(1, max(2, int(widest)) + 1, max(1, int(widest) // 8))]
    place = _doubled if doubling else float
    level: Callable[[float], float] = math.log10 if log else float
    scale = _scale(place(x_ticks[0]), max(place(x_ticks[-1]), place(widest)), left, WIDTH - 16)
    across = _scale(level(y_ticks[0]), level(y_ticks[-1]), _HEIGHT - 40, 24)
    parts = _x_axis(x_ticks, lambda tick: scale(place(tick)), _HEIGHT - 40, x_label)
    parts.append(f'<text class="label" x="4" y="12">{escape(y_label)}</text>')
    for tick in y_ticks:
        y = across(level(tick))
        parts.append(f'<line class="grid" x1="{left:.1f}" x2="{WIDTH - 16}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{left - 5:.1f}" y="{y + 4:.1f}" text-anchor="end">{_number(tick)}</text>')
    for line in series:
        parts += _band(line, lambda value: scale(place(value)), lambda value: across(level(value)))
    for line in series:
        spots = [(scale(place(x)), across(level(y))) for x, y in line.points]
        if not line.marks:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in spots)
            parts.append(f'<polyline class="line hue{line.hue % HUES}"{_dash(line)} points="{path}"/>')
        bands = line.band or [None] * len(spots)
        for (x, y), point, ends in zip(spots, line.points, bands, strict=True):
            low, high = ends or (None, None)
            data = _data(series=line.name, x=point[0], y=point[1], low=low, high=high)
            said = "" if low is None else f" ({low:.4g} to {high:.4g})"
            tip = _tip(f"{line.name}: {_number(point[0])}, {point[1]:.4g}{said}")
            radius = 4.5 if line.marks else 2.6
            parts.append(
                f'<circle class="point hue{line.hue % HUES}{" alone" if line.marks else ""}" cx="{x:.1f}" '
                f'cy="{y:.1f}" r="{radius}" {data}>{tip}</circle>'
            )
    return Plot(title, _HEIGHT, parts, [(line.name, _key(line)) for line in series])


def _band(line: Line, x: Callable[[float], float], y: Callable[[float], float]) -> list[str]:
    """An area for each run of points whose ends are known; an upright stroke for a point on its own."""
    runs: list[list[tuple[float, float, float]]] = [[]]
    for (at, _), ends in zip(line.points, line.band, strict=False):
        if ends is None:
            runs.append([])
        else:
            runs[-1].append((x(at), y(ends[0]), y(ends[1])))
    parts = []
    for run in filter(None, runs):
        edge = [(at, low) for at, low, _ in run] + [(at, high) for at, _, high in reversed(run)]
        points = " ".join(f"{at:.1f},{level:.1f}" for at, level in edge)
        parts.append(f'<polygon class="band hue{line.hue % HUES}" points="{points}"/>')
    return parts


def _dash(line: Line) -> str:
    dash = _DASHES[line.hue // HUES % len(_DASHES)]
    return f' stroke-dasharray="{dash}"' if dash and not line.marks else ""


def _key(line: Line) -> str:
    if line.marks:
        return f'<circle class="point hue{line.hue % HUES} alone" cx="11" cy="6" r="4.5"/>'
    return f'<line class="line hue{line.hue % HUES}"{_dash(line)} x1="0" x2="22" y1="6" y2="6"/>'


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten (of many decades only the powers) from at most `low` to at least `high`."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1, 2, 5) if len(powers) <= _DECADES + 1 else (1,)
    ticks = [factor * 10.0**power for power in powers for factor in factors]
    first = max(tick for tick in ticks if tick <= low * (1 + 1e-9))
    last = min((tick for tick in ticks if tick >= high * (1 - 1e-9) and tick > first), default=10 * first)
    return [round(tick, 12) for tick in ticks if first <= tick <= last] or [first, last]


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
