"""specds generate: the model's own answers to prompts, as an in-distribution corpus."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specds.cli import options, values

if TYPE_CHECKING:
    from specds.decode.method import Method
    from specds.model import LanguageModel


def generate(
    prompts: options.JobOptions,
    store: options.NewStore,
    sampling: options.SamplingOptions,
    target: options.TargetOptions,
    parallel: options.ParallelOptions,
    samples_per_prompt: Annotated[
        int, typer.Option(min=1, help="Responses a prompt; needs a temperature.", rich_help_panel="Sampling")
    ] = 1,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of a response.")] = 256,
    max_prompt_tokens: Annotated[
        int, typer.Option(min=1, help="Of a longer prompt the last so many tokens are kept.")
    ] = 1024,
    save_every: Annotated[int, typer.Option(min=1, help="Responses after which the corpus is saved.")] = 64,
    source: Annotated[str, typer.Option(help="The name that the documents are filed under.")] = "generated",
    drafter: options.Drafter = None,
    draft_store: Annotated[
        list[Path] | None,
        typer.Option(help="A datastore to draft from besides the one that is written to. Repeatable."),
    ] = None,
    budget: options.Budget = "auto",
    strict: options.Strict = False,
) -> None:
    """Write the model's own responses to prompts into a datastore.

    Text that the model wrote itself predicts it best. Many responses are written at once, each with drafts: from the
    store's own indexes, as far as it has some, and from what was written before. The text is that of `specds decode`
    with the same sampling. The corpus is saved after every --save-every responses, in the order of the prompts: stopped
    or killed at any moment, the same command goes on where it stopped, and no response is lost or doubled.

    [dim]specds generate prompts.jsonl --store code.ds --max-new-tokens 128[/dim]
    """
    import time
    from dataclasses import replace

    from specds.cli.render import bar, note
    from specds.datastore.creation import create_store, require_place
    from specds.decode.assembly import check_method, drafter_class
    from specds.decode.method import AUTO, Method
    from specds.errors import UsageError
    from specds.reading.prompts import BadRow

    parallel.check()
    require_place(store)
    picking = sampling.sampling()
    if samples_per_prompt > 1 and picking.greedy:
        raise UsageError(
            "--samples-per-prompt needs sampling: greedy answers would all be the same", "add --temperature 0.7"
        )
    method = Method(drafter or AUTO, stores=tuple(draft_store or ()), budget=values.budget(budget))
    looks_up = drafter_class(method.drafter).store_required
    values.require_stores(method.paths)
    rows = list(prompts.read(limit=prompts.limit))
    if not rows:
        raise prompts.nothing()
    for row in rows:
        if isinstance(row, BadRow):
            if strict:
                raise row.error
            note(f"skipped prompt {row.id}: {row.error.message}")
    language_model = target.target()
    method = replace(method, stores=(*_own(store, method, language_model), *method.paths))
    if looks_up and not method.stores:
        raise UsageError(
            f"--drafter {method.drafter} looks things up in an index, and {store} has none",
            "build it first, or draft from another store with --draft-store",
        )
    check_method(method, picking)

    from specds.decode.engine import Engine
    from specds.decode.generation import GenerationOptions
    from specds.decode.generation import generate as run

    with options.reading(language_model):
        # What does not load is to fail before anything is written.
        engine = Engine(language_model, method, picking, target.runtime, parallel.memory())
    filled = create_store(store, language_model.tokenizer)
    requests = parallel.choose(engine, rows[0], max_new_tokens, len(rows) * samples_per_prompt)
    wanted = GenerationOptions(samples_per_prompt, max_new_tokens, max_prompt_tokens, requests, save_every, source)
    began = time.perf_counter()
    with bar("generating", None) as update:
        report = run(
            filled,
            engine,
            rows,
            wanted,
            lambda done, total, tokens: update(done, total, tokens / max(time.perf_counter() - began, 1e-9)),
            strict=strict,
        )
    seconds = time.perf_counter() - began
    said = f"{store}: {report.documents:,} new documents, {report.tokens:,} response tokens"
    if report.documents:
        said += f" at {report.tokens / seconds:.1f} tokens/s, {requests} at once, MAT {report.counters.mat:.2f}"
    if report.present:
        said += f"; {report.present:,} were there already"
    if report.truncated:
        said += f"; {report.truncated:,} prompts cut to {max_prompt_tokens:,} tokens"
    note(said)
    told = {id(row.error) for row in rows if isinstance(row, BadRow)}
    for failed in report.failed:
        if id(failed.error) not in told:
            note(f"failed prompt {failed.id}: {failed.error.message}")
    if report.failed:
        raise typer.Exit(1)


def _own(store: Path, method: Method, model: LanguageModel) -> list[Path]:
    """The store that is written to, if it has an index that the drafter can draft from."""
    from specds.datastore.manifest import NAME
    from specds.datastore.store import open_store
    from specds.decode.assembly import drafter_class

    if not (store / NAME).exists() or store in method.paths:
        return []
    held = open_store(store, model.tokenizer).manifest
    dense = all(segment.model and segment.model.fingerprint == model.fingerprint for segment in held.dense)
    usable = {"suffix": bool(held.suffix), "dense": bool(held.dense) and dense}
    return [store] if any(usable[kind] for kind in drafter_class(method.drafter).indexes) else []
