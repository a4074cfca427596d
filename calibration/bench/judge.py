"""Judging what was measured: is it the same text, does the method's own account add up, is the run valid?"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from specds.calibration.bench.quality import correct, rouge_l
from specds.calibration.bench.results import Row
from specds.model import LanguageModel
from specds.reference import LogProbabilities, logit_gap
from specds.sampling import Sampling

PLAIN = "none"

# Logits of two runtimes differ by less than this.
NEAR_TIE = {"float32": 1e-3, "float16": 0.1, "bfloat16": 0.5}

# Wall time that a contender's own account may leave out, or have too much of: a share of it, and seconds besides.
_SHARE = 0.03
_SECONDS = 0.05

_MOST_COMPLAINTS = 5

Problem = dict[str, Any]


def differs(plain: Sequence[Sequence[int]], other: Sequence[Sequence[int]]) -> tuple[int, int] | None:
    """The first (turn, token) at which two answers differ; None where they do not."""
    for turn, (expected, given) in enumerate(zip(plain, other, strict=True)):
        if list(expected) != list(given):
            pairs = zip([*expected, -1], [*given, -1], strict=False)
            return turn, next(place for place, (a, b) in enumerate(pairs) if a != b)
    return None


def compare_texts(rows: Sequence[Row], model: LanguageModel, sampling: Sampling, near_tie: float) -> None:
    """Fill in `same`, `differs_turn`, `differs_at`, `gap` and `near_tie` of every answer.

    The gap is measured by transformers' own pass over plain decoding's text up to there: by how many logits the worse
    of the two tokens is below the model's pick. It is missing where one of the texts had ended.
    """
    plain = {row["prompt"]: row for row in reversed(rows) if row["method"] == PLAIN and not row["error"]}
    known: dict[tuple[Any, ...], float | None] = {}
    for row in rows:
        base = plain.get(row["prompt"])
        if row["error"] or base is None:
            continue
        place = differs(base["tokens"], row["tokens"])
        row |= {"same": place is None, "differs_turn": None, "differs_at": None, "gap": None, "near_tie": None}
        if place is None:
            continue
        turn, at = place
        expected, given = base["tokens"][turn], row["tokens"][turn]
        gap = None
        if at < min(len(expected), len(given)):
            key = (row["prompt"], turn, at, expected[at], given[at])
            if key not in known:
                prompt = base["prompt_tokens"][turn]
                known[key] = logit_gap(model, [*prompt, *expected[:at]], (expected[at], given[at]), sampling, prompt)
            gap = known[key]
        row |= {"differs_turn": turn, "differs_at": at, "near_tie": gap is not None and gap <= near_tie}
        row["gap"] = gap if gap is not None and math.isfinite(gap) else None


def rate_texts(
    rows: Sequence[Row],
    references: dict[str, str],
    model: LanguageModel,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Fill in `log_p`, `rouge_l`, `rouge_l_plain` and `correct` of every answer, where anything measured is lossy.

    `log_p` sums over all turns (nats, raw logits); references are the first turns'.
    """
    good = [row for row in rows if not row["error"]]
    if all(row["lossless"] for row in good):
        return
    judge = LogProbabilities(model)
    known: dict[tuple[Any, ...], float] = {}
    plain = {row["prompt"]: row for row in reversed(good) if row["method"] == PLAIN}
    for number, row in enumerate(sorted(good, key=lambda row: row["prompt"])):
        total = 0.0
        for prompt, tokens in zip(row["prompt_tokens"], row["tokens"], strict=True):
            key = (*prompt, -1, *tokens)
            if key not in known:
                known[key] = judge.of(prompt, tokens)
            total += known[key]
        row["log_p"] = total
        base, reference = plain.get(row["prompt"]), references.get(row["prompt"])
        if base is not None:
            row["rouge_l_plain"] = rouge_l("\n".join(row["texts"]), "\n".join(base["texts"]))
        if reference is not None:
            row["rouge_l"] = rouge_l(row["texts"][0], reference)
            row["correct"] = correct(row["texts"][0], reference)
        progress(number + 1, len(good))


def problems_of(rows: Sequence[Row]) -> list[Problem]:
    """What makes a run invalid, a line each: `kind`, `method`, `prompt` (or None) and `text`.

    Kinds: `failed`, an answer that is missing; `text`, one that should be plain decoding's, and differs where no
    near-tie excuses it; `steps`, one whose steps contradict its text or the passes counted from outside; `time`, a
    contender whose own account is not the time that its answers took.
    """
    problems: list[Problem] = []

    def say(kind: str, row: Row, text: str, prompt: bool = True) -> None:
        problems.append(
            {"kind": kind, "method": row["method"], "prompt": row["prompt"] if prompt else None, "text": text}
        )

    for row in rows:
        if row["error"]:
            say("failed", row, row["error"])
            continue
        if row["lossless"] and row["same"] is False and not row["near_tie"]:
            gap = "where one text ends" if row["gap"] is None else f"{row['gap']:.4f} logits below the model's pick"
            say("text", row, f"token {row['differs_at']} of turn {row['differs_turn']} is not plain decoding's, {gap}")
        for complaint in row["complaints"][:_MOST_COMPLAINTS]:
            say("steps", row, complaint)
    for method in dict.fromkeys(row["method"] for row in rows):
        timed = [row for row in rows if row["method"] == method and row["claimed_seconds"] is not None]
        seconds, claimed = sum(row["seconds"] for row in timed), sum(row["claimed_seconds"] for row in timed)
        if abs(seconds - claimed) > max(_SECONDS, _SHARE * seconds):
            text = f"accounts for {claimed:.3f} s, and its answers took {seconds:.3f} s"
            say("time", timed[0], text, prompt=False)
    return problems
