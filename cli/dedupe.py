"""specds dedupe: what stands in a store more than once."""

from __future__ import annotations

from typing import Annotated

import typer

from specds.cli import options


def dedupe(
    store: options.StorePath,
    with_prompts: Annotated[
        bool,
        typer.Option("--with-prompts", help="Equal are documents of equal prompt and response, not of equal response."),
    ] = False,
    boilerplate: Annotated[
        int | None,
        typer.Option(min=2, metavar="N", help="Also cut passages of N tokens or more that earlier documents hold."),
    ] = None,
    keep: Annotated[int, typer.Option(min=1, help="How many documents may hold such a passage.")] = 1,
    shortest: Annotated[int, typer.Option(min=1, help="Pieces that cutting leaves are dropped below so many.")] = 16,
    dry_run: Annotated[bool, typer.Option("--dry-run", "-n", help="Only say what would be saved.")] = False,
    json: options.Json = False,
) -> None:
    """Take out documents whose response an earlier one has, and passages that many share.

    Copies make drafts no better: how often a text stands in a store is what suffix drafts are counted from. Cut
    documents become pieces of their own, which no index covers until it is built again. `generate` and `ingest`
    would add again what was taken out, if they are given the same input.

    [dim]specds dedupe code.ds --boilerplate 48 --dry-run[/dim]
    """
    from specds.cli.render import emit, note, working
    from specds.datastore.duplicates import find_boilerplate, find_duplicates, savings
    from specds.datastore.rewriting import rewrite
    from specds.datastore.store import open_store

    opened = open_store(store)
    with working("looking for copies"):
        copies = find_duplicates(opened, prompts=with_prompts)
        gone = set(copies.doc_ids)
        shared = (
            find_boilerplate(opened, length=boilerplate, keep=keep, shortest=shortest, without=gone)
            if boilerplate
            else None
        )
    cuts = {cut.doc_id: cut for cut in shared.cuts} if shared else {}
    if not dry_run and (gone or cuts):
        with working("rewriting"):
            rewrite(
                opened,
                lambda document: (
                    ()
                    if document.doc_id in gone
                    else cuts[document.doc_id].apply(document)
                    if document.doc_id in cuts
                    else (document,)
                ),
                f"removed {len(gone)} copies and cut {len(cuts)} documents",
            )
    saved_by = {"copies": copies.saved, "boilerplate": shared.saved if shared else {}}
    if json:
        emit({"store": str(store), "dry_run": dry_run} | savings(saved_by))
        return
    for name, saved in saved_by.items():
        documents, tokens = (sum(getattr(count, what) for count in saved.values()) for what in ("documents", "tokens"))
        if name == "copies" or boilerplate:
            share = tokens / max(opened.manifest.tokens, 1)
            what = "would save" if dry_run else "saved"
            note(f"{store}: {name}: {what} {documents:,} documents and {tokens:,} tokens ({share:.1%})")
    missing = open_store(store).manifest
    if any(segments and missing.uncovered(kind) for kind, segments in missing.indexes.items()):
        note(f"note: pieces are not in the indexes yet: specds build-suffix {store}")
