"""specds evaluate: is a datastore any good for some prompts?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from specds.cli import options

if TYPE_CHECKING:
    from specds.calibration.answers import Answers
    from specds.datastore.store import Store
    from specds.model import LanguageModel


def evaluate(
    store: options.StorePath,
    prompts: options.OptionalPromptOptions,
    target: options.TargetOptions,
    answers: Annotated[
        str | None,
        typer.Option(
            help="Their answers: what `specds decode` wrote, or, without --prompts, rows of prompts and responses as "
            "`specds ingest` reads them. Default: the model writes them now.",
        ),
    ] = None,
    budgets: Annotated[str, typer.Option(metavar="N,N,…", help="Draft tokens a step.")] = "4,8,16,32,64",
    ngram: Annotated[int, typer.Option(min=1, help="Tokens of the n-grams that overlap is measured by.")] = 13,
    no_dense: Annotated[bool, typer.Option("--no-dense", help="Only the suffix index; no weights are read.")] = False,
    cost: options.Cost = None,
    max_new_tokens: options.RecordedLength = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of tables.")] = False,
) -> None:
    """Say whether a datastore serves prompts such as these.

    How often the last tokens stand in the store and the next one is what followed there; MAT and acceptance that
    decoding would have; how much of the prompts and answers the store holds already (then it flatters itself); and
    which sources and corpus files gave nothing, and how old they are.

    [dim]specds evaluate code.ds -p some.jsonl --answers plain.jsonl[/dim]
    """
    from specds.calibration.evaluation import evaluate as evaluated
    from specds.cli.render import bar, emit, evaluation_tables, note
    from specds.datastore.store import open_store
    from specds.errors import UsageError

    if not prompts.prompts and answers is None:
        raise UsageError("neither --prompts nor --answers is given", "say what the store is to be good for")
    sizes = options.numbers("--budgets", budgets)
    curve = options.cost_curve(cost)
    # Before the weights are loaded: what is no store, or one of another tokenizer, is refused at once.
    options.require_stores([store])
    open_store(store, target.tokenizer())
    language_model = target.target()
    opened = open_store(store, language_model.tokenizer)
    kinds = ["suffix"] if no_dense else ["suffix", "dense"]
    foreign = [
        one for one in opened.manifest.dense if one.model and one.model.fingerprint != language_model.fingerprint
    ]
    if foreign and not no_dense:
        kinds.remove("dense")
        note("note: the dense index is another model's; it is not looked at")
    if not prompts.prompts:
        from specds.calibration.answers import read_pairs

        recorded = read_pairs([str(answers)], language_model.tokenizer)
        if recorded.failed:
            note(f"note: {recorded.failed:,} rows are no prompts with responses; they are left out")
    elif answers is None:
        recorded = _written(language_model, opened, prompts, max_new_tokens, target.runtime)
    else:
        recorded = options.recorded(answers, prompts, language_model, most=max_new_tokens)
    fitting = [turn for turn in recorded.turns if len(turn.text) <= language_model.context_length]
    if len(fitting) < len(recorded.turns):
        note(f"note: {len(recorded.turns) - len(fitting):,} answers are longer than the model's context; left out")
    with bar("evaluating", len(fitting)) as update:
        found = evaluated(
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
        emit({"store": str(store), **found.record()})
    else:
        evaluation_tables(str(store), found)


_LENGTH = 128


def _written(
    model: LanguageModel,
    store: Store,
    prompts: options.PromptOptions,
    most: int | None,
    runtime: str,
) -> Answers:
    """The model's own answers, drafted from the store where it has a suffix index."""
    from specds.calibration.answers import Answers, Recorded
    from specds.cli.render import bar
    from specds.datastore.prompts import Prompt
    from specds.decode.engine import Engine
    from specds.decode.method import Method
    from specds.errors import PromptError

    length = most or _LENGTH
    with options.reading(model):
        method = Method("rest", stores=(store,), budget=8) if store.manifest.suffix else Method("pld", budget=8)
        engine = Engine(model, method, runtime=runtime)
    turns: list[Recorded] = []
    failed = 0
    with bar("answering", prompts.total()) as update:
        for number, row in enumerate(prompts.read(), 1):
            try:
                if not isinstance(row, Prompt):
                    raise row.error
                answer = engine.answer(row, length)
            except PromptError:
                failed += 1
                continue
            turns += [
                Recorded(row.id, place, turn.prompt, turn.tokens, turn.finish_reason == "stop", length)
                for place, turn in enumerate(answer.turns)
            ]
            update(number, None, -1.0)
    if not turns:
        raise prompts.nothing()
    return Answers(tuple(turns), failed)
