"""specds compare: two results of specds bench side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from specds.cli import options
from specds.printing import printable


def compare(
    first: Annotated[Path, typer.Argument(help="A result's directory.")],
    second: Annotated[Path, typer.Argument(help="Another.")],
    as_json: options.Json = False,
) -> None:
    """Show two results side by side: what was changed, both figures, and whether their intervals overlap.

    Where both hold the same prompts, the last column is the second's tokens/s over the first's, prompt by prompt.

    [dim]specds compare before after[/dim]
    """
    import json

    from specds.calibration.bench.compare import compare as read

    comparison = read(first, second)
    if as_json:
        print(json.dumps(comparison))
    else:
        _comparison(comparison)


def _comparison(record: dict[str, Any]) -> None:
    """What `specds compare` shows. Goes to stdout: it is what was asked for."""
    from rich.markup import escape
    from rich.table import Table

    from specds.cli.render import interval, screen

    out = screen(stderr=False)
    for path, valid in zip(record["results"], record["valid"], strict=True):
        out.print(escape(printable(path)) + ("" if valid else "  [red]not valid[/red]"))
    for what, changes in record["changed"].items():
        for name, (before, after) in changes.items():
            out.print(f"{what}: {escape(printable(f'{name}: {_brief(before)} → {_brief(after)}'))}")
    for what, (first, second) in record["only"].items():
        for names, which in ((first, "first"), (second, "second")):
            if names:
                out.print(f"{what} only in the {which}: {escape(printable(', '.join(names)))}")
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("group", "method", "× plain", "", "intervals", "MAT", "", "tokens/s", "", "second / first"):
        table.add_column(name, justify="left" if name in ("group", "method", "intervals") else "right", no_wrap=True)
    words = {True: "overlap", False: "apart", None: "–"}
    for row in record["groups"]:
        table.add_row(
            escape(printable(row["group"])),
            escape(printable(row["method"])),
            *(interval(figure, 2) for figure in row["speedup"]),
            words[row["overlap"]["speedup"]],
            *(f"{figure['value']:.2f}" if figure else "–" for figure in row["mat"]),
            *(f"{figure['value']:.1f}" for figure in row["tokens_per_second"]),
            interval(row["paired"], 2),
        )
    out.print(table)


def _brief(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else text[:79] + "…"
