"""specds build-suffix: the static suffix index (REST)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def build_suffix(store: Annotated[Path, typer.Argument(help="The datastore.")]) -> None:
    """Build a store's static suffix index, for the drafter `rest`.

    Finds every occurrence of the context's last tokens in microseconds. An index that is there already is
    replaced in one step; until then readers see the old one.

    [dim]specds build-suffix code.ds[/dim]
    """
    import time

    from specds.cli.render import note, working
    from specds.datastore.store import open_store
    from specds.datastore.suffix import build_suffix as run

    began = time.perf_counter()
    opened = open_store(store)
    with working("sorting suffixes"):
        segment = run(opened)
    note(f"{store}: suffix index over {segment.tokens:,} tokens in {time.perf_counter() - began:.1f} s")
