"""specds calibrate-csd: count where the target diverges from drafts, into a correction table."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specds.cli import options


def calibrate_csd(
    prompt_file: options.Prompts,
    out: Annotated[Path, typer.Option("--out", "-o", help="The table (Parquet): begun, added to, or gone on with.")],
    drafter: options.Drafter = "model",
    draft_model: options.DraftModel = None,
    store: options.Stores = None,
    set_option: options.Set = None,
    budget: Annotated[int, typer.Option(min=1, help="Most draft tokens verified in one step.")] = 16,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 256,
    temperature: options.Temperature = 0.6,
    top_p: options.TopP = 1.0,
    top_k: options.TopK = 0,
    seed: options.Seed = 0,
    model: options.Model = "smollm2-135m",
    revision: options.Revision = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    threads: options.Threads = None,
    runtime: options.Runtime = "auto",
    trust_remote_code: options.TrustRemoteCode = False,
    format: options.Format = None,
    prompt_field: options.PromptField = "prompt",
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many prompts.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No summary.")] = False,
) -> None:
    """Decode prompts with standard speculative decoding, and count how the target diverges from the drafts.

    The table holds how often each token was drafted where the target picked each other one (CSD, §4.2); `decode
    --verifier csd --table T` lets such drafts pass that recur. It belongs to this target, this drafter and this
    tokenizer. A stopped run goes on where it was; prompts that the table knows are not counted again.

    [dim]specds calibrate-csd -p train.jsonl --store code.ds -d rest --out rest.parquet[/dim]
    [dim]specds decode -p todo.jsonl --store code.ds -d rest --verifier csd --table rest.parquet > answers.jsonl[/dim]
    """
    import itertools

    from specds.calibration.corrections import COUNTING, Calibration, calibrate
    from specds.cli.render import bar, note, table_summary
    from specds.datastore.corrections import read_table
    from specds.decode.engine import Engine
    from specds.decode.method import Method
    from specds.reading.prompts import read_prompts
    from specds.sampling import Sampling

    sampling = Sampling(temperature, top_k, top_p, seed)
    rows = itertools.islice(read_prompts(prompt_file, format=format, prompt_field=prompt_field), limit)
    options.require_stores(store)
    if out.exists():
        read_table(out)
    language_model = options.load(model, revision, dtype, device, threads, trust_remote_code, runtime=runtime)
    drafting = options.draft_model(draft_model, device, dtype, trust_remote_code)
    with options.reading(language_model, quiet):
        method = Method(drafter, options.settings(set_option or []), store or (), budget, "csd", COUNTING, drafting)
        engine = Engine(language_model, method, sampling, runtime)
    with bar("calibrating", options.total(prompt_file, format, limit), quiet=quiet) as update:

        def progress(state: Calibration) -> None:
            update(state.prompts + state.known + len(state.failed), None, -1.0)

        state = calibrate(engine, rows, out, max_new_tokens, progress)
    for name, error in state.failed:
        note(f"prompt {name}: {error.message}")
    if not quiet:
        note(
            f"{state.prompts:,} prompts, {state.tokens:,} tokens counted"
            + (f"; {state.known:,} were known" if state.known else "")
        )
        table_summary(str(out), read_table(out))
    if state.failed:
        raise typer.Exit(1)
