"""Everything that people look at: tables, bars and notes, all on stderr. Stdout is for data."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from specds.printing import printable

if TYPE_CHECKING:
    from specds.calibration.evaluation import Evaluation
    from specds.calibration.explanation import Explanation
    from specds.calibration.replay import Replayed, Summary
    from specds.calibration.tuning import Tuning
    from specds.datastore.corrections import Table as Corrections
    from specds.datastore.manifest import Segment, SourceCount
    from specds.datastore.store import Store
    from specds.decode.auto.acceptance import Acceptance
    from specds.decode.counters import Counters
    from specds.decode.method import Method
    from specds.decode.pricing.curve import CostCurve
    from specds.decode.verifiers.csd import Memory
    from specds.model import Loading, Watch

LINE_SECONDS = 30.0
"""How often progress is told where stderr is no terminal."""
_PLAIN_WIDTH = 120
_PROBLEMS = 10


class Screen(Console):
    """A console that shows no character that would move a cursor, wherever it comes from: a name in a store, an id."""

    def render_str(self, text: str, **options: Any) -> Text:
        """Text from markup, as all that is printed passes here."""
        return super().render_str(printable(text, lines=True), **options)


def screen(*, stderr: bool) -> Console:
    """A console as wide as its terminal; output to a file or pipe is not folded to 80 columns."""
    out = Screen(stderr=stderr, highlight=False)
    return out if out.is_terminal else Screen(stderr=stderr, highlight=False, width=_PLAIN_WIDTH)


console = screen(stderr=True)


def note(text: str) -> None:
    """One line for a person."""
    console.print(printable(text), soft_wrap=True, markup=False)


def emit(record: dict[str, Any]) -> None:
    """One JSON line on stdout, at once, so that a pipe's next stage can start."""
    # Lone surrogates can come out of a tokenizer's byte fallback; ASCII escapes keep every line valid UTF-8.
    print(json.dumps(record, ensure_ascii=True), flush=True)


class Line:
    """What stands in place of a bar or spinner where stderr is no terminal: a line now and then.

    Args:
        what: what is being done.
        quiet: no lines.
    """

    def __init__(self, what: str, quiet: bool = False) -> None:
        self._what, self._quiet = what, quiet
        self._began = time.monotonic()
        self._first: float | None = None
        self._done, self._total, self._shown = 0.0, 0.0, ""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="specds-progress", daemon=True)

    def __enter__(self) -> Self:
        if not self._quiet:
            self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        if not self._quiet:
            self._thread.join()

    def update(self, what: str, done: float, total: float | None, shown: str) -> None:
        """How far it is. What stands in `shown` goes into the line as it is."""
        if what != self._what:
            self._what, self._began, self._first = what, time.monotonic(), None
        if self._first is None:
            self._first = done
        self._done, self._total, self._shown = done, total or 0.0, shown

    def _run(self) -> None:
        with contextlib.suppress(OSError):  # nobody reads stderr any more
            while not self._ended.wait(LINE_SECONDS):
                note(self._text())

    def _text(self) -> str:
        spent = time.monotonic() - self._began
        words = [self._shown] if self._shown else []
        if self._total and self._first is not None:
            words.append(f"{self._done / self._total:.0%}")
            if self._done > self._first:
                left = (self._total - self._done) * spent / (self._done - self._first)
                words.append(f"about {duration(left)} left")
        return f"{self._what}: {', '.join([*words, f'{duration(spent)} so far'])}"


