"""specds table: look at, add up, cut down and compare correction tables."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from specds.tokenizer import Tokenizer

app = typer.Typer(
    name="table",
    help="Look at, add up, cut down and compare correction tables (see `calibrate-csd`).",
    no_args_is_help=True,
    rich_markup_mode="rich",
)

One = Annotated[Path, typer.Argument(help="A correction table (Parquet).")]
Out = Annotated[Path, typer.Option("--out", "-o", help="Where the result goes; a table that is there is replaced.")]


@app.command()
def inspect(
    table: One,
    top: Annotated[int, typer.Option(min=0, help="Pairs shown, the most frequent first.")] = 20,
    model: Annotated[
        str | None,
        typer.Option(
            "--model", "-m", help="Decode token ids with this model's tokenizer; default: the table's target, if found."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON on stdout.")] = False,
) -> None:
    """Whose table it is, what it counts, and its most frequent pairs, with their text.

    [dim]specds table inspect rest.parquet --top 50[/dim]
    """
    import json

    import numpy as np

    from specds.cli.render import correction_table
    from specds.datastore.corrections import check_tokenizer, describe, read_table
    from specds.errors import SpecdsError
    from specds.model import find_tokenizer

    read = read_table(table)
    tokenizer: Tokenizer | None = None
    try:
        tokenizer = find_tokenizer(model or read.pair.target.name)
        check_tokenizer(read, tokenizer.fingerprint, tokenizer.name, str(table))
    except SpecdsError:
        if model is not None:
            raise
        tokenizer = None  # ids without text
    order = np.argsort(-read.count, kind="stable")[:top]
    rows = [
        {
            "draft_token": int(read.drafted[place]),
            "target_token": int(read.picked[place]),
            "count": int(read.count[place]),
            **(
                {
                    "draft_text": tokenizer.decode([int(read.drafted[place])]),
                    "target_text": tokenizer.decode([int(read.picked[place])]),
                }
                if tokenizer
                else {}
            ),
        }
        for place in order.tolist()
    ]
    if as_json:
        print(json.dumps({**describe(read), "top": rows}, ensure_ascii=True))
    else:
        correction_table(str(table), read, rows)


@app.command()
def merge(tables: Annotated[list[Path], typer.Argument(help="Two tables or more, of one pair.")], out: Out) -> None:
    """Add tables up. The order does not matter; tables that count the same prompts are refused.

    [dim]specds table merge monday.parquet tuesday.parquet --out week.parquet[/dim]
    """
    from specds.cli.render import table_summary
    from specds.datastore.corrections import merge, read_table, write_table
    from specds.errors import UsageError

    if len(tables) < 2:
        raise UsageError("one table is given", "merge two or more")
    total = merge([read_table(path) for path in tables])
    write_table(out, total)
    table_summary(str(out), total)


@app.command()
def prune(
    table: One,
    out: Out,
    least: Annotated[int, typer.Option(min=1, help="Pairs counted less often go.")] = 1,
    top: Annotated[int | None, typer.Option(min=0, help="All but so many of the most frequent pairs go.")] = None,
    decay: Annotated[float, typer.Option(min=0.0, max=1.0, help="Multiply counts by this, rounded down.")] = 1.0,
    cap: Annotated[int | None, typer.Option(min=1, help="Cut larger counts off at this.")] = None,
) -> None:
    """Forget what is rare or old.

    [dim]specds table prune week.parquet --least 2 --decay 0.5 --out week.parquet[/dim]
    """
    from specds.cli.render import table_summary
    from specds.datastore.corrections import read_table, updating, write_table

    with updating(out):
        kept = read_table(table).pruned(least=least, top=top, decay=decay, cap=cap)
        write_table(out, kept)
    table_summary(str(out), kept)


@app.command()
def diff(
    one: One,
    other: One,
    top: Annotated[int, typer.Option(min=0, help="Pairs shown, those whose count differs most first.")] = 20,
) -> None:
    """What two tables count differently. The exit code is 0 either way.

    [dim]specds table diff monday.parquet tuesday.parquet[/dim]
    """
    from specds.cli.render import table_difference
    from specds.datastore.corrections import check_pair, difference, read_table

    first, second = read_table(one), read_table(other)
    check_pair(first, second.pair, str(one), str(other))
    table_difference(str(one), str(other), first, second, difference(first, second), top)
