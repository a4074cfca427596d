"""specds diff: what two stores hold differently."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from specds.cli import options


def diff(
    one: Annotated[Path, typer.Argument(help="A datastore.")],
    other: Annotated[Path, typer.Argument(help="Another one.")],
    as_json: options.Json = False,
    top: Annotated[int, typer.Option(min=0, help="Ids of documents shown of each kind.")] = 10,
) -> None:
    """Compare two stores: documents by source, tokenizers, models, indexes.

    Documents are compared by id, and where the other store lacks the id by their tokens. The exit code is 0 if both
    hold the same documents (tokens and sources), whatever their ids, order and indexes, and 1 if not.

    [dim]specds diff monday.ds tuesday.ds[/dim]
    [dim]specds diff code.ds copy.ds --json | jq .sources[/dim]
    """
    from specds.cli.render import emit, working
    from specds.datastore.difference import difference
    from specds.datastore.store import open_store

    first, second = open_store(one), open_store(other)
    with working("reading"):
        report = difference(first, second)
    record = {"stores": [str(one), str(other)], **report.record(top)}
    if as_json:
        emit(record)
    else:
        _difference(record)
    if not report.same_contents:
        raise typer.Exit(1)


def _difference(raw: dict[str, Any]) -> None:
    """What `specds diff` shows of its record. Goes to stdout: it is what was asked for."""
    from rich.table import Table

    from specds.cli.render import escaped, screen

    out = screen(stderr=False)
    record = escaped(raw)
    one, other = record["stores"]
    for name, pair in (("tokenizer", [[tokenizer] for tokenizer in record["tokenizers"]]), ("model", record["models"])):
        first, second = (", ".join(f"{part['name']} ({part['fingerprint'][:16]})" for part in side) for side in pair)
        same = sorted(part["fingerprint"] for part in pair[0]) == sorted(part["fingerprint"] for part in pair[1])
        out.print(
            f"{name:10} {first or 'none'}" if same else f"{name:10} differs: {first or 'none'}; {second or 'none'}"
        )
    table = Table("source", box=None, padding=(0, 2, 0, 2))
    for title in (f"only in {one}", f"only in {other}", "in both"):
        table.add_column(title, justify="right")
    for name, counts in record["sources"].items():
        parts = (counts[where] for where in ("first", "second", "both"))
        table.add_row(name, *(f"{part['documents']:,} ({part['tokens']:,} tokens)" for part in parts))
    out.print(table)
    said = {
        "first": f"only in {one}",
        "second": f"only in {other}",
        "changed": "of them with the same id in both",
        "renamed": "in both, with different ids",
        "relabelled": "in both, with different sources",
    }
    for kind, count in record["documents"].items():
        if count:
            out.print(f"{count:,} documents {said[kind]}")
            shown = record["ids"][kind]
            for entry in shown:
                out.print(f"  {entry if isinstance(entry, str) else ' = '.join(entry)}", style="dim", soft_wrap=True)
            if len(shown) < count:
                out.print(f"  … and {count - len(shown):,} more", style="dim")
    for index in record["indexes"]:
        tokens, segments = index["tokens"], index["segments"]
        sides = "; ".join(
            f"{count:,} tokens in {number} segment{'s' * (number > 1)}" if number else "none"
            for count, number in zip(tokens, segments, strict=True)
        )
        out.print(f"{index['kind']:10} {'differs' if index['differs'] else 'alike'}: {sides}")
        for name, values in index["parameters"].items():
            first, second = (", ".join(map(str, side)) for side in values)
            out.print(f"           {name}: {first}; {second}")
        first, second = (", ".join(model["name"] for model in side) for side in index["models"])
        if index["models"][0] != index["models"][1]:
            out.print(f"           model: {first or 'none'}; {second or 'none'}")
    out.print("the same documents" if record["same_contents"] else "different documents", style="bold")
