"""specds inspect: what is in a store."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def inspect(
    store: Annotated[Path, typer.Argument(help="The datastore.")],
    json: Annotated[bool, typer.Option("--json", help="One JSON object instead of text.")] = False,
    provenance: Annotated[
        bool, typer.Option("--provenance", help="Where every part came from, and what was done to the store since.")
    ] = False,
) -> None:
    """Show what a store holds: documents, tokens by source, models, indexes with their quality, size, provenance.

    [dim]specds inspect code.ds --json | jq .indexes[/dim]
    """
    from specds.cli.render import emit, provenance_lines, store_record, store_tables
    from specds.datastore.store import open_store

    opened = open_store(store)
    if json:
        emit(store_record(opened))
    elif provenance:
        provenance_lines(opened)
    else:
        store_tables(opened)
