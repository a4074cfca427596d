"""specds remove: documents that should not be in a store."""

from __future__ import annotations

from typing import Annotated

import typer

from specds.cli import options


def remove(
    store: options.StorePath,
    source: Annotated[list[str] | None, typer.Option(help="All documents of this source. Repeatable.")] = None,
    doc_id: Annotated[
        list[str] | None, typer.Option(help="The document of this id; - reads ids from stdin, one a line. Repeatable.")
    ] = None,
) -> None:
    """Take documents out of a store and out of its indexes, in one step.

    Suffix segments that held them are sorted again; dense ones forget them at once, and lose the last trace of
    their hidden states with `specds compact`.

    [dim]specds remove code.ds --source scraped[/dim]
    """
    import sys

    from specds.cli.render import note, working
    from specds.datastore.rewriting import remove as run
    from specds.datastore.store import open_store
    from specds.errors import UsageError

    ids: list[str] = []
    for name in doc_id or []:
        ids += [line.strip() for line in sys.stdin if line.strip()] if name == "-" else [name]
    if not source and not ids:
        raise UsageError("nothing to remove", "name it with --source or --doc-id; `specds inspect` shows the sources")
    with working("removing"):
        done = run(open_store(store), sources=source or [], ids=ids)
    if done.done is not None:
        note(f"{store}: done already, on {done.done}; nothing was changed")
        return
    note(
        f"{store}: removed {done.documents:,} documents, {done.tokens:,} tokens; {done.shards} corpus files and "
        f"{done.segments} index segments changed"
    )
