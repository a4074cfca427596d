"""specds decode: answers to prompts, generated speculatively."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specds.cli import options, values

if TYPE_CHECKING:
    from specds.datastore.store import Store
    from specds.decode.engine import Engine
    from specds.decode.job import Job
    from specds.decode.method import Method


def decode(
    prompts: options.JobOptions,
    decoding: options.DecodingOptions,
    sampling: options.SamplingOptions,
    target: options.TargetOptions,
    config: Annotated[
        str | None,
        typer.Option(
            metavar="FILE[#GROUP]",
            help="Drafter, stores, options and budget that `specds tune` found; what is given beside it counts more.",
        ),
    ] = None,
    verifier: Annotated[
        str, typer.Option(help="auto (greedy at temperature 0, else sampling), or one of `specds drafters`.")
    ] = "auto",
    verifier_option: Annotated[
        list[str] | None,
        typer.Option(
            "--verifier-set", metavar="NAME=VALUE", help="An option of the verifier; see `specds drafters`. Repeatable."
        ),
    ] = None,
    table: Annotated[
        Path | None, typer.Option(help="The correction table of --verifier csd or ocm; see `specds calibrate-csd`.")
    ] = None,
    update_table: Annotated[
        bool, typer.Option("--update-table", help="Add this run's divergences to --table; other jobs may, too.")
    ] = False,
    verify_store: Annotated[
        bool, typer.Option("--verify", help="Read every byte of the stores first, as `specds verify` does.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Write answers to this file; those it holds already are not done again."),
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Write one row for each forward pass to this Parquet file.")
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Stop at the first prompt that fails.")] = False,
    quiet: options.Quiet = False,
) -> None:
    """Answer prompts, verifying drafted tokens several at a time.

    Answers go to stdout as JSON lines, in the order of the prompts, each as soon as it is there: id, text,
    token ids, finish reason and counters. A prompt that cannot be answered gets a record with an `error`; the
    others go on, and the exit code is 1. With a lossless verifier the texts are the model's own, whatever the
    drafter.

    [dim]specds decode -p todo.jsonl --store code.ds --drafter dresd > answers.jsonl[/dim]
    [dim]echo 'Name three primes.' | specds decode -p - | jq -r .text[/dim]
    """
    import contextlib
    import itertools
    from dataclasses import replace

    from specds.calibration.corrections import TableUpdates
    from specds.calibration.speed import PlainDecoding
    from specds.calibration.trace import TraceWriter
    from specds.cli.render import bar, emit, memory_note, note
    from specds.datastore.corrections import read_table
    from specds.decode.answers import answer_file
    from specds.decode.assembly import check_method
    from specds.decode.config import read_config
    from specds.decode.job import Job
    from specds.errors import UsageError

    picking = sampling.sampling()
    judging = values.settings(verifier_option or [], "--verifier-set")
    if table is not None:
        judging["table"] = str(table)
    if update_table and table is None:
        raise UsageError("--update-table is given without --table", "name the table that is to learn")
    method = _method(decoding, None if config is None else read_config(config))
    method = replace(method, verifier=verifier, verifier_options=judging)
    # What is wrong with stores and tables is said before a model is looked for, which may take a minute.
    check_method(method, picking)
    values.require_stores(method.paths)
    if table is not None and (table.exists() or not update_table):
        read_table(table)
    rows = prompts.read(limit=prompts.limit)
    stores: list[Store] = []
    if method.stores:
        # Before the weights are loaded: a store of another tokenizer is refused at once.
        tokenizer = target.tokenizer(quiet=quiet)
        stores = values.open_stores(method.paths, tokenizer, thorough=verify_store)
    first = next(rows, None)
    if first is None:
        raise prompts.nothing()
    language_model = target.target(quiet=quiet)

    from specds.decode.engine import Engine

    drafting = decoding.drafting(target)
    with options.reading(language_model, quiet):
        # The stores are opened once more: loading takes a while, and a writer may have replaced an index meanwhile.
        engine = Engine(language_model, replace(method, draft_model=drafting), picking, target.runtime)
    if not quiet:
        _remark(note, stores, engine)
        if engine.memory is not None:
            memory_note(f"verifier {verifier}", engine.memory)
    if update_table and engine.memory is None:
        raise UsageError(f"--verifier {verifier} counts no divergences", "--update-table goes with csd or ocm")
    plain = PlainDecoding(engine)
    counted = prompts.total(prompts.limit)
    learned = TableUpdates(table if update_table else None, engine)
    with contextlib.ExitStack() as stack:
        tracer = stack.enter_context(TraceWriter(trace, resumable=output is not None)) if trace is not None else None
        file = stack.enter_context(answer_file(output)) if output is not None else None
        write, held = (emit, []) if file is None else (file.write, file.held)
        lacks = tracer.carry_over([one.id for one in held if not one.failed]) if tracer is not None and held else []
        if lacks:
            note(
                f"note: {trace} will lack the steps of {len(lacks):,} answers that {output} holds already, the "
                f"first of them {lacks[0]!r}: the run that wrote them left no trace here"
            )
        stack.enter_context(contextlib.closing(learned))
        update = stack.enter_context(bar("decoding", counted, quiet=quiet))
        update(len(held), None, -1.0)
        job = Job(engine, decoding.max_new_tokens, file)
        for done in job.run(itertools.chain([first], rows)):
            if done.answer is not None:
                plain.saw(done.answer)
                if tracer is not None:
                    for turn, one in enumerate(done.answer.turns):
                        tracer.add(done.answer.id, turn, method.drafter, one.steps)
            write(done.record)
            if done.error is not None and strict:
                raise done.error
            learned.saw(0 if done.answer is None else done.answer.counters.tokens)
            update(done.number + 1, None, job.counters.tokens_per_second)
    if not quiet:
        _summary(job, plain.seconds())
    if job.failed or any(one.failed for one in held):
        raise typer.Exit(1)


def _method(given: options.DecodingOptions, configured: Method | None) -> Method:
    """What is given, and what a configuration says where nothing is."""
    from specds.decode.method import AUTO, Method

    drafter, settings, stores = given.drafter or AUTO, given.settings(), tuple(given.store or ())
    budget = values.budget(given.budget or AUTO)
    if configured is not None:
        stores = stores or tuple(configured.paths)
        budget = configured.budget if given.budget is None else budget
        if given.drafter in (None, configured.drafter) and given.draft_model is None:
            drafter, settings = configured.drafter, {**configured.options, **settings}
    return Method(drafter, settings, stores, budget, draft_model=given.draft_model)


def _remark(note: Callable[[str], None], stores: list[Store], engine: Engine) -> None:
    """What a user would want to be told about the stores before a long job."""
    from specds.decode.assembly import drafter_class

    kinds = drafter_class(engine.method.drafter).indexes
    if stores and not kinds:
        note(f"note: drafter {engine.method.drafter} looks nothing up; --store is not used")
    for store in engine.unused:
        names = ", ".join(sorted({one.model.name if one.model else "?" for one in store.manifest.dense}))
        command = f"specds build-dense {store.path} --model {engine.model.name} --replace"
        note(
            f"note: the dense index of {store.path} holds hidden states of {names}, and is not used with "
            f"{engine.model.name} — `{command}` builds it anew"
        )
    for store in stores:
        for kind, segments in store.manifest.indexes.items():
            missing = store.manifest.uncovered(kind) if segments and kind in kinds else []
            if missing:
                note(
                    f"note: {len(missing)} corpus files of {store.path} are not in its {kind} index yet — "
                    f"`specds build-{kind} {store.path}` takes them in"
                )


def _summary(job: Job, plain: float | None) -> None:
    """The table at the end of `specds decode`.

    Args:
        plain: seconds that plain decoding would have taken; None if that is not known.
    """
    from rich.table import Table

    from specds.cli.render import console, note
    from specds.decode.verifiers import verifier_name

    engine, counters = job.engine, job.counters
    judge = verifier_name(engine.method.verifier, engine.sampling)
    exact = "lossless" if engine.lossless else "lossy"
    title = f"{engine.method.drafter}, verified by {judge} ({exact}), {engine.chosen_runtime} runtime"
    table = Table(title=title, title_justify="left")
    for name in ("prompts", "tokens", "steps", "MAT", "acceptance", "per node", "tokens/s", "drafting"):
        table.add_column(name, justify="right")
    table.add_row(
        f"{job.answered}" + (f" ({job.failed} failed)" if job.failed else ""),
        f"{counters.tokens:,}",
        f"{counters.steps:,}",
        f"{counters.mat:.2f}",
        f"{counters.acceptance:.1%}" if counters.drafted else "–",
        f"{counters.node_acceptance:.1%}" if counters.drafted else "–",
        f"{counters.tokens_per_second:.1f}",
        f"{counters.drafting_share:.1%}",
    )
    console.print(table)
    if plain is not None and counters.seconds:
        note(
            f"about {plain / counters.seconds:.2f} × plain decoding, by what its forward passes take here; "
            "`specds bench` measures it"
        )
    if counters.rescued:
        note(f"{counters.rescued:,} drafted tokens were accepted (lossy) where the target had picked others")
    if job.failed:
        note(f"{job.failed:,} of {job.answered:,} prompts failed; the first: {job.first_failure}")
    if job.file is not None and (held := job.file.held):
        broken = sum(one.failed for one in held)
        said = f", {broken:,} of them errors" if broken else ""
        note(f"{job.file.path}: {len(held):,} answers were there already{said}")
