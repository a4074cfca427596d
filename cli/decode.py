"""specds decode: answers to prompts, generated speculatively."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specds.cli import options, values
from specds.errors import UsageError

if TYPE_CHECKING:
    from specds.calibration.speed import PlainDecoding
    from specds.datastore.store import Store
    from specds.decode.engine import Engine
    from specds.decode.job import Job
    from specds.decode.method import Method
    from specds.reading.prompts import BadRow, Prompt
    from specds.sampling import Sampling


@dataclass(frozen=True, slots=True)
class VerifyingOptions:
    """Which verifier judges drafts, and the table that it reads or teaches."""

    verifier: Annotated[
        str, typer.Option(help="auto (greedy at temperature 0, else sampling), or one of `specds drafters`.")
    ] = "auto"
    verifier_option: Annotated[
        list[str] | None,
        typer.Option(
            "--verifier-set", metavar="NAME=VALUE", help="An option of the verifier; see `specds drafters`. Repeatable."
        ),
    ] = None
    table: Annotated[
        Path | None, typer.Option(help="The correction table of --verifier csd or ocm; see `specds calibrate-csd`.")
    ] = None
    update_table: Annotated[
        bool, typer.Option("--update-table", help="Add this run's divergences to --table; other jobs may, too.")
    ] = False

    def settings(self) -> dict[str, str]:
        """The verifier's options.

        Raises:
            UsageError: a table is to learn, and none is named.
        """
        settings = values.settings(self.verifier_option or [], "--verifier-set")
        if self.table is not None:
            settings["table"] = str(self.table)
        elif self.update_table:
            raise UsageError("--update-table is given without --table", "name the table that is to learn")
        return settings


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """Where answers go, what is kept of how they came to be, and what becomes of failures."""

    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Write answers to this file; those it holds already are not done again."),
    ] = None
    trace: Annotated[Path | None, typer.Option(help="Write one row for each step to this Parquet file.")] = None
    strict: Annotated[bool, typer.Option("--strict", help="Stop at the first prompt that fails.")] = False
    quiet: options.Quiet = False


def decode(
    prompts: options.JobOptions,
    decoding: options.DecodingOptions,
    sampling: options.SamplingOptions,
    target: options.TargetOptions,
    parallel: options.ParallelOptions,
    config: Annotated[
        str | None,
        typer.Option(
            metavar="FILE[#GROUP]",
            help="Drafter, stores, options and budget that `specds tune` found; what is given beside it counts more.",
        ),
    ] = None,
    verifying: VerifyingOptions = VerifyingOptions(),
    verify_store: Annotated[
        bool, typer.Option("--verify", help="Read every byte of the stores first, as `specds verify` does.")
    ] = False,
    answers: AnswerOptions = AnswerOptions(),
) -> None:
    """Answer prompts, verifying drafted tokens several at a time.

    Answers go to stdout as JSON lines, in the order of the prompts, each as soon as it is there: id, text,
    token ids, finish reason and counters. A prompt that cannot be answered gets a record with an `error`; the
    others go on, and the exit code is 1. With a lossless verifier the texts are the model's own, whatever the
    drafter and however many are answered at once. Those that count (csd, ocm) learn from all requests step by
    step: the same texts again take the same --parallel, and a --budget that is a number. Prompts of a pipe are begun
    as they come.

    [dim]specds decode -p todo.jsonl --store code.ds --drafter dresd > answers.jsonl[/dim]
    [dim]echo 'Name three primes.' | specds decode -p - | jq -r .text[/dim]
    """
    parallel.check()
    from specds.decode.job import Job

    picking = sampling.sampling()
    method = _method(decoding, verifying, config)
    # What is wrong with stores and tables is said before a model is looked for, which may take a minute.
    _check(method, picking, verifying)
    rows = prompts.read(limit=prompts.limit)
    stores: list[Store] = []
    if method.stores:
        # Before the weights are loaded: a store of another tokenizer is refused at once.
        tokenizer = target.tokenizer(quiet=answers.quiet)
        stores = values.open_stores(method.paths, tokenizer, thorough=verify_store)
    first = next(rows, None)
    if first is None:
        raise prompts.nothing()
    engine = _engine(method, decoding, target, picking, parallel, answers.quiet)
    if not answers.quiet:
        _remark(stores, engine)
    if verifying.update_table and engine.memory is None:
        raise UsageError(
            f"--verifier {verifying.verifier} counts no divergences", "--update-table goes with csd or ocm"
        )
    learning = verifying.table if verifying.update_table else None
    total = prompts.total(prompts.limit)
    job = Job(engine, decoding.max_new_tokens)
    job.parallel = parallel.choose(engine, first, decoding.max_new_tokens, total)
    plain = _answer(job, itertools.chain([first], rows), prompts.streamed, total, answers, learning)
    if not answers.quiet:
        _summary(job, plain.seconds())
    held = job.file.held if job.file is not None else []
    if job.failed or any(answer.failed for answer in held):
        raise typer.Exit(1)


def _method(given: options.DecodingOptions, verifying: VerifyingOptions, config: str | None) -> Method:
    """What is given, and what a configuration says where nothing is."""
    from specds.decode.config import read_config
    from specds.decode.method import AUTO, Method

    judging = verifying.settings()
    drafter, settings, stores = given.drafter or AUTO, given.settings(), tuple(given.store or ())
    budget = values.budget(given.budget or AUTO)
    if config is not None:
        configured = read_config(config)
        stores = stores or tuple(configured.paths)
        budget = configured.budget if given.budget is None else budget
        if given.drafter in (None, configured.drafter) and given.draft_model is None:
            drafter, settings = configured.drafter, {**configured.options, **settings}
    return Method(
        drafter,
        settings,
        stores,
        budget,
        verifier=verifying.verifier,
        verifier_options=judging,
        draft_model=given.draft_model,
    )


def _check(method: Method, sampling: Sampling, verifying: VerifyingOptions) -> None:
    """Refuse what can be told to be wrong without the model."""
    from specds.datastore.corrections import read_table
    from specds.decode.assembly import check_method

    check_method(method, sampling)
    values.require_stores(method.paths)
    table = verifying.table
    if table is not None and (table.exists() or not verifying.update_table):
        read_table(table)


def _engine(
    method: Method,
    decoding: options.DecodingOptions,
    target: options.TargetOptions,
    sampling: Sampling,
    parallel: options.ParallelOptions,
    quiet: bool,
) -> Engine:
    """The target, loaded, with all that the method needs."""
    language_model = target.target(quiet=quiet)

    from specds.decode.engine import Engine

    drafting = decoding.drafting(target)
    with options.reading(language_model, quiet):
        # The stores are opened once more: loading takes a while, and a writer may have replaced an index meanwhile.
        return Engine(
            language_model, replace(method, draft_model=drafting), sampling, target.runtime, parallel.memory()
        )


def _answer(
    job: Job,
    asked: Iterable[Prompt | BadRow],
    streamed: bool,
    total: int | None,
    answers: AnswerOptions,
    learning: Path | None,
) -> PlainDecoding:
    """Answer prompts and write what comes of each, as soon as it is there.

    Args:
        streamed: whether they come when they come.
        total: how many there are, as far as that is known.
        learning: the table that takes in the run's divergences.

    Returns:
        what the job would have taken without drafts.

    Raises:
        PromptError: with `strict`, of the first prompt that fails.
    """
    from specds.calibration.corrections import TableUpdates
    from specds.calibration.speed import PlainDecoding
    from specds.calibration.trace import TraceWriter
    from specds.cli.render import bar, emit
    from specds.decode.answers import answer_file

    engine = job.engine
    plain, learned = PlainDecoding(engine), TableUpdates(learning, engine)
    resumable = answers.output is not None
    with contextlib.ExitStack() as stack:
        tracer = stack.enter_context(TraceWriter(answers.trace, resumable=resumable)) if answers.trace else None
        file = stack.enter_context(answer_file(answers.output)) if answers.output else None
        write, held = (emit, []) if file is None else (file.write, file.held)
        if tracer is not None and held:
            _remark_on_trace(tracer.carry_over([answer.id for answer in held if not answer.failed]), answers)
        stack.enter_context(contextlib.closing(learned))
        update = stack.enter_context(bar("decoding", total, quiet=answers.quiet))
        update(len(held), None, -1.0)
        job.file = file
        for done in job.run(asked, streamed=streamed):
            if done.answer is not None:
                plain.saw(done.answer)
                if tracer is not None:
                    for number, turn in enumerate(done.answer.turns):
                        tracer.add(done.answer.id, number, engine.method.drafter, turn.steps)
            write(done.record)
            if done.error is not None and answers.strict:
                raise done.error
            learned.saw(0 if done.answer is None else done.answer.counters.tokens)
            update(done.number + 1, None, job.tokens_per_second)
    return plain


def _remark_on_trace(lacking: list[str], answers: AnswerOptions) -> None:
    """What a user would want to be told about a trace that goes on with answers of an earlier run."""
    from specds.cli.render import note

    if lacking:
        note(
            f"note: {answers.trace} will lack the steps of {len(lacking):,} answers that {answers.output} holds "
            f"already, the first of them {lacking[0]!r}: the run that wrote them left no trace here"
        )


def _remark(stores: list[Store], engine: Engine) -> None:
    """What a user would want to be told about stores and tables before a long job."""
    from specds.cli.render import memory_note, note
    from specds.decode.assembly import drafter_class

    kinds = drafter_class(engine.method.drafter).indexes
    if stores and not kinds:
        note(f"note: drafter {engine.method.drafter} looks nothing up; --store is not used")
    for store in engine.unused:
        names = ", ".join(sorted({segment.model.name if segment.model else "?" for segment in store.manifest.dense}))
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
    if engine.memory is not None:
        memory_note(f"verifier {engine.method.verifier}", engine.memory)


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
    at_once = "one request at a time" if job.parallel == 1 else f"{job.parallel} requests at once"
    title = f"{engine.method.drafter}, verified by {judge} ({exact}), {engine.chosen_runtime} runtime, {at_once}"
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
        f"{job.tokens_per_second:.1f}",
        f"{counters.drafting_share:.1%}",
    )
    console.print(table)
    if plain is not None and counters.seconds:
        many = "" if job.parallel == 1 else " of as many requests at once"
        note(
            f"about {plain / counters.seconds:.2f} × plain decoding{many}, by what its forward passes take here; "
            "`specds bench` measures it"
        )
    if counters.rescued:
        note(f"{counters.rescued:,} drafted tokens were accepted (lossy) where the target had picked others")
    if job.failed:
        note(f"{job.failed:,} of {job.answered:,} prompts failed; the first: {job.first_failure}")
    if job.file is not None and (held := job.file.held):
        broken = sum(answer.failed for answer in held)
        said = f", {broken:,} of them errors" if broken else ""
        note(f"{job.file.path}: {len(held):,} answers were there already{said}")
