"""specds table: look at, add up, cut down and compare correction tables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specds.cli import options
from specds.cli.groups import Group, add
from specds.printing import printable

if TYPE_CHECKING:
    from rich.console import Console

    from specds.datastore.corrections import Table as Corrections
    from specds.tokenizer import Tokenizer

app = typer.Typer(
    name="table",
    cls=Group,
    help="Look at, add up, cut down and compare correction tables (see `calibrate-csd`).",
    no_args_is_help=True,
    rich_markup_mode="rich",
)

Model = Annotated[
    str | None,
    typer.Option(
        "--model", "-m", help="Decode token ids with this model's tokenizer; default: the table's target, if found."
    ),
]
One = Annotated[Path, typer.Argument(help="A correction table (Parquet).")]
Output = Annotated[
    Path, typer.Option("--output", "-o", help="Where the result goes; a table that is there is replaced.")
]


def inspect(
    table: One,
    top: Annotated[int, typer.Option(min=0, help="Pairs shown, the most frequent first.")] = 20,
    model: Model = None,
    as_json: options.Json = False,
) -> None:
    """Whose table it is, what it counts, and its most frequent pairs, with their text.

    [dim]specds table inspect rest.parquet --top 50[/dim]
    """
    import json

    import numpy as np

    from specds.datastore.corrections import describe, read_table

    read = read_table(table)
    order = np.argsort(-read.count, kind="stable")[:top].tolist()
    tokenizer = _tokenizer_of(read, model, table)
    rows = [
        {**_pair(int(read.drafted[place]), int(read.picked[place]), tokenizer), "count": int(read.count[place])}
        for place in order
    ]
    if as_json:
        print(json.dumps({**describe(read), "top": rows}, ensure_ascii=True))
    else:
        _table(str(table), read, rows)


def merge(
    tables: Annotated[list[Path], typer.Argument(help="Two tables or more, of one pair.")], output: Output
) -> None:
    """Add tables up. The order does not matter; tables that count the same prompts are refused.

    [dim]specds table merge monday.parquet tuesday.parquet --output week.parquet[/dim]
    """
    from specds.cli.render import table_summary
    from specds.datastore.corrections import merge, read_table, write_table
    from specds.errors import UsageError

    if len(tables) < 2:
        raise UsageError("one table is given", "merge two or more")
    total = merge([read_table(path) for path in tables])
    write_table(output, total)
    table_summary(str(output), total)


def prune(
    table: One,
    output: Output,
    least: Annotated[int, typer.Option(min=1, help="Pairs counted less often go.")] = 1,
    top: Annotated[int | None, typer.Option(min=0, help="All but so many of the most frequent pairs go.")] = None,
    decay: Annotated[float, typer.Option(min=0.0, max=1.0, help="Multiply counts by this, rounded down.")] = 1.0,
    cap: Annotated[int | None, typer.Option(min=1, help="Cut larger counts off at this.")] = None,
) -> None:
    """Forget what is rare or old.

    [dim]specds table prune week.parquet --least 2 --decay 0.5 --output week.parquet[/dim]
    """
    from specds.cli.render import table_summary
    from specds.datastore.corrections import read_table, updating, write_table

    with updating(output):
        kept = read_table(table).pruned(least=least, top=top, decay=decay, cap=cap)
        write_table(output, kept)
    table_summary(str(output), kept)


def diff(
    one: One,
    other: One,
    top: Annotated[int, typer.Option(min=0, help="Pairs shown, those whose count differs most first.")] = 20,
    model: Model = None,
) -> None:
    """What two tables count differently, with the pairs' text. The exit code is 0 either way.

    [dim]specds table diff monday.parquet tuesday.parquet[/dim]
    """
    from specds.datastore.corrections import check_pair, difference, read_table

    first, second = read_table(one), read_table(other)
    check_pair(first, second.pair, str(one), str(other))
    changed = difference(first, second)
    tokenizer = _tokenizer_of(first, model, one)
    rows = [
        {**_pair(drafted, picked, tokenizer), "first": here, "second": there}
        for drafted, picked, here, there in changed[:top]
    ]
    _difference(str(one), str(other), first, second, len(changed), rows)


def _tokenizer_of(table: Corrections, model: str | None, path: Path) -> Tokenizer | None:
    """What turns a table's token ids into text: a model's tokenizer, else that of the table's target if it is here."""
    from specds.checkpoint import find_tokenizer
    from specds.datastore.corrections import check_tokenizer
    from specds.errors import SpecdsError

    try:
        tokenizer = find_tokenizer(model or table.pair.target.name)
        check_tokenizer(table, tokenizer.fingerprint, tokenizer.name, str(path))
    except SpecdsError:
        if model is not None:
            raise
        return None
    return tokenizer


