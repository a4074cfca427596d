"""specds evaluate: is a datastore any good for some prompts?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from specds.cli import options, values
from specds.printing import printable

if TYPE_CHECKING:
    from specds.calibration.answers import Answers
    from specds.calibration.evaluation import Evaluation
    from specds.datastore.store import Store
    from specds.model import LanguageModel


def evaluate(
    store: options.StorePath,
    prompts: options.OptionalPromptOptions,
    target: options.TargetOptions,
    parallel: options.ParallelOptions,
    answers: Annotated[
        str | None,
        typer.Option(
            help="Their answers: what `specds decode` wrote, or, without --prompts, rows of prompts and responses as "
            "`specds ingest` reads them. Default: the model writes them now, --parallel at once.",
        ),
    ] = None,
    budgets: Annotated[str, typer.Option(metavar="N,N,…", help="Draft tokens a step.")] = "4,8,16,32,64",
    ngram: Annotated[int, typer.Option(min=1, help="Tokens of the n-grams that overlap is measured by.")] = 13,
    no_dense: Annotated[bool, typer.Option("--no-dense", help="Only the suffix index; no weights are read.")] = False,
    cost: options.Cost = None,
    max_new_tokens: options.RecordedLength = None,
    as_json: options.Json = False,
) -> None:
    """Say whether a datastore serves prompts such as these.

    How often the last tokens stand in the store and the next one is what followed there; MAT and acceptance that
    decoding would have; how much of the prompts and answers the store holds already (then it flatters itself); and
    which sources and corpus files gave nothing, and how old they are.

    [dim]specds evaluate code.ds -p some.jsonl --answers plain.jsonl[/dim]
    """
    from specds.calibration.evaluation import evaluate as evaluated
    from specds.cli.render import bar, emit, note
    from specds.datastore.store import open_store
    from specds.errors import UsageError

    parallel.check()
    if not prompts.prompts and answers is None:
        raise UsageError("neither --prompts nor --answers is given", "say what the store is to be good for")
    sizes = values.numbers("--budgets", budgets)
    curve = values.cost_curve(cost)
    # Before the weights are loaded: what is not a valid store, or one of another tokenizer, is refused at once.
    values.require_stores([store])
    open_store(store, target.tokenizer())
    language_model = target.target()
    opened = open_store(store, language_model.tokenizer)
    kinds = ["suffix"] if no_dense else ["suffix", "dense"]
    foreign = [
        segment
        for segment in opened.manifest.dense
        if segment.model and segment.model.fingerprint != language_model.fingerprint
    ]
    if foreign and not no_dense:
        kinds.remove("dense")
        note("note: the dense index is another model's; it is not looked at")
    if not prompts.prompts:
        from specds.calibration.answers import read_pairs

        recorded = read_pairs([str(answers)], language_model.tokenizer)
        if recorded.failed:
            note(f"note: {recorded.failed:,} rows do not hold a prompt and a response; they are left out")
    elif answers is None:
        recorded = _written(language_model, opened, prompts, max_new_tokens, target, parallel)
    else:
        recorded = values.recorded(answers, prompts, language_model, most=max_new_tokens)
    fitting = [turn for turn in recorded.turns if len(turn.text) <= language_model.context_length]
    if len(fitting) < len(recorded.turns):
        note(f"note: {len(recorded.turns) - len(fitting):,} answers are longer than the model's context; left out")
    with bar("evaluating", len(fitting)) as update:
        evaluation = evaluated(
            opened,
            fitting,
            language_model,
            indexes=kinds,
            budgets=sizes,
            ngram=ngram,
            curve=curve,
            runtime=target.runtime,
            progress=lambda done: update(done, None, -1.0),
        )
    if as_json:
        emit({"store": str(store), **evaluation.record()})
    else:
        _tables(str(store), evaluation)


_LENGTH = 128


def _written(
    model: LanguageModel,
    store: Store,
    prompts: options.PromptOptions,
    most: int | None,
    target: options.TargetOptions,
    parallel: options.ParallelOptions,
) -> Answers:
    """The model's own answers, drafted from the store where it has a suffix index."""
    import itertools

    from specds.calibration.answers import Answers, Recorded
    from specds.cli.render import bar
    from specds.decode.engine import Engine
    from specds.decode.method import Method

    length = most or _LENGTH
    with options.reading(model):
        method = Method("rest", stores=(store,), budget=8) if store.manifest.suffix else Method("pld", budget=8)
        engine = Engine(model, method, runtime=target.runtime, kv_memory=parallel.memory())
    turns: list[Recorded] = []
    failed = 0
    total, rows = prompts.total(), prompts.read()
    first = next(rows, None)
    if first is None:
        raise prompts.nothing()
    requests = parallel.choose(engine, first, length, total)
    with bar("answering", total) as update:
        for answered in engine.answers(itertools.chain([first], rows), length, parallel=requests):
            update(answered.number + 1, None, -1.0)
            if answered.answer is None:
                failed += 1
                continue
            turns += [
                Recorded(answered.prompt.id, place, turn.prompt, turn.tokens, turn.finish_reason == "stop", length)
                for place, turn in enumerate(answered.answer.turns)
            ]
    if not turns:
        raise prompts.nothing()
    return Answers(tuple(turns), failed)


