"""specds merge: one store out of several."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def merge(
    stores: Annotated[list[Path], typer.Argument(help="Two datastores or more, of one tokenizer.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The new datastore.")],
) -> None:
    """Put datastores together into a new one, with their indexes.

    A document that several of them hold is taken once. Nothing is built again: indexes come along as segments,
    which `specds compact` puts together. Of dense indexes, those of one model come along.

    [dim]specds merge monday.ds tuesday.ds --output week.ds[/dim]
    """
    from specds.cli.render import note, working
    from specds.datastore.merging import merge as run
    from specds.datastore.store import open_store
    from specds.errors import UsageError

    if len(stores) < 2:
        raise UsageError("one store is merged with nothing", "name two or more")
    opened = [open_store(path) for path in stores]
    with working("merging"):
        done = run(opened, output)
    merged, twice = done.store, done.twice
    if done.done is not None:
        note(f"{output}: done already, on {done.done}; nothing was changed")
    said = f"{output}: {merged.manifest.documents:,} documents, {merged.manifest.tokens:,} tokens"
    note(said + (f"; {twice:,} were in more than one" if twice else ""))
    for kind, segments in merged.manifest.indexes.items():
        missing = merged.manifest.uncovered(kind)
        if segments and missing:
            note(f"note: {len(missing)} corpus files are not in its {kind} index yet: specds build-{kind} {output}")