def _pair(drafted: int, picked: int, tokenizer: Tokenizer | None) -> dict[str, int | str]:
    pair: dict[str, int | str] = {"draft_token": drafted, "target_token": picked}
    if tokenizer is not None:
        pair |= {"draft_text": tokenizer.decode([drafted]), "target_text": tokenizer.decode([picked])}
    return pair


def _table(name: str, corrections: Corrections, rows: Sequence[dict[str, Any]]) -> None:
    """What `specds table inspect` shows. Goes to stdout: it is what was asked for."""
    from rich.markup import escape

    from specds.cli.render import screen, too_rare

    out = screen(stderr=False)
    pair = corrections.pair
    out.print(f"[bold]{escape(name)}[/bold]")
    for what in ("target", "draft", "tokenizer"):
        identity = getattr(pair, what)
        shown = (escape(printable(text)) for text in (identity.name, identity.fingerprint[:12]))
        out.print("  {}: {} [dim]{}[/dim]".format(what, *shown))
    out.print(
        f"  {len(corrections):,} pairs, {int(corrections.count.sum()):,} divergences in {corrections.tokens:,} tokens "
        f"of {corrections.prompts:,} prompts"
    )
    out.print(f"  the top 20 % of pairs hold {corrections.head_share():.1%} of all divergences")
    if said := too_rare(corrections):
        out.print(f"  [yellow]{escape(said)}[/yellow]", soft_wrap=True)
    for provenance in corrections.history:
        cells = (escape(printable(text)) for text in (provenance.date, provenance.command, provenance.version))
        out.print("  [dim]{} {} (specds {})[/dim]".format(*cells))
    _pairs(out, ["count"], rows, len(corrections))


def _pairs(out: Console, counts: Sequence[str], rows: Sequence[dict[str, Any]], every: int) -> None:
    """Pairs with their counts and, where known, their text; and how many are not shown."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 2))
    for column in (*counts, "drafted", "", "target's", ""):
        table.add_column(column, justify="right" if column in counts else "left")
    for row in rows:
        texts = [repr(row[name]) if name in row else "" for name in ("draft_text", "target_text")]
        table.add_row(
            *(f"{row[count]:,}" for count in counts),
            str(row["draft_token"]),
            escape(texts[0]),
            str(row["target_token"]),
            escape(texts[1]),
        )
    if rows:
        out.print(table)
    if left := every - len(rows):
        out.print(f"  … and {left:,} more pair{'s' * (left > 1)}; --top shows more", style="dim")


def _difference(
    one: str, other: str, first: Corrections, second: Corrections, changed: int, rows: Sequence[dict[str, Any]]
) -> None:
    """What `specds table diff` shows. Goes to stdout."""
    from rich.markup import escape

    from specds.cli.render import screen

    out = screen(stderr=False)
    both = len({*first.keys()} & {*second.keys()})
    for name, table in ((one, first), (other, second)):
        out.print(f"{escape(printable(name))}: {len(table):,} pairs, {len(table) - both:,} only here", soft_wrap=True)
    out.print(f"{changed:,} pairs are counted differently, of {len(first) + len(second) - both:,}")
    _pairs(out, ["first", "second"], rows, changed)


for function in (inspect, merge, prune, diff):
    add(app, function, "table")
