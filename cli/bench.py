"""specds bench: ways of decoding compared on your own prompts, and the comparison checked."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specds.cli import options, values

if TYPE_CHECKING:
    from specds.calibration.bench.contenders import Contender
    from specds.decode.method import Method
    from specds.model import LanguageModel
    from specds.sampling import Sampling

_PROBLEMS = 10


def bench(
    prompts: options.PromptOptions,
    output: Annotated[Path, typer.Option("--output", "-o", help="The result's directory: begun, or gone on with.")],
    sampling: options.SamplingOptions,
    target: options.TargetOptions,
    methods: Annotated[
        list[str] | None,
        typer.Option(
            metavar="METHOD,…",
            help="A drafter, then as wanted :STORE, @BUDGET, ?OPTION=VALUE&… and !VERIFIER?OPTION=VALUE&…; "
            "none is always measured. Repeatable.",
        ),
    ] = None,
    peers: Annotated[str, typer.Option(metavar="PEER,…", help="hf-generate, hf-prompt-lookup, hf-assisted.")] = "",
    peer: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=COMMAND", help="Another engine: a program that answers JSON lines. Repeatable."),
    ] = None,
    assistant: Annotated[str | None, typer.Option(help="The draft model of hf-assisted.")] = None,
    peer_timeout: Annotated[float, typer.Option(min=1.0, help="Seconds that a peer's answer may take.")] = 600.0,
    limit: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Prompts of each group, spread evenly over it; --prompts FILE=N says it for a file.",
            rich_help_panel="Prompts",
        ),
    ] = None,
    group: Annotated[str | None, typer.Option(help="The field that groups rows; default: by file.")] = None,
    turns: Annotated[int | None, typer.Option(min=1, help="Most turns of a prompt; default: all.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="How often each prompt is answered by each method.")] = 1,
    warmup: Annotated[int, typer.Option(min=0, help="Tokens of each method's unmeasured first answer.")] = 16,
    near_tie: Annotated[
        float | None,
        typer.Option(min=0.0, help="Logits that excuse another token; default: 0.001 in float32, more in fewer bits."),
    ] = None,
    max_new_tokens: options.MaxNewTokens = 128,
    budget: options.Budget = "auto",
    quiet: options.Quiet = False,
) -> None:
    """Measure ways of decoding on the same prompts: how fast is each, and is it the same text?

    Methods take turns on each prompt, in an order that rotates, after a warm-up; other engines run in processes of
    their own. Speedups are against plain decoding on the same runtime, medians over prompts with 95 % intervals. The
    result is a directory: report.html to look at, summary.json, results.parquet (a row for each prompt, method and
    repeat) and steps.parquet (a row for each forward pass). A stopped run goes on where it was.

    Exit code 0: the result is valid. 1: it is complete, but a text that should be plain decoding's is not, a method's
    account does not fit what was seen from outside, or a prompt was not answered; the report says which.

    [dim]specds bench -p todo.jsonl --methods pld,sam,rest:code.ds -o result[/dim]
    [dim]specds bench -p q.jsonl --group task --limit 8 --peers hf-generate -o result[/dim]
    [dim]specds bench -p q.jsonl=16 --methods 'pld,pld!csd?table=T.parquet' -o lossy[/dim]
    [dim]specds bench -p todo.jsonl --peer 'mine=python mine.py' -o result[/dim]
    """
    from specds.calibration.bench.cases import choose_cases
    from specds.calibration.bench.contenders import Ours
    from specds.calibration.bench.results import REPORT
    from specds.calibration.bench.run import Plan, store_digest
    from specds.calibration.bench.run import bench as run
    from specds.cli.render import bar, memory_note, note
    from specds.decode.engine import Engine

    picking = sampling.sampling()
    chosen = _chosen(methods or [], values.budget(budget), picking)
    others = _peers(peers, peer or [], assistant, picking, {method.name for method in chosen})
    cases = choose_cases(
        prompts.paths,
        limit=limit,
        group=group,
        turns=turns,
        format=prompts.format,
        prompt_field=prompts.prompt_field,
    )
    language_model = target.target()
    contenders: list[Contender] = []
    stores = sorted({str(path) for method in chosen for path in method.paths})
    asked: dict[str, Any] = {
        "prompts": prompts.paths,
        "limit": limit,
        "group": group,
        "turns": turns,
        "budget": budget,
        "peers": others,
        "assistant": assistant,
        "threads": target.threads,
        "stores": dict.fromkeys(stores),
    }
    try:
        with options.reading(language_model, quiet):
            for method in chosen:
                engine = Engine(language_model, method, picking, target.runtime)
                contenders.append(Ours(method.name, engine))
                if engine.memory is not None and not quiet:
                    memory_note(method.name, engine.memory)
        asked["stores"] = {path: store_digest(path) for path in stores}
        flags = _flags(target, language_model, assistant)
        contenders += _peer_contenders(others, flags, language_model, output, peer_timeout)
        plan = Plan(max_new_tokens, picking, repeats, warmup, near_tie, target.runtime)
        with bar("measuring", None, "", quiet=quiet) as update:
            summary = run(
                output,
                language_model,
                contenders,
                cases,
                plan,
                asked,
                lambda what, done, total: update(done, total, -1.0),
            )
    finally:
        for contender in contenders:
            contender.close()
    if not quiet:
        _summary(summary)
        note(f"{output / REPORT} has the plots")
    if not summary["valid"]:
        raise typer.Exit(1)


def _chosen(words: list[str], budget: int | None, sampling: Sampling) -> list[Method]:
    """The methods that are asked for, plain decoding first; refused before a model is looked for."""
    from specds.calibration.bench.judge import PLAIN
    from specds.decode.assembly import check_files, check_method
    from specds.decode.method import distinct, parse_methods

    chosen = [method for text in words for method in parse_methods(text, budget)]
    if all(method.name != PLAIN for method in chosen):
        chosen = [*parse_methods(PLAIN), *chosen]
    for method in chosen:
        check_method(method, sampling)
        check_files(method)
    return sorted(distinct(chosen), key=lambda method: method.name != PLAIN)


def _peers(
    peers: str, commands: list[str], assistant: str | None, sampling: Any, taken: set[str]
) -> dict[str, str | None]:
    """Name → command; None for what comes with specds."""
    from specds.calibration.bench.hf import WAYS
    from specds.errors import UsageError

    found: dict[str, str | None] = {}
    pairs: list[tuple[str, str | None]] = [(word.strip(), None) for word in peers.split(",") if word.strip()]
    for text in commands:
        name, _, command = text.partition("=")
        if not name.strip() or not command.strip():
            raise UsageError(f"--peer {text!r}", "write --peer 'name=command'")
        pairs.append((name.strip(), command))
    for name, program in pairs:
        if program is None and name not in WAYS:
            raise UsageError(f"no peer {name!r}", f"one of {', '.join(WAYS)}; --peer takes other programs")
        if name in taken or name in found:
            raise UsageError(f"{name} is given twice", "choose another name for --peer")
        found[name] = program
    if any(command is None for command in found.values()) and not sampling.greedy:
        raise UsageError("transformers' sampling is not ours", "--peers goes with --temperature 0")
    if ("hf-assisted" in found) != (assistant is not None):
        raise UsageError("hf-assisted and --assistant go together", "add --assistant MODEL")
    return found


def _flags(target: options.TargetOptions, model: LanguageModel, assistant: str | None) -> list[str]:
    """What transformers' own process is told, so that it runs the same model in the same place."""
    named: dict[str, object] = {
        "model": target.model,
        "revision": target.revision,
        "dtype": model.dtype,
        "device": str(model.device),
    }
    named |= {"threads": target.threads, "assistant": assistant}
    words = [word for name, value in named.items() if value is not None for word in (f"--{name}", str(value))]
    return words + ["--trust-remote-code"] * target.trust_remote_code


