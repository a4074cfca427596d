"""specds inspect: what is in a store, and how right the probabilities of its drafts are."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def inspect(
    store: Annotated[Path, typer.Argument(help="The datastore, or a calibration of drafts (.json).")],
    json: Annotated[bool, typer.Option("--json", help="One JSON object instead of text.")] = False,
    provenance: Annotated[
        bool, typer.Option("--provenance", help="Where every part came from, and what was done to the store since.")
    ] = False,
    drafts: Annotated[
        bool, typer.Option("--drafts", help="The probabilities of drafts that are used where the store has none, too.")
    ] = False,
) -> None:
    """Show what a store holds: documents, tokens by source, models, indexes with their quality, size, provenance.

    What `specds calibrate-drafts` left beside it is shown, too: of candidates that were promised a probability, how
    many the model took.

    [dim]specds inspect code.ds --json | jq .indexes[/dim]
    """
    from specds.cli.render import (
        acceptance_record,
        acceptance_table,
        emit,
        provenance_lines,
        store_record,
        store_tables,
    )
    from specds.datastore.store import open_store
    from specds.decode.auto.acceptance import calibration_path, load_acceptance, shipped

    if store.is_file():
        found = load_acceptance(store)
        if json:
            emit(acceptance_record(str(store), found))
        else:
            acceptance_table(str(store), found)
        return
    opened = open_store(store)
    beside = calibration_path(opened.path)
    calibrated = [(str(beside), load_acceptance(beside))] if beside.is_file() else []
    if drafts and not calibrated:
        calibrated = [("shipped with specds", shipped())]
    if json:
        emit({**store_record(opened), **({"drafts": acceptance_record(*calibrated[0])} if calibrated else {})})
    elif provenance:
        provenance_lines(opened)
    else:
        store_tables(opened)
        for path, found in calibrated:
            acceptance_table(path, found)
