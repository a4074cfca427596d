"""specds calibrate-drafts: learn how probable it is that a token from each source is accepted."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specds.cli import options, values


def calibrate_drafts(
    prompts: options.PromptOptions,
    drafting: options.DraftingOptions,
    sampling: options.SamplingOptions,
    target: options.TargetOptions,
    parallel: options.ParallelOptions,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write it here; default: beside the first --store.")
    ] = None,
    budget: Annotated[int, typer.Option(min=1, help="Draft tokens verified in a step while it watches.")] = 6,
    max_new_tokens: options.MaxNewTokens = 256,
    limit: options.Limit = None,
    quiet: options.Quiet = False,
) -> None:
    """Decode prompts, and fit the probabilities by which `--drafter auto` chooses what to verify.

    auto works without: probabilities come with specds. Those of your model, your store and your prompts are better. It
    watches which candidates the model takes, fits a model to all but every fourth prompt, and says how right it is on
    these. What is written lies beside the store as STORE.drafts.json; `decode` finds it there, for this model. Requests
    learn from each other, as they do in `decode`: the same probabilities again take the same --parallel N.

    [dim]specds calibrate-drafts -p some.jsonl --store code.ds[/dim]
    [dim]specds calibrate-drafts -p some.jsonl --output mine.json[/dim]
    [dim]specds decode -p todo.jsonl --set calibration=mine.json > answers.jsonl[/dim]
    """
    import itertools

    from specds.calibration.acceptance import LOOKED_AT, Collected, Nodes, collect, fit
    from specds.cli.render import acceptance_table, bar, note
    from specds.datastore.provenance import provenance
    from specds.decode.auto.acceptance import calibration_path
    from specds.decode.engine import Engine
    from specds.decode.method import Method
    from specds.errors import UsageError
    from specds.files import target_of

    parallel.check()
    if output is None and not drafting.store:
        raise UsageError("neither --store nor --output is given", "beside which store, or where, is it to be written?")
    path = target_of(output) if output is not None else calibration_path((drafting.store or [Path()])[0])
    # As `--budget auto` has it, which is what the probabilities are for.
    chosen_options = {"session": "yes", **drafting.settings()}
    picking = sampling.sampling()
    values.require_stores(drafting.store)
    language_model = target.target()
    draft_model = drafting.drafting(target)
    with options.reading(language_model, quiet):
        method = Method("auto", chosen_options, drafting.store or (), LOOKED_AT, draft_model=draft_model)
        engine = Engine(language_model, method, picking, target.runtime, parallel.memory())
    total, rows = prompts.total(limit), prompts.read(limit=limit)
    first = next(rows, None)
    if first is None:
        raise prompts.nothing()
    requests = parallel.choose(engine, first, max_new_tokens, total)
    with bar("watching", total, quiet=quiet) as update:

        def progress(state: Collected) -> None:
            update(len(state.nodes) + len(state.failed), None, -1.0)

        asked = itertools.chain([first], rows)
        state = collect(engine, asked, max_new_tokens, rows=budget, parallel=requests, progress=progress)
    for name, error in state.failed:
        note(f"prompt {name}: {error}")
    if not state.nodes:
        raise UsageError("no prompt could be answered", "see the errors above")
    now = provenance()
    about = {
        "model": language_model.name,
        "fingerprint": language_model.fingerprint,
        "tokens": state.tokens,
        "steps": state.steps,
        "command": now.command,
        "version": now.version,
        "date": now.date,
    }
    acceptance = fit(Nodes.join(state.nodes), about)
    acceptance.save(path)
    if not quiet:
        acceptance_table(str(path), acceptance, stderr=True)
    if state.failed:
        raise typer.Exit(1)
