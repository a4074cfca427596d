"""A table of a report: as HTML, as CSV for programs, and as LaTeX for papers."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from specds.printing import printable

_LATEX = {
    "\\": r"\textbackslash{}",
    **{character: f"\\{character}" for character in "&%$#_{}"},
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "×": r"$\times$",
    "–": "--",
    "…": r"\ldots{}",
}
_FORMULA = ("=", "+", "-", "@")


@dataclass(frozen=True, slots=True)
class Figure:
    """A number with its interval, as far as they are known.

    Attributes:
        alone: whether people are shown the number without its interval.
    """

    value: float | None
    low: float | None = None
    high: float | None = None
    digits: int = 2
    percent: bool = False
    alone: bool = False

    @classmethod
    def of(cls, entry: dict[str, Any] | None, digits: int, *, percent: bool = False, alone: bool = False) -> Figure:
        """From an entry of a summary."""
        return cls(**(entry or {"value": None}), digits=digits, percent=percent, alone=alone)

    @property
    def text(self) -> str:
        """The number alone."""
        return "–" if self.value is None else self._said(self.value)

    @property
    def interval(self) -> str:
        """Its interval, where there is one to be shown."""
        if self.alone or self.low is None or self.high is None:
            return ""
        return f"{self._said(self.low)}–{self._said(self.high)}"

    def _said(self, value: float) -> str:
        return f"{value:.{self.digits}{'%' if self.percent else 'f'}}"


Cell = str | Figure | Sequence[Figure]
"""Text, a number, or numbers that stand below each other."""


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a table.

    Attributes:
        name: what it is of.
        cells: one a column; notes about the name come in `note`.
        best: the columns of which it is the best; -1 is the whole row.
    """

    name: str
    cells: Sequence[Cell]
    note: str = ""
    best: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Grid:
    """A table. The first column is that of the rows' names.

    Attributes:
        parts: of columns whose cells hold several numbers, what each is.
    """

    name: str
    columns: Sequence[str]
    rows: Sequence[Row]
    parts: Sequence[str] = ()

    def html(self) -> str:
        """Each cell names its column, so that a narrow page can show rows as lists."""
        head = "".join(f'<th scope="col">{escape(printable(name))}</th>' for name in self.columns)
        body = "".join(self._html_row(row) for row in self.rows)
        return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'

    def _html_row(self, row: Row) -> str:
        kind = ' class="best"' if -1 in row.best else ""
        note = f" <small>{escape(row.note)}</small>" if row.note else ""
        star = ' <span class="star" title="the fastest">★</span>' if -1 in row.best else ""
        cells = []
        for place, (name, cell) in enumerate(zip(self.columns[1:], row.cells, strict=True)):
            best = ' class="best"' if place in row.best else ""
            cells.append(f'<td{best} data-label="{escape(printable(name))}"><span>{self._html_cell(cell)}</span></td>')
        return f'<tr{kind}><th scope="row">{escape(printable(row.name))}{star}{note}</th>{"".join(cells)}</tr>'

    def _html_cell(self, cell: Cell) -> str:
        if isinstance(cell, str):
            return escape(printable(cell))
        if isinstance(cell, Figure):
            return escape(cell.text) + (f"<br><small>{escape(cell.interval)}</small>" if cell.interval else "")
        lines = (
            f"{escape(part)} {self._html_cell(inner)}" if part else self._html_cell(inner)
            for part, inner in zip(self.parts, cell, strict=True)
        )
        return "<br>".join(lines)

    def csv(self) -> str:
        """Numbers unrounded, with columns for both ends of their intervals where there are any."""
        columns: list[list[object]] = [[self.columns[0], *(row.name for row in self.rows)]]
        for place, name in enumerate(self.columns[1:]):
            cells = [row.cells[place] for row in self.rows]
            if all(isinstance(cell, str) for cell in cells):
                columns.append([name, *cells])
                continue
            several = [[cell] if isinstance(cell, str | Figure) else cell for cell in cells]
            for number, part in enumerate(self.parts if len(several[0]) > 1 else [""]):
                for end in ("value", "low", "high"):
                    title = " ".join(filter(None, (name, part, "" if end == "value" else end)))
                    values = [_end(cell[number], end) for cell in several]
                    if end == "value" or any(value is not None for value in values):
                        columns.append([title, *values])
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        for row in zip(*columns, strict=True):
            writer.writerow([_harmless(cell) if isinstance(cell, str) else cell for cell in row])
        return out.getvalue()

    def latex(self) -> str:
        """A `tabular`, for `\\input`; nothing but LaTeX itself is needed."""
        head = " & ".join(map(_latex, self.columns))
        lines = [f"% {printable(self.name)}", rf"\begin{{tabular}}{{l{'r' * (len(self.columns) - 1)}}}", r"\hline"]
        lines += [rf"{head} \\", r"\hline"]
        for row in self.rows:
            cells = [_bold(_latex(row.name), -1 in row.best)]
            for place, cell in enumerate(row.cells):
                cells.append(_bold(self._latex_cell(cell), bool(row.best & {-1, place})))
            lines.append(" & ".join(cells) + r" \\")
        return "\n".join([*lines, r"\hline", r"\end{tabular}", ""])

    def _latex_cell(self, cell: Cell) -> str:
        if isinstance(cell, str):
            return _latex(cell)
        if isinstance(cell, Figure):
            return _latex(cell.text + (f" ({cell.interval})" if cell.interval else ""))
        return ", ".join(
            f"{_latex(part)} {self._latex_cell(inner)}" if part else self._latex_cell(inner)
            for part, inner in zip(self.parts, cell, strict=True)
        )


def _end(cell: Cell, end: str) -> float | None:
    assert isinstance(cell, Figure)
    return {"value": cell.value, "low": cell.low, "high": cell.high}[end]


def _harmless(text: str) -> str:
    """A text that no spreadsheet takes for a formula, whatever a method or a group is called."""
    text = printable(text)
    return f"'{text}" if text.startswith(_FORMULA) else text


def _latex(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in printable(text))


def _bold(text: str, bold: bool) -> str:
    return rf"\textbf{{{text}}}" if bold else text
