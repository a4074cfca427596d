"""specds generate: the model's own answers to prompts, as an in-distribution corpus."""

from __future__ import annotations

from typing import Annotated

import typer

from specds.cli import options


def generate(
    prompts: options.JobOptions,
    store: options.NewStore,
    sampling: options.SamplingOptions,
    model: options.ModelOptions,
    samples_per_prompt: Annotated[
        int, typer.Option(min=1, help="Responses a prompt; needs a temperature.", rich_help_panel="Sampling")
    ] = 1,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of a response.")] = 256,
    max_prompt_tokens: Annotated[
        int, typer.Option(min=1, help="Of a longer prompt the last so many tokens are kept.")
    ] = 1024,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts in one forward pass; saved after each batch.")] = 16,
    source: Annotated[str, typer.Option(help="The name that the documents are filed under.")] = "generated",
    strict: options.Strict = False,
) -> None:
    """Write the model's own responses to prompts into a datastore.

    Text that the model wrote itself predicts it best. The corpus is saved after every batch: stopped or killed
    at any moment, the same command goes on where it stopped, and no response is lost or doubled.

    [dim]specds generate prompts.jsonl --store code.ds --max-new-tokens 128[/dim]
    """
    import time

    from specds.cli.render import bar, note
    from specds.datastore.creation import create_store, require_place
    from specds.errors import UsageError
    from specds.reading.prompts import BadRow

    require_place(store)
    picking = sampling.sampling()
    if samples_per_prompt > 1 and picking.greedy:
        raise UsageError(
            "--samples-per-prompt needs sampling: greedy answers would all be the same", "add --temperature 0.7"
        )
    rows = list(prompts.read(limit=prompts.limit))
    if not rows:
        raise prompts.nothing()
    for row in rows:
        if isinstance(row, BadRow):
            if strict:
                raise row.error
            note(f"skipped prompt {row.id}: {row.error.message}")
    language_model = model.load(weights=True)
    target = create_store(store, language_model.tokenizer)

    from specds.datastore.generation import GenerationOptions
    from specds.datastore.generation import generate as run

    wanted = GenerationOptions(picking, samples_per_prompt, max_new_tokens, max_prompt_tokens, batch_size, source)
    began = time.perf_counter()
    with bar("generating", None) as update:
        report = run(
            target,
            language_model,
            rows,
            wanted,
            lambda done, total, tokens: update(done, total, tokens / max(time.perf_counter() - began, 1e-9)),
            strict=strict,
        )
    seconds = time.perf_counter() - began
    said = f"{store}: {report.documents:,} new documents, {report.tokens:,} response tokens"
    if report.documents:
        said += f" at {report.tokens / seconds:.1f} tokens/s"
    if report.present:
        said += f"; {report.present:,} were there already"
    if report.truncated:
        said += f"; {report.truncated:,} prompts cut to {max_prompt_tokens:,} tokens"
    note(said)
    unusable = [failed for failed in report.failed if failed not in rows]
    for failed in unusable:
        note(f"failed prompt {failed.id}: {failed.error.message}")
    if report.failed:
        raise typer.Exit(1)