def duration(seconds: float) -> str:
    """Seconds for a person: 41 s, 12 min, 3 h 20 min."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


@contextlib.contextmanager
def working(what: str, quiet: bool = False) -> Iterator[None]:
    """A spinner while something of unknown length happens; a line now and then when stderr is no terminal."""
    if not console.is_terminal:
        with Line(what, quiet):
            yield
        return
    with console.status(what):
        yield


@contextlib.contextmanager
def bar(
    what: str, total: int | None, unit: str = "tokens/s", *, quiet: bool = False
) -> Iterator[Callable[[float, int | None, float], None]]:
    """A progress bar on a terminal, a line now and then elsewhere.

    Call it with (done, total, rate). What is done may be a fraction of one: a part of a batch. A total of None is the
    one that the bar was begun with; a rate below 0 is not shown.

    Args:
        quiet: no lines where stderr is no terminal.
    """

    def rated(rate: float) -> str:
        return f"{rate:,.1f} {unit}" if rate >= 0 else ""

    if not console.is_terminal:
        with Line(what, quiet) as line:

            def tell(done: float, now: int | None, rate: float) -> None:
                known = now or total
                counted = f"{int(done):,} of {known:,}" if known else f"{int(done):,} done"
                line.update(what, done, known, f"{counted}, {rated(rate)}" if rated(rate) else counted)

            yield tell
        return
    columns = [
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    ]
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(what, total=total, rate="")

        def update(done: float, now: int | None, rate: float) -> None:
            progress.update(task, completed=done, total=now or total, rate=rated(rate))

        yield update


@contextlib.contextmanager
def loading(what: str, quiet: bool = False) -> Iterator[Watch]:
    """Bytes of a model while it is converted or read, and afterwards what is kept of it, where, and how large."""
    kept: list[Loading] = []
    with contextlib.ExitStack() as stack:
        if console.is_terminal:
            columns = [TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn()]
            progress = stack.enter_context(Progress(*columns, TimeRemainingColumn(), console=console, transient=True))
            task = progress.add_task(escape(what), total=None)

            def show(now: Loading) -> None:
                progress.update(task, description=escape(now.what), completed=now.done, total=now.total or None)
        else:
            line = stack.enter_context(Line(what, quiet))

            def show(now: Loading) -> None:
                shown = f"{size(now.done)} of {size(now.total)}" if now.total else ""
                line.update(now.what, now.done, now.total, shown)

        def watch(now: Loading) -> None:
            if now.kept is not None:
                kept.append(now)
            show(now)

        yield watch
    for one in kept if not quiet else ():
        note(f"{one.what}: done, {size(one.done)} are kept in {one.kept}")


def counters_row(counters: Counters) -> dict[str, Any]:
    """Counters as they stand in an answer's record."""
    return {
        "tokens": counters.tokens,
        "steps": counters.steps,
        "mat": round(counters.mat, 4),
        "drafted": counters.drafted,
        "accepted": counters.accepted,
        "acceptance": round(counters.acceptance, 4),
        "node_acceptance": round(counters.node_acceptance, 4),
        "rescued": counters.rescued,
        "seconds": round(counters.seconds, 4),
        "draft_seconds": round(counters.draft_seconds, 4),
        "forward_seconds": round(counters.forward_seconds, 4),
    }


def decode_summary(title: str, prompts: int, failed: int, counters: Counters, plain: float | None) -> None:
    """The table at the end of `specds decode`.

    Args:
        plain: seconds that plain decoding would have taken; None if that is not known.
    """
    table = Table(title=title, title_justify="left")
    for name in ("prompts", "tokens", "steps", "MAT", "acceptance", "per node", "tokens/s", "drafting"):
        table.add_column(name, justify="right")
    table.add_row(
        f"{prompts}" + (f" ({failed} failed)" if failed else ""),
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
            f"about {plain / counters.seconds:.2f} × plain decoding, by what its passes take here; `specds bench` "
            "measures it"
        )
    if counters.rescued:
        note(f"{counters.rescued:,} drafted tokens were let pass where the target had picked others")