def _tables(name: str, evaluation: Evaluation) -> None:
    """What `specds evaluate` found. Goes to stdout: it is what was asked for."""
    from rich.markup import escape
    from rich.table import Table

    from specds.cli.render import screen

    out = screen(stderr=False)
    out.print(f"[bold]{escape(printable(name))}[/bold] on {evaluation.answers:,} answers, {evaluation.tokens:,} tokens")
    table = Table("index", "budget", title="predicted", title_justify="left", box=None, padding=(0, 2, 0, 2))
    for column in ("MAT", "acceptance", "per node", *(["× plain"] if _has_speed(evaluation) else [])):
        table.add_column(column, justify="right")
    for index, budget, summary in evaluation.predictions:
        counters = summary.counters
        cells = [f"{counters.mat:.3f}", f"{counters.acceptance:.1%}", f"{counters.node_acceptance:.1%}"]
        if summary.speedup is not None:
            cells.append(f"{summary.speedup:.2f}")
        table.add_row(index, str(budget), *cells)
    out.print(table)
    total = sum(hits.positions for hits in evaluation.hits)
    if total:
        table = Table(title="longest match", title_justify="left", box=None, padding=(0, 2, 0, 2))
        for column in ("tokens", "positions", "first is right", "any is right"):
            table.add_column(column, justify="right")
        for hits in evaluation.hits:
            right = [f"{count / hits.positions:.1%}" if hits.length else "–" for count in (hits.first, hits.anywhere)]
            table.add_row(str(hits.length), f"{hits.positions / total:.1%}", *right)
        first, anywhere = (sum(getattr(hits, name) for hits in evaluation.hits) for name in ("first", "anywhere"))
        table.add_row("all", "100.0%", f"{first / total:.1%}", f"{anywhere / total:.1%}")
        out.print(table)
    for what, texts in (("prompts", evaluation.prompts), ("answers", evaluation.responses)):
        part = f"{texts.shared / texts.ngrams:.1%}" if texts.ngrams else "–"
        out.print(
            f"overlap: {texts.touched:,} of {texts.texts:,} {what} share a {evaluation.ngram}-gram with the store, "
            f"{part} of their {evaluation.ngram}-grams stand there; {texts.same:,} are documents as they are"
        )
    for what, shares in (("source", evaluation.sources), ("corpus file", evaluation.parts)):
        table = Table(box=None, padding=(0, 2, 0, 2))
        table.add_column(what, overflow="fold")
        for column in ("documents", "of use", "tokens", "accepted", "here alone", "oldest", "newest"):
            table.add_column(column, justify="right", no_wrap=True)
        for share in shares:
            table.add_row(
                escape(printable(share.name)),
                f"{share.documents:,}",
                f"{share.useful / share.documents:.0%}" if share.indexed else "not indexed" if evaluation.hits else "–",
                f"{share.tokens:,}",
                f"{share.gave:,}",
                f"{share.alone:,}",
                escape(share.oldest[:10]),
                escape(share.newest[:10]),
            )
        out.print(table)
    if dead := [share for share in evaluation.sources if share.dead]:
        tokens = sum(share.tokens for share in dead)
        names = ", ".join(share.name for share in dead)
        out.print(f"dead weight: {escape(printable(names))}: {tokens:,} tokens, and none was accepted")


def _has_speed(evaluation: Evaluation) -> bool:
    return any(summary.speedup is not None for _, _, summary in evaluation.predictions)
