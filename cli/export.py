"""specds export: a store's documents for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specds.cli import options

if TYPE_CHECKING:
    from specds.tokenizer import Tokenizer

FORMATS = ("jsonl", "parquet", "llama-cpp")


def export(
    store: Annotated[Path, typer.Argument(help="The datastore.")],
    to: Annotated[
        str,
        typer.Option(
            metavar="|".join(FORMATS), help="Documents as JSON lines or Parquet, or a static lookup cache of llama.cpp."
        ),
    ] = "jsonl",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The file to write; default for jsonl: stdout.")
    ] = None,
    source: Annotated[list[str] | None, typer.Option(help="Only documents of this source. Repeatable.")] = None,
    text: Annotated[bool, typer.Option("--text", help="Add prompt and response as text.")] = False,
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="Whose tokenizer makes the text; default: the model the store names."),
    ] = None,
) -> None:
    """Write a store's documents: id, source, and the tokens of prompt and response.

    A file is there whole or not at all. The lookup cache holds what follows each two tokens, and how often; it is for
    `--lookup-cache-static` of llama.cpp with the same model.

    [dim]specds export code.ds --text | jq -r .response[/dim]
    [dim]specds export code.ds --to llama-cpp --output code.lookup[/dim]
    """
    from specds.cli.render import emit, note, working
    from specds.datastore.export import export_jsonl, export_lookup_cache, export_parquet, export_records
    from specds.datastore.store import open_store
    from specds.errors import UsageError

    if to not in FORMATS:
        raise UsageError(f"--to is {to!r}", f"one of {', '.join(FORMATS)}")
    if to == "llama-cpp" and text:
        raise UsageError("--text has no place in a lookup cache", "leave it out")
    if to != "jsonl" and output is None:
        raise UsageError(f"--to {to} writes a file", "name it with --output")
    opened = open_store(store)
    sources = source or []
    tokenizer: Tokenizer | None = None
    if text:
        tokenizer = options.tokenizer_of(model or opened.manifest.tokenizer.name, None, False)
    if output is None:
        for record in export_records(opened, sources, tokenizer):
            emit(record)
        return
    with working("writing"):
        if to == "llama-cpp":
            done = export_lookup_cache(output, opened, sources)
        else:
            done = (export_jsonl if to == "jsonl" else export_parquet)(output, opened, sources, tokenizer)
    said = f"{output}: {done.documents:,} documents, {done.tokens:,} tokens"
    note(said + (f", {done.contexts:,} contexts" if to == "llama-cpp" else ""))