def _peer_contenders(
    peers: dict[str, str | None], flags: list[str], model: Any, output: Path, timeout: float
) -> list[Contender]:
    """Those that come with specds share one process, and so one copy of the weights."""
    import shlex
    import tempfile

    from specds.calibration.bench.contenders import Peer, Worker

    logs = Path(tempfile.mkdtemp(prefix="specds-bench-"))
    # -P: a folder that is called specds where the command runs is not the package.
    shared = Worker([sys.executable, "-P", "-m", "specds.calibration.bench.hf", *flags], logs / "hf.log", timeout)
    return [
        Peer(name, shared, model, lossless=True)
        if command is None
        else Peer(name, Worker(shlex.split(command), logs / f"{len(name)}-{number}.log", timeout), model)
        for number, (name, command) in enumerate(peers.items())
    ]


def _summary(summary: dict[str, Any]) -> None:
    """The tables at the end of `specds bench`, and what is wrong with the run."""
    from specds.cli.render import comparison, interval, note

    groups = summary["groups"]
    peers = [one["name"] for one in summary["methods"] if one["name"] == "hf-generate"]
    columns = ["method", "× plain", *("× generate" for _ in peers), "MAT", "acceptance", "tokens/s", "drafting", "same"]
    for group in groups[-1:]:
        rows = []
        for one in summary["methods"]:
            own = group["methods"][one["name"]]
            speeds = [own["speedup"]["none"], *(own["speedup"][name] for name in peers)]
            cells = [one["name"], interval(speeds[0], 2), *(f"{speed['value']:.2f}" for speed in speeds[1:])]
            cells += [f"{own['mat']['value']:.2f}" if own["mat"] else "–"]
            cells += [f"{own['acceptance']['value']:.1%}" if own["acceptance"] else "–"]
            cells += [f"{own['tokens_per_second']['value']:.1f}"]
            cells += [f"{own['drafting']['value']:.1%}" if own["drafting"] else "–"]
            rows.append([*cells, f"{own['same']} of {own['answers']}"])
        comparison(f"{group['prompts']} prompts, {group['tokens']:,} tokens of plain decoding", columns, rows)
    if len(groups) > 1:
        names = ["× plain", *(group["group"] for group in groups[:-1])]
        rows = [
            [one["name"], *(interval(group["methods"][one["name"]]["speedup"]["none"], 2) for group in groups[:-1])]
            for one in summary["methods"]
        ]
        comparison("by group", names, rows)
    for one in summary["problems"][:_PROBLEMS]:
        where = f", prompt {one['prompt']}" if one["prompt"] is not None else ""
        note(f"{one['kind']}: {one['method']}{where}: {one['text']}")
    if len(summary["problems"]) > _PROBLEMS:
        note(f"… and {len(summary['problems']) - _PROBLEMS:,} more problems, in the report")
    ties = [one for one in summary["differences"] if one["near_tie"]]
    if ties:
        note(f"{len(ties)} texts leave plain decoding's at a near-tie, where rounding decides")
    note("valid" if summary["valid"] else "NOT VALID: do not rely on these figures")
