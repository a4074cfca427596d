"""specds diff: what two stores hold differently."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from specds.datastore.difference import Difference


def diff(
    one: Annotated[Path, typer.Argument(help="A datastore.")],
    other: Annotated[Path, typer.Argument(help="Another one.")],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of text.")] = False,
    top: Annotated[int, typer.Option(min=0, help="Ids of documents shown of each kind.")] = 10,
) -> None:
    """Compare two stores: documents by source, tokenizers, models, indexes.

    Documents are compared by id, and where the other store lacks the id by their tokens. The exit code is 0 if both
    hold the same documents (tokens and sources), whatever their ids, order and indexes, and 1 if not.

    [dim]specds diff monday.ds tuesday.ds[/dim]
    [dim]specds diff code.ds copy.ds --json | jq .sources[/dim]
    """
    from specds.cli.render import emit, store_difference, working
    from specds.datastore.difference import difference
    from specds.datastore.store import open_store

    first, second = open_store(one), open_store(other)
    with working("reading"):
        found = difference(first, second)
    record = _record(str(one), str(other), found, top)
    if as_json:
        emit(record)
    else:
        store_difference(record)
    if not found.same_contents:
        raise typer.Exit(1)


def _record(one: str, other: str, found: Difference, top: int) -> dict[str, Any]:
    import dataclasses

    listed: dict[str, list[Any]] = {
        "first": found.first,
        "second": found.second,
        "changed": found.changed,
        "renamed": [list(pair) for pair in found.renamed],
        "relabelled": found.relabelled,
    }
    return {
        "stores": [one, other],
        "same_contents": found.same_contents,
        "tokenizers": [dataclasses.asdict(identity) for identity in found.tokenizers],
        "models": [[dataclasses.asdict(model) for model in models] for models in found.models],
        "documents": {name: len(ids) for name, ids in listed.items()},
        "ids": {name: ids[:top] for name, ids in listed.items()},
        "sources": {name: dataclasses.asdict(source) for name, source in found.sources.items()},
        "indexes": [{**dataclasses.asdict(index), "differs": index.differs} for index in found.indexes],
    }