def comparison(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table of methods; the first column is text, the others numbers."""
    table = Table(title=title, title_justify="left")
    for index, name in enumerate(columns):
        table.add_column(name, justify="left" if index == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console.print(table)


def bench_summary(summary: dict[str, Any]) -> None:
    """The tables at the end of `specds bench`, and what is wrong with the run."""
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


def interval(one: dict[str, Any] | None, digits: int) -> str:
    """A figure with its interval."""
    if one is None:
        return "–"
    if one["low"] is None:
        return f"{one['value']:.{digits}f}"
    return f"{one['value']:.{digits}f} ({one['low']:.{digits}f}–{one['high']:.{digits}f})"


def result_comparison(found: dict[str, Any]) -> None:
    """What `specds compare` shows. Goes to stdout: it is what was asked for."""
    out = screen(stderr=False)
    for path, valid in zip(found["results"], found["valid"], strict=True):
        out.print(escape(printable(path)) + ("" if valid else "  [red]not valid[/red]"))
    for what, changes in found["changed"].items():
        for name, (one, other) in changes.items():
            out.print(f"{what}: {escape(printable(f'{name}: {_brief(one)} → {_brief(other)}'))}")
    for what, (first, second) in found["only"].items():
        for names, which in ((first, "first"), (second, "second")):
            if names:
                out.print(f"{what} only in the {which}: {escape(printable(', '.join(names)))}")
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("group", "method", "× plain", "", "intervals", "MAT", "", "tokens/s", "", "second / first"):
        table.add_column(name, justify="left" if name in ("group", "method", "intervals") else "right", no_wrap=True)
    words = {True: "overlap", False: "apart", None: "–"}
    for row in found["groups"]:
        table.add_row(
            escape(printable(row["group"])),
            escape(printable(row["method"])),
            *(interval(one, 2) for one in row["speedup"]),
            words[row["overlap"]["speedup"]],
            *(f"{one['value']:.2f}" if one else "–" for one in row["mat"]),
            *(f"{one['value']:.1f}" for one in row["tokens_per_second"]),
            interval(row["paired"], 2),
        )
    out.print(table)


def _brief(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else text[:79] + "…"


def table_summary(name: str, corrections: Corrections) -> None:
    """One line about a correction table."""
    note(
        f"{name}: {len(corrections):,} pairs, {int(corrections.count.sum()):,} divergences in {corrections.tokens:,} "
        f"tokens of {corrections.prompts:,} prompts; the top 20 % of pairs hold {corrections.head_share():.1%}"
    )
    if said := _too_rare(corrections):
        note(f"note: {said}")


def _too_rare(corrections: Corrections) -> str:
    """Why nothing is accepted by a table; empty where something is."""
    from specds.datastore.corrections import FREQUENCY

    if corrections.highest >= FREQUENCY:
        return ""
    return (
        f"no pair was seen more than {_times(corrections.highest)}, and csd accepts a draft from "
        f"{_times(FREQUENCY)} on: by this table alone it accepts none. Calibrate on more prompts, or decode with "
        "--verifier-set frequency=N"
    )


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count:,} times"


def memory_note(who: str, memory: Memory) -> None:
    """Says where a verifier that goes by counts has too few of them to accept anything."""
    highest = max(memory.counts.values(), default=0)
    if highest >= memory.least:
        return
    if not memory.counts:
        note(
            f"note: {who} starts with an empty table: it accepts no draft before its divergence was seen "
            f"{_times(memory.least)} in this run. `specds calibrate-csd` makes a table, and --table names it"
        )
        return
    note(
        f"note: {who}: no pair of the table was seen more than {_times(highest)}, and it accepts a draft "
        f"from {_times(memory.least)} on: none before this run has counted on. Calibrate on more prompts, or lower the "
        "verifier's option frequency"
    )


def correction_table(name: str, corrections: Corrections, rows: Sequence[dict[str, Any]]) -> None:
    """What `specds table inspect` shows. Goes to stdout: it is what was asked for."""
    out = screen(stderr=False)
    pair = corrections.pair
    out.print(f"[bold]{escape(name)}[/bold]")
    for what in ("target", "draft", "tokenizer"):
        identity = getattr(pair, what)
        shown = (escape(printable(text)) for text in (identity.name, identity.fingerprint[:12]))
        out.print("  {}: {} [dim]{}[/dim]".format(what, *shown))
    out.print(
        f"  {len(corrections):,} pairs, {int(corrections.count.sum()):,} divergences in {corrections.tokens:,} tokens "
        f"of {corrections.prompts:,} prompts"
    )
    out.print(f"  the top 20 % of pairs hold {corrections.head_share():.1%} of all divergences")
    if said := _too_rare(corrections):
        out.print(f"  [yellow]{escape(said)}[/yellow]", soft_wrap=True)
    for one in corrections.history:
        made = (escape(printable(text)) for text in (one.date, one.command, one.version))
        out.print("  [dim]{} {} (specds {})[/dim]".format(*made))
    _pairs(out, ["count"], rows, len(corrections))


def _pairs(out: Console, counts: Sequence[str], rows: Sequence[dict[str, Any]], every: int) -> None:
    """Pairs with their counts and, where known, their text; and how many are not shown."""
    table = Table(box=None, padding=(0, 2, 0, 2))
    for column in (*counts, "drafted", "", "target's", ""):
        table.add_column(column, justify="right" if column in counts else "left")
    for row in rows:
        texts = [repr(row[name]) if name in row else "" for name in ("draft_text", "target_text")]
        table.add_row(
            *(f"{row[count]:,}" for count in counts),
            str(row["draft_token"]),
            escape(texts[0]),
            str(row["target_token"]),
            escape(texts[1]),
        )
    if rows:
        out.print(table)
    if left := every - len(rows):
        out.print(f"  … and {left:,} more pair{'s' * (left > 1)}; --top shows more", style="dim")


def table_difference(
    one: str, other: str, first: Corrections, second: Corrections, changed: int, rows: Sequence[dict[str, Any]]
) -> None:
    """What `specds table diff` shows. Goes to stdout."""
    out = screen(stderr=False)
    both = len({*first.keys()} & {*second.keys()})
    for name, table in ((one, first), (other, second)):
        out.print(f"{escape(printable(name))}: {len(table):,} pairs, {len(table) - both:,} only here", soft_wrap=True)
    out.print(f"{changed:,} pairs are counted differently, of {len(first) + len(second) - both:,}")
    _pairs(out, ["first", "second"], rows, changed)


def cost_curve(title: str, curve: CostCurve) -> None:
    """T(n) as a table and a plot. Goes to stdout: it is what was asked for."""
    out = screen(stderr=False)
    table = Table(title=f"T(n): {title}", title_justify="left")
    table.add_column("rows", justify="right")
    for context in curve.contexts:
        table.add_column(f"ms behind {context:,}", justify="right")
        table.add_column("× T(1)", justify="right")
    longest = float(curve.seconds[-1, -1])
    table.add_column(f"behind {curve.contexts[-1]:,}")
    for place, count in enumerate(curve.rows):
        cells = []
        for line in curve.seconds:
            cells += [f"{line[place] * 1e3:.2f}", f"{line[place] / line[0]:.2f}"]
        table.add_row(str(count), *cells, "█" * max(1, round(30 * float(curve.seconds[-1, place]) / longest)))
    out.print(table)


def savings(found: dict[str, dict[str, SourceCount]]) -> dict[str, Any]:
    """What `specds dedupe` saves, as JSON."""
    return {
        name: {
            "documents": sum(one.documents for one in saved.values()),
            "tokens": sum(one.tokens for one in saved.values()),
            "sources": {source: dataclasses.asdict(one) for source, one in sorted(saved.items())},
        }
        for name, saved in found.items()
    }


_PASSES = {"none": "–", "answer": "once an answer", "step": "at every step"}


def replay_table(title: str, summaries: Sequence[Summary]) -> None:
    """What `specds replay` found. Goes to stdout: it is what was asked for."""
    table = Table(title=title, title_justify="left")
    table.add_column("method", overflow="fold")
    for column in ("MAT", "steps", "acceptance", "per node", "drafting", "model runs", "tokens/s", "× plain"):
        table.add_column(column, justify="right", no_wrap=True)
    for one in summaries:
        row, drafted = one.row(), one.counters.drafted
        table.add_row(
            escape(one.method),
            f"{row['mat']:.3f}",
            f"{row['steps']:,}",
            f"{row['acceptance']:.1%}" if drafted else "–",
            f"{row['node_acceptance']:.1%}" if drafted else "–",
            f"{row['draft_ms_a_step']:.2f} ms",
            _PASSES[one.passes],
            "–" if one.tokens_per_second is None else f"{one.tokens_per_second:.1f}",
            "–" if one.speedup is None else f"{one.speedup:.2f}",
        )
    screen(stderr=False).print(table)


def tuning_table(found: Tuning) -> None:
    """What `specds tune` found. Goes to stdout: it is what was asked for."""
    held_out = any(one.held_out for one in found.best)
    judged = "held-out prompts" if held_out else "the prompts it was chosen by"
    table = Table(title=f"the fastest of {found.trials:,} settings, on {judged}", title_justify="left")
    table.add_column("prompts")
    table.add_column("drafter")
    for column in ("chosen by", "judged on", "tokens/s", "untuned", "default", "margin", "95 %", "× plain"):
        table.add_column(column, justify="right", no_wrap=True)
    for one in found.best:
        tuned = one.setting != one.default
        table.add_row(
            escape(printable(one.group)),
            one.setting.drafter,
            f"{one.prompts:,}",
            f"{one.held_out or one.prompts:,}",
            f"{one.tokens_per_second:.1f}",
            f"{one.untuned_tokens_per_second:.1f}",
            f"{one.default_tokens_per_second:.1f}",
            f"{one.margin.value - 1:+.1%}" if tuned else "–",
            f"{one.margin.low - 1:+.1%} to {one.margin.high - 1:+.1%}" if tuned else "–",
            f"{one.tokens_per_second / one.plain_tokens_per_second:.2f}",
        )
    out = screen(stderr=False)
    out.print(table)
    for one in found.best:
        said = f"{printable(one.group)}: {_decode_options(one.setting)}"
        if one.setting == one.default:
            said += "  (as without a configuration)"
        out.print(said, markup=False, soft_wrap=True)
        if one.rejected:
            margin = one.rejected.margin
            out.print(
                f"  {one.rejected.setting.name} was the fastest where it was chosen; on {judged} it is "
                f"{margin.value - 1:+.1%} ({margin.low - 1:+.1%} to {margin.high - 1:+.1%}) against decoding without a "
                "configuration, so that the default stays",
                markup=False,
                soft_wrap=True,
            )
    if found.unjudged:
        names = ", ".join(f"{printable(name)} ({count})" for name, count in found.unjudged)
        out.print(f"too few prompts to be judged, so that `all` holds for them: {names}", markup=False, soft_wrap=True)


def _decode_options(setting: Method) -> str:
    from specds.decode.method import written_budget

    words = [f"--drafter {setting.drafter}", *(f"--store {path}" for path in setting.paths)]
    options = [f"--set {name}={value}" for name, value in setting.options.items()]
    return " ".join([*words, f"--budget {written_budget(setting.budget)}", *options])


def replay_record(row: Replayed) -> dict[str, Any]:
    """One answer replayed by one method."""
    counters = counters_row(row.counters)
    for measured in ("seconds", "forward_seconds"):
        del counters[measured]
    return {
        "id": row.answer.id,
        "turn": row.answer.turn,
        "method": row.method,
        "passes": row.passes,
        "counters": counters,
        "predicted_seconds": row.seconds,
        "predicted_plain_seconds": row.plain_seconds,
    }


def evaluation_tables(name: str, found: Evaluation) -> None:
    """What `specds evaluate` found. Goes to stdout: it is what was asked for."""
    out = screen(stderr=False)
    out.print(f"[bold]{escape(printable(name))}[/bold] on {found.answers:,} answers, {found.tokens:,} tokens")
    table = Table("index", "budget", title="predicted", title_justify="left", box=None, padding=(0, 2, 0, 2))
    for column in ("MAT", "acceptance", "per node", *(["× plain"] if _has_speed(found) else [])):
        table.add_column(column, justify="right")
    for index, budget, summary in found.predictions:
        counters = summary.counters
        cells = [f"{counters.mat:.3f}", f"{counters.acceptance:.1%}", f"{counters.node_acceptance:.1%}"]
        if summary.speedup is not None:
            cells.append(f"{summary.speedup:.2f}")
        table.add_row(index, str(budget), *cells)
    out.print(table)
    total = sum(one.positions for one in found.hits)
    if total:
        table = Table(title="longest match", title_justify="left", box=None, padding=(0, 2, 0, 2))
        for column in ("tokens", "positions", "first is right", "any is right"):
            table.add_column(column, justify="right")
        for one in found.hits:
            right = [f"{count / one.positions:.1%}" if one.length else "–" for count in (one.first, one.anywhere)]
            table.add_row(str(one.length), f"{one.positions / total:.1%}", *right)
        first, anywhere = (sum(getattr(one, name) for one in found.hits) for name in ("first", "anywhere"))
        table.add_row("all", "100.0%", f"{first / total:.1%}", f"{anywhere / total:.1%}")
        out.print(table)
    for what, texts in (("prompts", found.prompts), ("answers", found.responses)):
        part = f"{texts.shared / texts.ngrams:.1%}" if texts.ngrams else "–"
        out.print(
            f"overlap: {texts.touched:,} of {texts.texts:,} {what} share a {found.ngram}-gram with the store, "
            f"{part} of their {found.ngram}-grams stand there; {texts.same:,} are documents as they are"
        )
    for what, shares in (("source", found.sources), ("corpus file", found.parts)):
        table = Table(box=None, padding=(0, 2, 0, 2))
        table.add_column(what, overflow="fold")
        for column in ("documents", "of use", "tokens", "accepted", "here alone", "oldest", "newest"):
            table.add_column(column, justify="right", no_wrap=True)
        for share in shares:
            table.add_row(
                escape(printable(share.name)),
                f"{share.documents:,}",
                f"{share.useful / share.documents:.0%}" if share.indexed else "not indexed" if found.hits else "–",
                f"{share.tokens:,}",
                f"{share.gave:,}",
                f"{share.alone:,}",
                escape(share.oldest[:10]),
                escape(share.newest[:10]),
            )
        out.print(table)
    if dead := [share for share in found.sources if share.dead]:
        tokens = sum(share.tokens for share in dead)
        names = ", ".join(share.name for share in dead)
        out.print(f"dead weight: {escape(printable(names))}: {tokens:,} tokens, and none was accepted")


def _has_speed(found: Evaluation) -> bool:
    return any(summary.speedup is not None for _, _, summary in found.predictions)


def acceptance_record(path: str, found: Acceptance) -> dict[str, Any]:
    """How right a calibration of drafts is, as JSON."""
    measured = found.reliability
    return {"path": path, **found.about, "reliability": None if measured is None else measured.record()}


def acceptance_table(path: str, found: Acceptance, *, stderr: bool = False) -> None:
    """How right a calibration of drafts is, for a person."""
    out = screen(stderr=stderr)
    about = found.about
    of = f"{about.get('nodes', 0):,} candidates of {about.get('prompts', 0):,} prompts of {about.get('model', '?')}"
    out.print(f"drafts     {escape(printable(path))}: {escape(printable(of))}", soft_wrap=True)
    measured = found.reliability
    if measured is None:
        out.print("           not measured on held-out prompts")
        return
    out.print(
        f"           expected calibration error {measured.error:.3f} on held-out prompts; {measured.likely:.3f} of "
        "candidates of probability 0.1 and more",
        soft_wrap=True,
    )
    table = Table("probability", "candidates", "promised", "accepted", "", box=None, padding=(0, 2, 0, 2))
    for place, count in enumerate(measured.counts):
        if count:
            low, high = measured.edges[place : place + 2]
            share = measured.accepted[place]
            table.add_row(
                f"{low:.2f}–{high:.2f}",
                f"{count:,}",
                f"{measured.promised[place]:.3f}",
                f"{share:.3f}",
                "█" * round(20 * share),
            )
    out.print(table)


def explanation_table(title: str, found: Explanation) -> None:
    """What `specds explain` found. Goes to stdout: it is what was asked for."""
    out = screen(stderr=False)
    out.print(f"[bold]{escape(printable(title))}[/bold]  drafter {escape(printable(found.drafter))}")
    steps = max(found.steps, 1)
    out.print(
        f"{found.tokens:,} tokens in {found.steps:,} passes: {found.tokens / steps:.2f} a pass, "
        f"{found.drafted / steps:.1f} drafted, {found.accepted / max(found.drafted, 1):.0%} of these accepted"
    )
    faster = found.plain / found.seconds if found.seconds else 0.0
    out.print(
        f"{found.seconds:.2f} s, {found.drafting / max(found.seconds, 1e-9):.1%} of it drafting; about "
        f"{found.plain:.2f} s without drafts ({faster:.2f}×); one more row takes {1e3 * found.row:.2f} ms"
    )
    table = Table(title="by source; a token can have several", title_justify="left")
    table.add_column("source", overflow="fold")
    for column in ("drafted", "accepted", "rate", "only it", "asking, ms", "without it, s", "slower"):
        table.add_column(column, justify="right", no_wrap=True)
    for one in found.sources:
        table.add_row(
            escape(printable(one.name)),
            f"{one.drafted:,}",
            f"{one.accepted:,}",
            f"{one.accepted / one.drafted:.0%}" if one.drafted else "–",
            f"{one.alone:,}",
            "–" if one.seconds is None else f"{1e3 * one.seconds:.1f}",
            f"{one.without:.2f}",
            f"{one.without / found.seconds - 1:+.1%}" if found.seconds else "–",
        )
    out.print(table)


def store_record(store: Store) -> dict[str, Any]:
    """What is in a store, as JSON."""
    manifest = store.manifest
    sources: dict[str, dict[str, int]] = {}
    for shard in manifest.corpus:
        for name, count in shard.sources.items():
            entry = sources.setdefault(name, {"documents": 0, "tokens": 0})
            entry["documents"] += count.documents
            entry["tokens"] += count.tokens
    return {
        "path": str(store.path),
        "tokenizer": {
            "name": manifest.tokenizer.name,
            "fingerprint": manifest.tokenizer.fingerprint,
            "vocab_size": manifest.vocab_size,
        },
        "documents": manifest.documents,
        "tokens": manifest.tokens,
        "prompt_tokens": sum(shard.prompt_tokens for shard in manifest.corpus),
        "response_tokens": sum(shard.response_tokens for shard in manifest.corpus),
        "sources": sources,
        "corpus": [
            {
                "file": shard.file,
                "documents": shard.documents,
                "origin": shard.origin,
                "model": shard.model and {"name": shard.model.name, "fingerprint": shard.model.fingerprint},
                "sampling": shard.sampling,
                "sources": sorted(shard.sources),
                "licence": shard.licence,
                "command": shard.provenance.command,
                "version": shard.provenance.version,
                "date": shard.provenance.date,
            }
            for shard in manifest.corpus
        ],
        "indexes": [
            _segment_record(store, kind, segment) for kind, segments in manifest.indexes.items() for segment in segments
        ],
        "uncovered": {
            kind: [shard.file for shard in manifest.uncovered(kind)]
            for kind, segments in manifest.indexes.items()
            if segments
        },
        "history": [dataclasses.asdict(change) for change in manifest.history],
        "bytes": store.size(),
        "files": len(manifest.files),
    }


def _segment_record(store: Store, kind: str, segment: Segment) -> dict[str, Any]:
    return {
        "kind": kind,
        "directory": segment.directory,
        "tokens": segment.tokens,
        "shards": segment.shards,
        "model": segment.model and {"name": segment.model.name, "fingerprint": segment.model.fingerprint},
        "parameters": segment.parameters,
        "quality": segment.quality,
        "bytes": sum(store.manifest.files[name].size for name in store.manifest.files_of(segment)),
        "command": segment.provenance.command,
        "version": segment.provenance.version,
        "date": segment.provenance.date,
    }


def store_tables(store: Store) -> None:
    """What is in a store, for a person. Goes to stdout: it is what was asked for."""
    out = screen(stderr=False)
    record = _escaped(store_record(store))
    tokenizer = record["tokenizer"]
    out.print(f"[bold]{record['path']}[/bold]  {size(record['bytes'])} in {record['files']} files")
    out.print(f"tokenizer  {tokenizer['name']} ({tokenizer['fingerprint'][:16]}, {tokenizer['vocab_size']:,} tokens)")
    out.print(
        f"corpus     {record['documents']:,} documents, {record['tokens']:,} tokens "
        f"({record['prompt_tokens']:,} prompt, {record['response_tokens']:,} response)"
    )
    table = Table("source", "documents", "tokens", box=None, padding=(0, 2, 0, 2))
    for name, count in sorted(record["sources"].items()):
        table.add_row(name, f"{count['documents']:,}", f"{count['tokens']:,}")
    out.print(table)
    for shard in record["corpus"]:
        writer = f"generated by {shard['model']['name']}" if shard["model"] else shard["origin"]
        out.print(f"part       {shard['file']}: {shard['documents']:,} documents, {writer}, {shard['date']}")
        out.print(f"           {shard['command']}", style="dim", soft_wrap=True)
    if not record["indexes"]:
        out.print("indexes    none yet: specds build-suffix, specds build-dense")
    for index in record["indexes"]:
        out.print(f"{index['kind']:10} {index['tokens']:,} tokens, {size(index['bytes'])}, {index['date']}")
        for what in ("parameters", "quality"):
            if index[what]:
                out.print(f"           {what}: " + ", ".join(f"{k} {v}" for k, v in index[what].items()))
        if index["model"]:
            out.print(f"           model: {index['model']['name']} ({index['model']['fingerprint'][:16]})")
    for kind, files in record["uncovered"].items():
        if files:
            out.print(
                f"[yellow]{len(files)} corpus files are not in the {kind} index yet: specds build-{kind}[/yellow]"
            )


def provenance_lines(store: Store) -> None:
    """What `specds inspect --provenance` shows: every part, where it came from, and what was done since, in order."""
    out = screen(stderr=False)
    record = _escaped(store_record(store))
    found: list[tuple[str, str, dict[str, Any]]] = []
    for part in record["corpus"]:
        who = f"generated by {part['model']['name']}" if part["model"] else part["origin"]
        said = f"{part['documents']:,} documents of {', '.join(part['sources'])}; {who}"
        licence = f"licence {part['licence']}" if part["licence"] else "licence not said"
        found.append((part["date"], f"{part['file']}: {said}; {licence}", part))
    for index in record["indexes"]:
        model = f", hidden states of {index['model']['name']}" if index["model"] else ""
        found.append((index["date"], f"{index['directory']}: over {len(index['shards'])} corpus files{model}", index))
    for change in record["history"]:
        found.append((change["provenance"]["date"], change["what"], change["provenance"]))
    for date, what, made in sorted(found, key=lambda one: one[0]):
        out.print(f"{date}  {what}", soft_wrap=True)
        out.print(f"{' ' * len(date)}  {made['command']} (specds {made['version']})", style="dim", soft_wrap=True)


def store_difference(raw: dict[str, Any]) -> None:
    """What `specds diff` shows of its record. Goes to stdout: it is what was asked for."""
    out = screen(stderr=False)
    record = _escaped(raw)
    one, other = record["stores"]
    for name, pair in (("tokenizer", [[one] for one in record["tokenizers"]]), ("model", record["models"])):
        first, second = (", ".join(f"{one['name']} ({one['fingerprint'][:16]})" for one in side) for side in pair)
        same = sorted(one["fingerprint"] for one in pair[0]) == sorted(one["fingerprint"] for one in pair[1])
        out.print(
            f"{name:10} {first or 'none'}" if same else f"{name:10} differs: {first or 'none'}; {second or 'none'}"
        )
    table = Table("source", box=None, padding=(0, 2, 0, 2))
    for title in (f"only in {one}", f"only in {other}", "in both"):
        table.add_column(title, justify="right")
    for name, counts in record["sources"].items():
        parts = (counts[where] for where in ("first", "second", "both"))
        table.add_row(name, *(f"{part['documents']:,} ({part['tokens']:,} tokens)" for part in parts))
    out.print(table)
    said = {
        "first": f"only in {one}",
        "second": f"only in {other}",
        "changed": "of them with the same id in both",
        "renamed": "in both, with different ids",
        "relabelled": "in both, with different sources",
    }
    for kind, count in record["documents"].items():
        if count:
            out.print(f"{count:,} documents {said[kind]}")
            shown = record["ids"][kind]
            for entry in shown:
                out.print(f"  {entry if isinstance(entry, str) else ' = '.join(entry)}", style="dim", soft_wrap=True)
            if len(shown) < count:
                out.print(f"  … and {count - len(shown):,} more", style="dim")
    for index in record["indexes"]:
        tokens, segments = index["tokens"], index["segments"]
        sides = "; ".join(
            f"{count:,} tokens in {number} segment{'s' * (number > 1)}" if number else "none"
            for count, number in zip(tokens, segments, strict=True)
        )
        out.print(f"{index['kind']:10} {'differs' if index['differs'] else 'alike'}: {sides}")
        for name, values in index["parameters"].items():
            first, second = (", ".join(map(str, side)) for side in values)
            out.print(f"           {name}: {first}; {second}")
        first, second = (", ".join(model["name"] for model in side) for side in index["models"])
        if index["models"][0] != index["models"][1]:
            out.print(f"           model: {first or 'none'}; {second or 'none'}")
    out.print("the same documents" if record["same_contents"] else "different documents", style="bold")


def _escaped(value: Any) -> Any:
    """Text from a store as it may be shown: no markup, and nothing that moves a terminal's cursor."""
    if isinstance(value, str):
        return escape(printable(value))
    if isinstance(value, dict):
        return {_escaped(key): _escaped(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_escaped(one) for one in value]
    return value


def size(count: float) -> str:
    """Bytes for a person."""
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
