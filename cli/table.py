"""specds table: look at, add up, cut down and compare correction tables."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specds.cli.groups import Group, add

if TYPE_CHECKING:
    from specds.datastore.corrections import Table
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
    as_json: Annotated[bool, typer.Option("--json", help="As JSON on stdout.")] = False,
) -> None:
    """Whose table it is, what it counts, and its most frequent pairs, with their text.

    [dim]specds table inspect rest.parquet --top 50[/dim]
    """
    import json

    import numpy as np

    from specds.cli.render import correction_table
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
        correction_table(str(table), read, rows)


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
    from specds.cli.render import table_difference
    from specds.datastore.corrections import check_pair, difference, read_table

    first, second = read_table(one), read_table(other)
    check_pair(first, second.pair, str(one), str(other))
    changed = difference(first, second)
    tokenizer = _tokenizer_of(first, model, one)
    rows = [
        {**_pair(drafted, picked, tokenizer), "first": here, "second": there}
        for drafted, picked, here, there in changed[:top]
    ]
    table_difference(str(one), str(other), first, second, len(changed), rows)


def _tokenizer_of(table: Table, model: str | None, path: Path) -> Tokenizer | None:
    """What turns a table's token ids into text: a model's tokenizer, else that of the table's target if it is here."""
    from specds.datastore.corrections import check_tokenizer
    from specds.errors import SpecdsError
    from specds.model import find_tokenizer

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


for function in (inspect, merge, prune, diff):
    add(app, function, "table")
