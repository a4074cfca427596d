"""The command line: `specds COMMAND …`. Each command is a file of its own; this one puts them together."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from contextvars import ContextVar
from typing import Annotated, Any, TextIO

import typer

from specds.caches import lend_temporary
from specds.cli import (
    bench,
    build_dense,
    build_suffix,
    calibrate_csd,
    calibrate_drafts,
    choose_skip,
    compact,
    compare,
    decode,
    dedupe,
    demo,
    diff,
    drafters,
    evaluate,
    explain,
    export,
    generate,
    ingest,
    inspect,
    merge,
    profile,
    rebuild,
    remove,
    replay,
    table,
    tune,
    verify,
)
from specds.cli.groups import Group, add
from specds.errors import Notice, OutputError, SpecdsError, first_line, shortage
from specds.printing import printable
from specds.version import __version__

# What the parser raises at wrong usage: click's class, or the copy of it that newer versions of typer carry.
_WrongUsage: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")
_INTERRUPTED = 130
_BY_SIGNAL = 128
# What a supervisor, a batch system or a closing terminal ends a process with.
_ENDING = (signal.SIGTERM, signal.SIGHUP)
_GRACE = 3.0
_usual_warning = warnings.showwarning
# What a shell reports of a program that wrote to a closed pipe: 128 and the number of SIGPIPE.
_CLOSED_PIPE = 141
_shows_tracebacks: ContextVar[bool] = ContextVar("shows_tracebacks", default=False)
_ended_by: ContextVar[int | None] = ContextVar("ended_by", default=None)

app = typer.Typer(
    name="specds",
    help="Draft datastores that make language models decode faster, without training and without changing their text.",
    epilog="From prompts to a faster model: generate → build-suffix, build-dense → decode. `specds demo` shows it all."
    "\n\nEvery option can be set by an environment variable: SPECDS_DECODE_BUDGET is `decode --budget`, SPECDS_MODEL "
    "is --model of every command.",
    no_args_is_help=True,
    cls=Group,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
_COMMANDS: tuple[Callable[..., None], ...] = (
    generate.generate,
    ingest.ingest,
    build_suffix.build_suffix,
    build_dense.build_dense,
    calibrate_drafts.calibrate_drafts,
    calibrate_csd.calibrate_csd,
    choose_skip.choose_skip,
    decode.decode,
    drafters.drafters,
    explain.explain,
    profile.profile,
    replay.replay,
    tune.tune,
    evaluate.evaluate,
    bench.bench,
    compare.compare,
    inspect.inspect,
    verify.verify,
    diff.diff,
    export.export,
    compact.compact,
    merge.merge,
    remove.remove,
    dedupe.dedupe,
    rebuild.rebuild,
    demo.demo,
)
for _command in _COMMANDS:
    add(app, _command)
app.add_typer(table.app)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"specds {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", envvar="SPECDS_DEBUG", help="Show tracebacks. Give it before the command.")
    ] = False,
) -> None:
    _shows_tracebacks.set(debug)


def run() -> None:
    """Run the command line and exit: 0 ok, 1 failed, 2 usage, 130 interrupted, 141 nobody reads on, 143 terminated."""
    code = 1
    warnings.showwarning = _show_warning
    heeded = _heed_ending()
    lend_temporary()
    _shows_tracebacks.set(bool(os.environ.get("SPECDS_DEBUG")))
    try:
        result = app(standalone_mode=False, prog_name="specds")
        code = result if isinstance(result, int) else 0
        if code == _INTERRUPTED:  # newer versions of typer return this where others raise
            raise KeyboardInterrupt
        if sys.stdout is not None:
            sys.stdout.flush()
    except SpecdsError as error:
        told = shortage(error) or error
        _complain(told.message, told.hint)
        code = told.exit_code
    except _WrongUsage as error:
        error.message = printable(error.message) + _where_from(error)
        error.show()
        code = error.exit_code
    except (BrokenPipeError, SystemExit) as error:
        if isinstance(error, SystemExit) and not error.code:  # what completes a shell's words ends like this
            code = 0
        else:
            # `… | head` has what it wanted; typer makes SystemExit out of the closed pipe.
            _silence(1)
            _silence(2)
            code = _CLOSED_PIPE
    except (KeyboardInterrupt, typer.Abort):
        ended_by = _ended_by.get()
        said = "interrupted" if ended_by is None else f"ended by {signal.Signals(ended_by).name}"
        _complain(said, "the same command goes on where it stopped, if it writes a store or --output")
        code = _INTERRUPTED if ended_by is None else _BY_SIGNAL + ended_by
    except Exception as error:
        told = explained(error)
        _complain(told.message, told.hint)
        if isinstance(error, OSError):
            _silence(1)
    for number in heeded:
        signal.signal(number, signal.SIG_DFL)
    sys.exit(code)


def _where_from(error: Exception) -> str:
    """Says that a wrong value may be an environment variable's; empty if none of that option is set."""
    named = error.param.envvar if isinstance(error, typer.BadParameter) and error.param is not None else None
    names = [named] if isinstance(named, str) else named or []
    return next((f" ({name} is set)" for name in names if os.environ.get(name)), "")


def explained(error: Exception) -> SpecdsError:
    """What the command line says of an error that nobody has given a name; "unexpected" is a bug."""
    if (short := shortage(error)) is not None:
        return short
    if isinstance(error, OSError):
        return OutputError(f"{error.filename or 'output'}: {error.strerror or error}", "check the path and free space")
    if isinstance(error, ImportError):
        return SpecdsError(f"a library cannot be loaded: {first_line(error)}", "install specds and what it needs again")
    said = " ".join(str(error).split())[:300]
    return SpecdsError(f"unexpected {type(error).__name__}: {said}", "see it with --debug")


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    if issubclass(category, Notice):
        _say(f"note: {message}")
    else:
        _usual_warning(message, category, filename, lineno, file, line)


def _heed_ending() -> list[signal.Signals]:
    """End at these signals as at Ctrl-C: files are finished or removed, and processes of our own ended.

    Returns:
        those that were not heeded before: nohup has them ignored, and an embedding program may have its own way.
    """
    ending_since: float | None = None

    def end(number: int, frame: object) -> None:
        nonlocal ending_since
        now = time.monotonic()
        # `timeout` and others signal a process and then its group, which would interrupt the cleaning up.
        if ending_since is None or now - ending_since > _GRACE:
            ending_since = now
            _ended_by.set(number)
            raise KeyboardInterrupt

    _ended_by.set(None)
    heeded = [number for number in _ENDING if signal.getsignal(number) == signal.SIG_DFL]
    for number in heeded:
        signal.signal(number, end)
    return heeded


def _silence(descriptor: int) -> None:
    """What could not be written must not be tried again when Python exits: it would complain in its own words."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


def _complain(message: str, hint: str) -> None:
    if _shows_tracebacks.get() and sys.exc_info()[0] is not None:
        traceback.print_exc()
    _say(f"error: {message}" + (f" — {hint}" if hint else ""))


def _say(line: str) -> None:
    # A message may quote bytes of a broken file; it must still be printable, and one line.
    text = printable(" ".join(line.split()))
    encoding = sys.stderr.encoding or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding), file=sys.stderr)
