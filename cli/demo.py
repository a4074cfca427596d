"""specds demo: the whole pipeline on the embedded model, in a few minutes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specds.cli import options, values

if TYPE_CHECKING:
    from specds.datastore.store import Store
    from specds.decode.answering import Answer
    from specds.decode.engine import Engine
    from specds.model import LanguageModel
    from specds.reading.prompts import Prompt

# Logits of two float32 runtimes differ by less than this.
_NEAR_TIE = 1e-3
# Tokens of an answer of the corpus.
_LENGTH = 160
_PROMPTS = Path(__file__).parent / "demo"


def demo(
    target: options.TargetOptions,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="Keep the datastore here; it is reused when it is there. Default: user cache."
        ),
    ] = None,
    max_new_tokens: options.MaxNewTokens = 96,
    limit: Annotated[int, typer.Option(min=1, help="Only the first so many of the new prompts.")] = 8,
    budget: options.Budget = "auto",
    parallel: options.ParallelOptions = options.ParallelOptions(),
) -> None:
    """Run the whole pipeline on prompts that come with specds.

    generate (many requests at once) → build-suffix → build-dense → decode new prompts with every drafter, one at a
    time, then a table: MAT, acceptance and speed against plain decoding on the same runtime and against transformers'
    own generate, and whether the texts are the same, token for token.
    """
    from specds.caches import cache_directory
    from specds.cli.render import comparison, note
    from specds.reading.prompts import Prompt, read_prompts

    parallel.check()
    most = values.budget(budget)
    language_model = target.target()
    path = (output or cache_directory("demo")) / f"assistant-{language_model.fingerprint[:8]}.ds"
    path.parent.mkdir(parents=True, exist_ok=True)
    store = _filled(path, language_model, target, parallel)
    asked = [row for row in read_prompts([str(_PROMPTS / "prompts.jsonl")]) if isinstance(row, Prompt)][:limit]
    note(f"4. decode: {len(asked)} new prompts, greedy, at most {max_new_tokens} tokens each, drafter after drafter")
    engines = _engines(language_model, store, most, target.runtime, parallel.memory())
    answers, reference = _decoded(engines, asked, max_new_tokens)
    comparison(
        f"{language_model.name}, {len(asked)} prompts, {sum(len(tokens) for tokens, _ in reference):,} tokens",
        ("method", "MAT", "acceptance", "tokens/s", "× plain", "× generate", "same text"),
        _rows(answers, reference),
    )
    note("× is time per token against plain decoding on this runtime, and against transformers' generate.")
    differences = _differences(language_model, answers, reference)
    for line, _ in differences:
        note(line)
    if language_model.dtype == "float32" and any(margin > _NEAR_TIE for _, margin in differences):
        note("The texts differ. In float32 that is a bug: please report it.")
        raise typer.Exit(1)
    if differences:
        note("Nearly equally likely tokens: sums that run in another order round otherwise.")
    note(f"Next: specds inspect {path}; specds decode -p yours.jsonl -s {path} -d dresd")


def _filled(
    path: Path, model: LanguageModel, target: options.TargetOptions, parallel: options.ParallelOptions
) -> Store:
    """The demo's datastore with its indexes; what is there already is not made again."""
    from specds.cli.render import bar, note, working
    from specds.datastore.build_dense import build_dense
    from specds.datastore.build_suffix import build_suffix
    from specds.datastore.creation import create_store
    from specds.datastore.store import open_store
    from specds.decode.engine import Engine
    from specds.decode.generation import GenerationOptions, generate
    from specds.decode.method import AUTO, Method
    from specds.reading.prompts import read_prompts

    corpus = list(read_prompts([str(_PROMPTS / "corpus.jsonl")]))
    note(f"1. generate: {model.name} answers {len(corpus)} prompts of a code assistant → {path}")
    store = create_store(path, model.tokenizer)
    engine = Engine(model, Method(AUTO), runtime=target.runtime, kv_memory=parallel.memory())
    requests = parallel.choose(engine, corpus[0], _LENGTH, len(corpus))
    wanted = GenerationOptions(max_new_tokens=_LENGTH, source="demo", parallel=requests)
    with bar("generating the corpus (once)", None) as update:
        report = generate(store, engine, corpus, wanted, lambda done, total, tokens: update(done, total, -1.0))
    note(f"   {report.documents} new answers, {report.tokens:,} tokens; {report.present} were there already")
    store = open_store(path, model.tokenizer)
    for number, kind in ((2, "suffix"), (3, "dense")):
        with working(f"building the {kind} index"):
            built = build_suffix(store) if kind == "suffix" else build_dense(store, model)
        segments = built or store.manifest.indexes[kind]
        quality = "; ".join(f"{name} {value}" for name, value in segments[-1].quality.items())
        indexed = sum(segment.tokens for segment in segments)
        note(f"{number}. build-{kind}: {indexed:,} tokens{'; ' + quality if quality else ''}")
    return open_store(path, model.tokenizer)


