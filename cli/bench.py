"""specds bench: ways of decoding compared on your own prompts, and the comparison checked."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specds.cli import options, values
from specds.errors import UsageError

if TYPE_CHECKING:
    from specds.calibration.bench.contenders import Contender
    from specds.calibration.bench.run import Plan
    from specds.decode.method import Method
    from specds.model import LanguageModel
    from specds.sampling import Sampling

_PROBLEMS = 10


@dataclass(frozen=True, slots=True)
class PeerOptions:
    """Other engines to measure beside ours."""

    peers: Annotated[str, typer.Option(metavar="PEER,…", help="hf-generate, hf-prompt-lookup, hf-assisted.")] = ""
    peer: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=COMMAND", help="Another engine: a program that answers JSON lines. Repeatable."),
    ] = None
    assistant: Annotated[str | None, typer.Option(help="The draft model of hf-assisted.")] = None
    peer_timeout: Annotated[float, typer.Option(min=1.0, help="Seconds that a peer's answer may take.")] = 600.0

    def commands(self, taken: set[str], *, greedy: bool) -> dict[str, str | None]:
        """Name → command; None for what comes with specds.

        Args:
            taken: names that our methods have.
            greedy: whether tokens are picked without sampling.

        Raises:
            UsageError: no such peer, a name twice, or options that do not go together.
        """
        from specds.calibration.bench.hf import WAYS

        pairs: list[tuple[str, str | None]] = [(word.strip(), None) for word in self.peers.split(",") if word.strip()]
        for text in self.peer or []:
            name, _, command = text.partition("=")
            if not name.strip() or not command.strip():
                raise UsageError(f"--peer {text!r}", "write --peer 'name=command'")
            pairs.append((name.strip(), command))
        commands: dict[str, str | None] = {}
        for name, program in pairs:
            if program is None and name not in WAYS:
                raise UsageError(f"no peer {name!r}", f"one of {', '.join(WAYS)}; --peer takes other programs")
            if name in taken or name in commands:
                raise UsageError(f"{name} is given twice", "choose another name for --peer")
            commands[name] = program
        if any(command is None for command in commands.values()) and not greedy:
            raise UsageError("transformers' sampling is not ours", "--peers goes with --temperature 0")
        if ("hf-assisted" in commands) != (self.assistant is not None):
            raise UsageError("hf-assisted and --assistant go together", "add --assistant MODEL")
        return commands


@dataclass(frozen=True, slots=True)
class CaseOptions:
    """Which of the prompts are asked."""

    limit: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Prompts of each group, spread evenly over it; --prompts FILE=N says it for a file.",
            rich_help_panel="Prompts",
        ),
    ] = None
    group: Annotated[str | None, typer.Option(help="The field that groups rows; default: by file.")] = None
    turns: Annotated[int | None, typer.Option(min=1, help="Most turns of a prompt; default: all.")] = None


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """How each of them is measured."""

    repeats: Annotated[int, typer.Option(min=1, help="How often each prompt is answered by each method.")] = 1
    warmup: Annotated[int, typer.Option(min=0, help="Tokens of each method's unmeasured first answer.")] = 16
    near_tie: Annotated[
        float | None,
        typer.Option(min=0.0, help="Logits that excuse another token; default: 0.001 in float32, more in fewer bits."),
    ] = None
    max_new_tokens: options.MaxNewTokens = 128

    def plan(self, sampling: Sampling, runtime: str) -> Plan:
        """The same as the library takes it."""
        from specds.calibration.bench.run import Plan

        return Plan(self.max_new_tokens, sampling, self.repeats, self.warmup, self.near_tie, runtime)


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
    peers: PeerOptions = PeerOptions(),
    cases: CaseOptions = CaseOptions(),
    plan: PlanOptions = PlanOptions(),
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
    from specds.calibration.bench.results import REPORT
    from specds.calibration.bench.run import bench as run
    from specds.calibration.bench.run import store_digest
    from specds.cli.render import bar, note

    picking = sampling.sampling()
    chosen = _chosen(methods or [], values.budget(budget), picking)
    commands = peers.commands({method.name for method in chosen}, greedy=picking.greedy)
    selected = choose_cases(
        prompts.paths,
        limit=cases.limit,
        group=cases.group,
        turns=cases.turns,
        format=prompts.format,
        prompt_field=prompts.prompt_field,
    )
    language_model = target.target()
    contenders: list[Contender] = []
    try:
        with options.reading(language_model, quiet):
            for method in chosen:  # one by one: those that are there are closed when the next is refused
                contenders.append(_ours(method, language_model, picking, target.runtime, quiet))
        stores = sorted({str(path) for method in chosen for path in method.paths})
        contenders += _theirs(commands, _flags(target, language_model, peers.assistant), language_model, peers)
        asked: dict[str, Any] = {
            "prompts": prompts.paths,
            "limit": cases.limit,
            "group": cases.group,
            "turns": cases.turns,
            "budget": budget,
            "peers": commands,
            "assistant": peers.assistant,
            "threads": target.threads,
            "stores": {path: store_digest(path) for path in stores},
        }
        with bar("measuring", None, "", quiet=quiet) as update:
            summary = run(
                output,
                language_model,
                contenders,
                selected,
                plan.plan(picking, target.runtime),
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


def _ours(method: Method, model: LanguageModel, sampling: Sampling, runtime: str, quiet: bool) -> Contender:
    """One of our methods, ready to answer."""
    from specds.calibration.bench.contenders import Ours
    from specds.cli.render import memory_note
    from specds.decode.engine import Engine

    engine = Engine(model, method, sampling, runtime)
    if engine.memory is not None and not quiet:
        memory_note(method.name, engine.memory)
    return Ours(method.name, engine)


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


def _theirs(
    commands: dict[str, str | None], flags: list[str], model: LanguageModel, peers: PeerOptions
) -> list[Contender]:
    """Other engines; those that come with specds share one process, and so one copy of the weights."""
    import shlex
    import tempfile

    from specds.calibration.bench.contenders import Peer, Worker

    logs = Path(tempfile.mkdtemp(prefix="specds-bench-"))
    # -P: a folder that is called specds where the command runs is not the package.
    program = [sys.executable, "-P", "-m", "specds.calibration.bench.hf", *flags]
    shared = Worker(program, logs / "hf.log", peers.peer_timeout)
    return [
        Peer(name, shared, model, lossless=True)
        if command is None
        else Peer(name, Worker(shlex.split(command), logs / f"{len(name)}-{number}.log", peers.peer_timeout), model)
        for number, (name, command) in enumerate(commands.items())
    ]


def _summary(summary: dict[str, Any]) -> None:
    """The tables at the end of `specds bench`, and what is wrong with the run."""
    from specds.cli.render import comparison, interval, note

    groups = summary["groups"]
    names = [method["name"] for method in summary["methods"]]
    peers = [name for name in names if name == "hf-generate"]
    columns = ["method", "× plain", *("× generate" for _ in peers), "MAT", "acceptance", "tokens/s", "drafting", "same"]
    for group in groups[-1:]:
        rows = []
        for name in names:
            measured = group["methods"][name]
            speeds = [measured["speedup"]["none"], *(measured["speedup"][peer] for peer in peers)]
            cells = [name, interval(speeds[0], 2), *(f"{speed['value']:.2f}" for speed in speeds[1:])]
            cells += [f"{measured['mat']['value']:.2f}" if measured["mat"] else "–"]
            cells += [f"{measured['acceptance']['value']:.1%}" if measured["acceptance"] else "–"]
            cells += [f"{measured['tokens_per_second']['value']:.1f}"]
            cells += [f"{measured['drafting']['value']:.1%}" if measured["drafting"] else "–"]
            rows.append([*cells, f"{measured['same']} of {measured['answers']}"])
        comparison(f"{group['prompts']} prompts, {group['tokens']:,} tokens of plain decoding", columns, rows)
    if len(groups) > 1:
        columns = ["× plain", *(group["group"] for group in groups[:-1])]
        rows = [
            [name, *(interval(group["methods"][name]["speedup"]["none"], 2) for group in groups[:-1])] for name in names
        ]
        comparison("by group", columns, rows)
    for problem in summary["problems"][:_PROBLEMS]:
        where = f", prompt {problem['prompt']}" if problem["prompt"] is not None else ""
        note(f"{problem['kind']}: {problem['method']}{where}: {problem['text']}")
    if len(summary["problems"]) > _PROBLEMS:
        note(f"… and {len(summary['problems']) - _PROBLEMS:,} more problems, in the report")
    ties = [difference for difference in summary["differences"] if difference["near_tie"]]
    if ties:
        note(f"{len(ties)} texts leave plain decoding's at a near-tie, where rounding decides")
    note("valid" if summary["valid"] else "NOT VALID: do not rely on these figures")
