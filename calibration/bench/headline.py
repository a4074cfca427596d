"""What a result says in a sentence: which method is the fastest, and how sure that is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specds.calibration.bench.figures import FEW
from specds.calibration.bench.judge import PLAIN
from specds.calibration.bench.plots import escape


@dataclass(frozen=True, slots=True)
class _Fastest:
    """A method with its speedup over plain decoding."""

    name: str
    value: float
    low: float | None
    high: float | None

    @property
    def text(self) -> str:
        interval = "" if self.low is None or self.high is None else f" ({self.low:.2f}–{self.high:.2f})"
        return f"{self.value:.2f} × plain decoding{interval}"


def _ranked(summary: dict[str, Any], group: dict[str, Any], *, lossless: bool) -> list[_Fastest]:
    """The methods but plain decoding, the fastest first: the lossless ones, or the lossy ones."""
    methods = [
        _Fastest(method["name"], **group["methods"][method["name"]]["speedup"][PLAIN])
        for method in summary["methods"]
        if method["name"] != PLAIN and bool(method["lossless"]) is lossless
    ]
    return sorted(methods, key=lambda method: -method.value)


def best_of(summary: dict[str, Any], group: dict[str, Any]) -> str:
    """The fastest of the lossless methods, plain decoding included."""
    ranked = _ranked(summary, group, lossless=True)
    return ranked[0].name if ranked and ranked[0].value > 1 else PLAIN


def headline(summary: dict[str, Any], group: dict[str, Any]) -> str:
    """What came of it, in a sentence or two; nothing where it is not to be relied on."""
    ranked, lossy = (_ranked(summary, group, lossless=exact) for exact in (True, False))
    if not summary["valid"] or not (ranked or lossy):
        return ""
    count = counted(group["prompts"], "prompt")
    said = []
    if ranked:
        best, *others = ranked
        if best.low is None or best.low > 1:
            said.append(f"{best.name} is the fastest: {best.text} over {count}, with the same text.")
            overlapping = [
                method.name
                for method in others
                if None not in (method.high, best.low) and method.high >= best.low  # type: ignore[operator]
            ]
            if overlapping:
                said.append(
                    f"Within its interval: {', '.join(overlapping[:3])}{' and others' if len(overlapping) > 3 else ''}."
                )
        elif best.value > 1:
            said.append(
                f"No method is surely faster than plain decoding: {best.name} comes nearest, {best.text} over {count}."
            )
        else:
            said.append(f"Plain decoding is the fastest: {best.name}, the next, is {best.text} over {count}.")
    if lossy and (not ranked or lossy[0].value > max(1.0, ranked[0].value)):
        said.append(f"{lossy[0].name}, which is not lossless, is {lossy[0].text}.")
    return f'<p class="headline">{escape(" ".join(said))}</p>{caution([group])}'


def caution(groups: Sequence[dict[str, Any]]) -> str:
    few = [f"{group['group']} ({group['prompts']})" for group in groups if group["prompts"] < FEW]
    if not few:
        return ""
    which = "There are" if len(groups) == 1 else f"{', '.join(few)}:"
    return (
        f'<p class="careful">⚠ {escape(which)} fewer than {FEW} prompts: too few to say how fast others would be, and '
        "the intervals are too narrow.</p>"
    )


def counted(number: int, what: str) -> str:
    return f"{number:,} {what}" + ("" if number == 1 else "s")