def _engines(
    model: LanguageModel, store: Store, budget: int | None, runtime: str, memory: int | None
) -> dict[str, Engine]:
    """An engine with each drafter, but for those that want a draft model."""
    from specds.decode.assembly import drafter_class
    from specds.decode.contracts import Use
    from specds.decode.drafters import DRAFTERS
    from specds.decode.engine import Engine
    from specds.decode.method import Method

    drafters = {name: drafter_class(name) for name in DRAFTERS}
    # A model that drafts for itself is worth its time where it has many more layers than this one.
    methods = [
        Method(name, stores=(store,) if kind.indexes else (), budget=budget)
        for name, kind in drafters.items()
        if kind.draft_model is not Use.ALWAYS
    ]
    return {method.drafter: Engine(model, method, runtime=runtime, kv_memory=memory) for method in methods}


def _decoded(
    engines: dict[str, Engine], asked: Sequence[Prompt], max_new_tokens: int
) -> tuple[dict[str, list[Answer]], list[tuple[list[int], float]]]:
    """Each engine's answers, and for each prompt the tokens of transformers' generate with the seconds they took."""
    import time

    from specds.cli.render import working
    from specds.reading.conversation import Conversation
    from specds.reference import generate_plain

    answers: dict[str, list[Answer]] = {name: [] for name in engines}
    reference: list[tuple[list[int], float]] = []
    with working("decoding"):
        # One unmeasured answer each, for what is compiled or allocated on first use.
        for engine in engines.values():
            engine.answer(asked[0], 8)
        # Interleaved by prompt: every method meets the machine in the same mood.
        for prompt in asked:
            model = engines["none"].model
            tokens = Conversation(prompt).tokens(model.tokenizer)
            began = time.perf_counter()
            text = generate_plain(model, tokens, max_new_tokens)
            reference.append((text, time.perf_counter() - began))
            for name, engine in engines.items():
                answers[name].append(engine.answer(prompt, max_new_tokens))
    return answers, reference


def _rows(answers: dict[str, list[Answer]], reference: list[tuple[list[int], float]]) -> list[list[str]]:
    from specds.decode.counters import Counters

    totals = {name: sum((answer.counters for answer in given), Counters()) for name, given in answers.items()}
    seconds = sum(spent for _, spent in reference)
    tokens = sum(len(text) for text, _ in reference)
    plain, generated = totals["none"].tokens_per_second, tokens / seconds
    rows = [["transformers generate", "1.00", "–", f"{generated:.1f}", f"{generated / plain:.2f}", "1.00", "–"]]
    for name, total in totals.items():
        texts = [[token for turn in answer.turns for token in turn.tokens] for answer in answers[name]]
        same = sum(text == expected for text, (expected, _) in zip(texts, reference, strict=True))
        rows.append(
            [
                "none (plain)" if name == "none" else name,
                f"{total.mat:.2f}",
                f"{total.acceptance:.0%}" if total.drafted else "–",
                f"{total.tokens_per_second:.1f}",
                f"{total.tokens_per_second / plain:.2f}",
                f"{total.tokens_per_second / generated:.2f}",
                f"{same} of {len(reference)}",
            ]
        )
    return rows


def _differences(
    model: LanguageModel, answers: dict[str, list[Answer]], reference: list[tuple[list[int], float]]
) -> list[tuple[str, float]]:
    """Where each differing text leaves transformers' own, and how close the model's choice was there."""
    from specds.reference import lead

    lines = []
    for name, given in answers.items():
        for answer, (expected, _) in zip(given, reference, strict=True):
            text = list(answer.turns[0].tokens)
            if text != expected:
                pairs = zip([*text, -1], [*expected, -1], strict=False)
                at = next(number for number, (token, expected_token) in enumerate(pairs) if token != expected_token)
                margin = lead(model, [*answer.turns[0].prompt, *expected[:at]])
                line = f"{name}, prompt {answer.id}: token {at} differs; the best led by {margin:.4f} logits"
                lines.append((line, margin))
    return lines
