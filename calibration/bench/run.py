"""Running a benchmark: every contender on every prompt, interleaved; then judging it and writing the result."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specds.calibration.bench.cases import Case, identity
from specds.calibration.bench.contenders import Contender, Measured, complaints, counters_of
from specds.calibration.bench.figures import complete_prompts, groups_of, passes_of, steps_of
from specds.calibration.bench.judge import NEAR_TIE, compare_texts, problems_of, rate_texts
from specds.calibration.bench.report import report
from specds.calibration.bench.results import FORMAT, REPORT, SUMMARY, Results, Row, open_results
from specds.calibration.bench.session import session
from specds.calibration.trace import trace_row
from specds.decode.pricing import measurement
from specds.decode.pricing.curve import CostCurve
from specds.decode.targets import choose_runtime, make_target
from specds.digests import sha256
from specds.errors import InputError, PeerError, PromptError
from specds.model import LanguageModel
from specds.reading.prompts import BadRow, Prompt
from specds.sampling import Sampling

# torch's threads go on spinning for a while after a pass.
_PAUSE = 0.05
_DIFFERENCE = ("method", "prompt", "repeat", "differs_turn", "differs_at", "gap", "near_tie")

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """How a run measures.

    Attributes:
        max_new_tokens: most tokens of a turn's answer.
        repeats: how often each contender answers each prompt.
        warmup: tokens of the unmeasured answer that each contender begins with.
        near_tie: logits that excuse another token; None: by the dtype.
        curve: whether the cost curve is shown; it is measured where none is kept.
    """

    max_new_tokens: int
    sampling: Sampling
    repeats: int = 1
    warmup: int = 16
    near_tie: float | None = None
    runtime: str = "auto"
    curve: bool = True


def bench(
    out: Path,
    model: LanguageModel,
    contenders: Sequence[Contender],
    cases: Sequence[Case],
    plan: Plan,
    options: dict[str, Any],
    progress: Progress = lambda what, done, total: None,
) -> dict[str, Any]:
    """Measure what is not measured yet, judge all of it, and write the result. Returns its summary.

    Contenders take turns on each prompt, in an order that rotates, so that all meet the machine in the same mood.

    Args:
        out: the result's directory: new, or one that was begun with the same options.
        contenders: plain decoding first.
        options: what the command was asked for, as it stands in the result.
        progress: called with (what is done, how much is done, of how much).

    Raises:
        InputError: the directory holds something else.
        OutputError: it cannot be written.
        PeerError: a peer cannot even answer the warm-up. One that fails later has rows that say so.
    """
    asked = {
        **options,
        "model": {"name": model.name, "fingerprint": model.fingerprint, "dtype": model.dtype},
        "device": model.device.type,
        "runtime": choose_runtime(model, plan.runtime),
        "prompts_digest": identity(cases),
        "methods": [contender.name for contender in contenders],
        "max_new_tokens": plan.max_new_tokens,
        "sampling": asdict(plan.sampling),
        "repeats": plan.repeats,
        "warmup": plan.warmup,
    }
    with open_results(out, asked) as results:
        check_tokens(out, results, model)
        _measure(results, model, contenders, cases, plan, progress)
        rows = [results.rows[key] for key in _keys(cases, contenders, plan)]
        lossless = {contender.name: contender.lossless for contender in contenders}
        for row in rows:
            row["lossless"] = lossless[row["method"]] if lossless[row["method"]] is not None else row["lossless"]
        near_tie = plan.near_tie if plan.near_tie is not None else NEAR_TIE[model.dtype]
        compare_texts(rows, model, plan.sampling, near_tie)
        references = {
            case.key: case.prompt.reference
            for case in cases
            if isinstance(case.prompt, Prompt) and case.prompt.reference is not None
        }
        rate_texts(rows, references, model, lambda done, total: progress("judging", done, total))
        results.finish(rows)
        curve = None
        if plan.curve:
            runtime = choose_runtime(model, plan.runtime)
            curve = measurement.known(make_target(model, runtime), model, runtime)
        summary = summarize(out, rows, results.sessions, asked, near_tie, curve)
        results.write(SUMMARY, json.dumps(summary, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
        results.write(REPORT, report(summary))
    return summary


def summarize(
    out: Path,
    rows: Sequence[Row],
    sessions: Sequence[dict[str, Any]],
    options: dict[str, Any],
    near_tie: float,
    curve: CostCurve | None,
) -> dict[str, Any]:
    """What stands in `summary.json`."""
    problems = problems_of(rows)
    prompts = complete_prompts(rows)
    first = {row["method"]: row for row in reversed(rows)}
    steps = steps_of(out, prompts)
    return {
        "format": FORMAT,
        "valid": not problems,
        "problems": problems,
        "options": options,
        "sessions": list(sessions),
        "near_tie": near_tie,
        "methods": [
            {"name": name, "peer": first[name]["peer"], "lossless": first[name]["lossless"]}
            for name in options["methods"]
        ],
        "prompts": {"asked": len({row["prompt"] for row in rows}), "compared": len(prompts)},
        "differences": [
            {name: row[name] for name in _DIFFERENCE} for row in rows if row["same"] is False and row["lossless"]
        ],
        "groups": groups_of(rows) if prompts else [],
        "steps": steps,
        "passes": passes_of(steps),
        "cost": None if curve is None else cost_of(curve),
    }


def cost_of(curve: CostCurve) -> dict[str, Any]:
    """A cost curve as it stands in the summary."""
    return {"rows": list(curve.rows), "contexts": list(curve.contexts), "seconds": curve.seconds.tolist()}


def _keys(cases: Sequence[Case], contenders: Sequence[Contender], plan: Plan) -> Iterator[tuple[str, str, int]]:
    """In the order of the table."""
    for case in cases:
        for contender in contenders:
            for repeat in range(plan.repeats):
                yield case.key, contender.name, repeat


def check_tokens(out: Path, results: Results, model: LanguageModel) -> None:
    """Refuse rows, measured earlier, that this model cannot have answered.

    Raises:
        InputError: there is one.
    """
    for row in results.rows.values():
        for prompt, tokens in zip(row["prompt_tokens"] or (), row["tokens"] or (), strict=True):
            text = [*prompt, *tokens]
            known = all(0 <= token < model.config.vocab_size for token in text)
            if not known or not prompt or len(text) > model.context_length:
                raise InputError(
                    f"{out} is damaged: {row['method']}'s tokens of prompt {row['prompt']!r} are not this model's",
                    "measure again into another --output",
                )


def _measure(
    results: Results,
    model: LanguageModel,
    contenders: Sequence[Contender],
    cases: Sequence[Case],
    plan: Plan,
    progress: Progress,
) -> None:
    done = {key for key, row in results.rows.items() if not row["error"]}
    total = len(cases) * len(contenders) * plan.repeats
    if done.issuperset(_keys(cases, contenders, plan)):
        return
    results.begin(session())
    first = next((case.prompt for case in cases if isinstance(case.prompt, Prompt)), None)
    if first is not None and plan.warmup:
        for number, contender in enumerate(contenders):
            progress("warming up", number, len(contenders))
            answer = _answer(contender, first, plan.warmup)
            if isinstance(answer, PeerError):
                raise answer
    for number in range(total):
        turn, place = divmod(number, len(contenders))
        repeat, which = divmod(turn, len(cases))
        case, contender = cases[which], contenders[(turn + place) % len(contenders)]
        if (case.key, contender.name, repeat) not in done:
            time.sleep(_PAUSE)
            answer = _answer(contender, case.prompt, plan.max_new_tokens)
            row = {"group": case.group, "prompt": case.key, "method": contender.name, "repeat": repeat, "order": number}
            row |= {"session": len(results.sessions) - 1, "peer": contender.peer, "lossless": contender.lossless}
            results.add(row | _row(answer), _steps(case.key, contender.drafter, answer))
        progress("measuring", number + 1, total)


def _answer(contender: Contender, prompt: Prompt | BadRow, most: int) -> Measured | PromptError | PeerError:
    try:
        if isinstance(prompt, BadRow):
            return prompt.error
        return contender.answer(prompt, most)
    except (PromptError, PeerError) as error:
        return error


def _row(answer: Measured | PromptError | PeerError) -> Row:
    """What was measured, as it stands in the result; what is judged later is empty."""
    judged = ("same", "differs_turn", "differs_at", "gap", "near_tie", "log_p", "rouge_l", "rouge_l_plain", "correct")
    row: Row = dict.fromkeys(judged)
    if not isinstance(answer, Measured):
        names = ("prompt_tokens", "tokens", "texts", "finish_reasons", "new_tokens", "seconds", "claimed_seconds")
        parts = [f"{part}_seconds" for part in ("draft", "forward", "verify", "commit")]
        counts = ("steps", "passes", "drafted", "accepted", "path_drafted", "rescued", "complaints")
        return row | dict.fromkeys([*names, *parts, *counts]) | {"error": f"{answer.message} — {answer.hint}"}
    counters = counters_of(answer)
    of: dict[str, Any] = dict.fromkeys(("drafted", "accepted", "path_drafted", "rescued"))
    of |= {f"{part}_seconds": None for part in ("draft", "forward", "verify", "commit")}
    if counters is not None:
        of = {name: getattr(counters, name) for name in of}
    return row | {
        "error": None,
        "prompt_tokens": [list(turn.prompt) for turn in answer.turns],
        "tokens": [list(turn.tokens) for turn in answer.turns],
        "texts": [turn.text for turn in answer.turns],
        "finish_reasons": [turn.finish_reason for turn in answer.turns],
        "new_tokens": sum(len(turn.tokens) for turn in answer.turns),
        "seconds": answer.seconds,
        "claimed_seconds": answer.claimed,
        "steps": counters.steps if counters is not None else answer.passes,
        "passes": answer.passes,
        **of,
        "complaints": complaints(answer) if counters is not None else [],
    }


def _steps(key: str, drafter: str, answer: Measured | PromptError | PeerError) -> list[Row]:
    if not isinstance(answer, Measured):
        return []
    return [trace_row(key, number, drafter, step) for number, turn in enumerate(answer.turns) for step in turn.steps]


def store_digest(path: str) -> str:
    """What identifies a datastore's content: the digest of its manifest."""
    return sha256(Path(path) / "manifest.json")
