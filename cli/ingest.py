"""specds ingest: text that exists already, as an out-of-distribution corpus."""

from __future__ import annotations

from typing import Annotated

import typer

from specds.cli import options


def ingest(
    files: Annotated[
        list[str],
        typer.Argument(
            help="JSONL, CSV, TSV, Parquet or text files (also .gz, .zst), - for stdin, or a Hugging Face data set."
        ),
    ],
    store: options.NewStore,
    tokenizing: options.TokenizerOptions,
    prompt_field: Annotated[str | None, typer.Option(help="The column with prompts.")] = None,
    response_field: Annotated[str | None, typer.Option(help="The column with responses.")] = None,
    text_field: Annotated[str | None, typer.Option(help="The column with raw text.")] = None,
    messages_field: Annotated[str | None, typer.Option(help="The column with chat messages.")] = None,
    split: Annotated[str, typer.Option(help="Which split of a Hugging Face data set.")] = "train",
    source: Annotated[str | None, typer.Option(help="File all documents under this name.")] = None,
    source_field: Annotated[str | None, typer.Option(help="The column that names each document's source.")] = None,
    licence: Annotated[
        str, typer.Option(help="The licence of these documents, for `specds inspect --provenance`.")
    ] = "",
    max_tokens: Annotated[
        int, typer.Option(min=2, help="Longer prompts and responses are cut to so many tokens.")
    ] = 1024,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many examples.")] = None,
    strict: options.Strict = False,
) -> None:
    """Add text that exists already to a datastore.

    Prompt and response pairs go through the model's chat template, so that they look as the model would see
    them; raw text is taken as it is. Columns are found by their usual names, or named. What the store holds
    already is skipped, so the same command can be run again.

    [dim]specds ingest qa.csv --prompt-field q --response-field a --store code.ds[/dim]
    """
    import itertools

    from specds.cli.render import bar, note
    from specds.datastore.creation import create_store, require_place
    from specds.datastore.ingestion import ingest as run
    from specds.errors import InputError
    from specds.reading.examples import count_examples, read_examples

    require_place(store)
    examples = read_examples(
        files,
        prompt_field=prompt_field,
        response_field=response_field,
        text_field=text_field,
        messages_field=messages_field,
        split=split,
        source=source,
        source_field=source_field,
        limit=limit,
    )
    first = next(examples, None)
    if first is None:
        raise InputError(f"nothing to ingest in {', '.join(files)}", "one example a line, as JSON or as plain text")
    examples = itertools.chain([first], examples)
    tokenizer = tokenizing.tokenizer()
    target = create_store(store, tokenizer)
    with bar("ingesting", count_examples(files, limit)) as update:
        report = run(target, tokenizer, examples, max_tokens, strict, licence, lambda done: update(done, None, -1.0))
    said = f"{store}: {report.documents:,} new documents, {report.tokens:,} tokens"
    if report.present:
        said += f"; {report.present:,} were there already"
    if report.truncated:
        said += f"; {report.truncated:,} cut to {max_tokens:,} tokens"
    note(said)
    for failed in report.failed[:10]:
        note(f"skipped row {failed.id}: {failed.error.message}")
    if len(report.failed) > 10:
        note(f"… and {len(report.failed) - 10:,} more rows")
    if report.failed:
        raise typer.Exit(1)
