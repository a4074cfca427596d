"""specds calibrate-csd: count where the target diverges from drafts, into a correction table."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specds.cli import options, values


def calibrate_csd(
    prompts: options.PromptOptions,
    target: options.TargetOptions,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The table (Parquet): begun, added to, or gone on with.")
    ],
    decoding: options.DecodingOptions = options.DecodingOptions(drafter="model", budget="16"),
    sampling: options.SamplingOptions = options.SamplingOptions(temperature=0.6),
    parallel: options.ParallelOptions = options.ParallelOptions(),
    limit: options.Limit = None,
    quiet: options.Quiet = False,
) -> None:
    """Decode prompts with standard speculative decoding, and count how the target diverges from the drafts.

    The table holds how often each token was drafted where the target picked each other one (CSD, §4.2); `decode
    --verifier csd --table T` accepts such drafts where they recur (lossy). It belongs to this target, drafter and
    tokenizer. A stopped run goes on where it was; prompts that the table knows are not counted again. The counts are
    the same however many prompts are answered at once (unless auto is told --set session=yes).

    [dim]specds calibrate-csd -p train.jsonl -s code.ds -d rest -o T.parquet[/dim]
    [dim]specds decode -p F.jsonl -s code.ds -d rest --verifier csd --table T.parquet[/dim]
    """
    import itertools

    from specds.calibration.corrections import STRICT, Calibration, calibrate
    from specds.cli.render import bar, note, table_summary
    from specds.datastore.corrections import read_table
    from specds.decode.engine import Engine
    from specds.decode.method import AUTO, Method
    from specds.errors import UsageError

    parallel.check()
    picking = sampling.sampling()
    budget = values.budget(str(decoding.budget))
    if not budget:
        raise UsageError(f"--budget is {decoding.budget}", "a number, 1 or more: what is counted is to be repeatable")
    values.require_stores(decoding.store)
    if output.exists():
        read_table(output)
    language_model = target.target()
    with options.reading(language_model, quiet):
        method = Method(
            decoding.drafter or AUTO,
            decoding.settings(),
            decoding.store or (),
            budget,
            "csd",
            STRICT,
            decoding.drafting(target),
        )
        engine = Engine(language_model, method, picking, target.runtime, parallel.memory())
    total, rows = prompts.total(limit), prompts.read(limit=limit)
    first = next(rows, None)
    if first is None:
        raise prompts.nothing()
    requests = parallel.choose(engine, first, decoding.max_new_tokens, total)
    with bar("calibrating", total, quiet=quiet) as update:

        def progress(state: Calibration) -> None:
            update(state.prompts + state.known + len(state.failed), None, -1.0)

        asked = itertools.chain([first], rows)
        state = calibrate(engine, asked, output, decoding.max_new_tokens, progress, parallel=requests)
    for name, error in state.failed:
        note(f"prompt {name}: {error.message}")
    if not quiet:
        note(
            f"{state.prompts:,} prompts, {state.tokens:,} tokens counted"
            + (f"; {state.known:,} were known" if state.known else "")
        )
        table_summary(str(output), read_table(output))
    if state.failed:
        raise typer.Exit(1)
