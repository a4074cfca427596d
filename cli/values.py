"""What is made of the words that options hold: sizes, numbers, budgets, stores, recorded answers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from specds.errors import InputError, UsageError
from specds.limits import parse_size

if TYPE_CHECKING:
    from specds.calibration.answers import Answers
    from specds.cli.options import PromptOptions
    from specds.datastore.store import Store
    from specds.decode.pricing.curve import CostCurve
    from specds.model import LanguageModel
    from specds.tokenizer import Tokenizer


_REPLAY_BUDGET = 16


def size(name: str, text: str | None) -> int | None:
    """Bytes of a size such as 500MB, 2GB or 1.5GiB.

    Raises:
        UsageError: it is not a valid size.
    """
    if text is None:
        return None
    parsed = parse_size(text)
    if parsed is None:
        raise UsageError(f"--{name} is {text!r}", "a size such as 500MB, 2GB or 1.5GiB")
    return parsed


def open_stores(paths: Sequence[Path] | None, tokenizer: Tokenizer, *, thorough: bool = False) -> list[Store]:
    """Datastores that hold a tokenizer's tokens; every byte of them is read if `thorough`."""
    from specds.datastore.store import open_store

    return [open_store(path, tokenizer, thorough=thorough) for path in paths or []]


def require_stores(paths: Sequence[Path] | None) -> None:
    """Refuse what is not a valid store, before any model is looked for."""
    from specds.datastore.store import open_store

    for path in paths or []:
        open_store(path)


def budget(text: str) -> int | None:
    """A number of draft tokens; None for `auto`.

    Raises:
        UsageError: neither.
    """
    from specds.decode.method import parse_budget

    try:
        return parse_budget(text)
    except ValueError:
        raise UsageError(f"--budget is {text!r}", "a number, 0 or more, or auto") from None


def cost_curve(path: Path | None) -> CostCurve | None:
    """A cost curve in a file, or that of the forward passes of a trace or a bench.

    Raises:
        InputError: there is none in it.
    """
    from specds.calibration.trace import read_passes
    from specds.decode.pricing import measurement

    if path is None:
        return None
    trace = path / "steps.parquet" if path.is_dir() else path
    if trace != path or _is_parquet(path):
        curve = read_passes(str(trace)).curve()
        if curve is None:
            raise InputError(
                f"{trace} has too few forward passes of one query token, or of several",
                "a bench of `none` and a drafter has both; passes that requests shared (--parallel) do not count",
            )
        return curve
    curve = measurement.load(path)
    if curve is None:
        raise InputError(f"{path} is not a valid cost curve", "`specds profile --json > C.json` writes one")
    return curve


def _is_parquet(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(4) == b"PAR1"
    except OSError:
        return False


def replay_budget(text: str | None, curve: CostCurve | None) -> int | None:
    """The budget of a replay: by the curve where there is one, else 16."""
    if text is None:
        return _REPLAY_BUDGET if curve is None else None
    return budget(text)


def recorded(
    answers: str,
    prompts: PromptOptions,
    model: LanguageModel,
    *,
    most: int | None = None,
    group: str | None = None,
) -> Answers:
    """Recorded answers with their prompts; says what they leave to be desired."""
    from specds.calibration.answers import read_answers
    from specds.cli.render import note

    recording = read_answers(
        answers, prompts.read(group=group), model.tokenizer, most=most, stop_tokens=model.stop_tokens
    )
    if recording.failed:
        note(f"note: {recording.failed:,} prompts have an error instead of an answer; they are left out")
    if not recording.lossless:
        note("note: some answers are of a lossy run; what a lossless one would write, and accept, differs")
    return recording


def numbers(name: str, text: str) -> list[int]:
    """Ascending positive numbers from `1,2,4`.

    Raises:
        UsageError: something else.
    """
    words = text.split(",")
    if not all(word.strip().isascii() and word.strip().isdigit() and int(word) > 0 for word in words):
        raise UsageError(f"{name} is {text!r}", "positive numbers with commas between them")
    return sorted({int(word) for word in words})


def settings(pairs: Sequence[str], flag: str = "--set") -> dict[str, str]:
    """`name=value` words as a dictionary.

    Raises:
        UsageError: a word without `=`, or a name given twice.
    """
    named: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        name = name.strip().replace("-", "_")
        if not equals or not name:
            raise UsageError(f"{flag} {pair!r}", f"write {flag} name=value; `specds drafters` lists the names")
        if name in named:
            raise UsageError(f"{flag} {name} is given twice", "give it once")
        named[name] = value.strip()
    return named
