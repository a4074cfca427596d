"""Everything that people look at: tables, bars and notes, all on stderr. Stdout is for data."""

from __future__ import annotations

import contextlib
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
    from specds.calibration.replay import Summary
    from specds.datastore.corrections import Table as Corrections
    from specds.decode.auto.acceptance import Acceptance
    from specds.decode.verifiers.csd import Memory
    from specds.loading import Loading, Watch

LINE_SECONDS = 30.0
"""How often progress is told where stderr is no terminal."""
_PLAIN_WIDTH = 120


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
        return f"{self._what}: {', '.join([*words, f'{duration(spent, exact=True)} so far'])}"


def duration(seconds: float, *, exact: bool = False) -> str:
    """Seconds for a person: 41 s, 12 min, 3 h 20 min.

    Args:
        exact: also the seconds of what took minutes, for a time that is told more often than once a minute.
    """
    whole = round(seconds)
    if whole < 90:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60) if exact else (round(seconds / 60), 0)
    words = [f"{minutes} min"] if minutes < 90 else [f"{minutes // 60} h", f"{minutes % 60} min"]
    return " ".join([*words, f"{rest} s"] if rest else words)


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
    for loaded in kept if not quiet else ():
        note(f"{loaded.what}: done, {size(loaded.done)} are kept in {loaded.kept}")


def comparison(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table of methods; the first column is text, the others numbers."""
    table = Table(title=title, title_justify="left")
    for index, name in enumerate(columns):
        table.add_column(name, justify="left" if index == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console.print(table)


def interval(figure: dict[str, Any] | None, digits: int) -> str:
    """A figure with its interval."""
    if figure is None:
        return "–"
    if figure["low"] is None:
        return f"{figure['value']:.{digits}f}"
    return f"{figure['value']:.{digits}f} ({figure['low']:.{digits}f}–{figure['high']:.{digits}f})"


def table_summary(name: str, corrections: Corrections) -> None:
    """One line about a correction table."""
    note(
        f"{name}: {len(corrections):,} pairs, {int(corrections.count.sum()):,} divergences in {corrections.tokens:,} "
        f"tokens of {corrections.prompts:,} prompts; the top 20 % of pairs hold {corrections.head_share():.1%}"
    )
    if said := too_rare(corrections):
        note(f"note: {said}")


def too_rare(corrections: Corrections) -> str:
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


_PASSES = {"none": "–", "answer": "once an answer", "step": "at every step"}


def replay_table(title: str, summaries: Sequence[Summary]) -> None:
    """What `specds replay` found. Goes to stdout: it is what was asked for."""
    table = Table(title=title, title_justify="left")
    table.add_column("method", overflow="fold")
    for column in ("MAT", "steps", "acceptance", "per node", "drafting", "forward passes", "tokens/s", "× plain"):
        table.add_column(column, justify="right", no_wrap=True)
    for summary in summaries:
        row, drafted = summary.row(), summary.counters.drafted
        table.add_row(
            escape(summary.method),
            f"{row['mat']:.3f}",
            f"{row['steps']:,}",
            f"{row['acceptance']:.1%}" if drafted else "–",
            f"{row['node_acceptance']:.1%}" if drafted else "–",
            f"{row['draft_ms_a_step']:.2f} ms",
            _PASSES[summary.passes],
            "–" if summary.tokens_per_second is None else f"{summary.tokens_per_second:.1f}",
            "–" if summary.speedup is None else f"{summary.speedup:.2f}",
        )
    screen(stderr=False).print(table)


def acceptance_table(path: str, acceptance: Acceptance, *, stderr: bool = False) -> None:
    """How right a calibration of drafts is, for a person."""
    out = screen(stderr=stderr)
    about = acceptance.about
    of = f"{about.get('nodes', 0):,} candidates of {about.get('prompts', 0):,} prompts of {about.get('model', '?')}"
    out.print(f"drafts     {escape(printable(path))}: {escape(printable(of))}", soft_wrap=True)
    measured = acceptance.reliability
    if measured is None:
        out.print("           not measured on held-out prompts")
        return
    out.print(
        f"           expected calibration error {measured.error:.3f} on held-out prompts; {measured.likely:.3f} of "
        "candidates of probability 0.1 and more",
        soft_wrap=True,
    )
    table = Table("probability", "candidates", "predicted", "accepted", "", box=None, padding=(0, 2, 0, 2))
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


def escaped(value: Any) -> Any:
    """Text from a store as it may be shown: no markup, and nothing that moves a terminal's cursor."""
    if isinstance(value, str):
        return escape(printable(value))
    if isinstance(value, dict):
        return {escaped(key): escaped(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [escaped(inner) for inner in value]
    return value


def size(count: float) -> str:
    """Bytes for a person."""
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
