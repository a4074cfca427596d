"""Replay: what drafters would have had accepted of answers that are there already."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from specds.calibration.answers import Recorded
from specds.decode.assembly import Library, drafter_class, prepare
from specds.decode.contracts import Captures, Drafter, Signal, Step, Target, Use
from specds.decode.counters import Counters
from specds.decode.loop import decode_one
from specds.decode.method import AUTO, Method
from specds.decode.pricing.budget import Budget
from specds.decode.pricing.curve import CostCurve
from specds.decode.targets import make_target
from specds.decode.targets.recorded import PER_ANSWER, Reading, RecordedTarget, read
from specds.decode.verifiers import verifier_class
from specds.decode.verifiers.recorded import Recorded as Verifier
from specds.errors import UsageError
from specds.model import LanguageModel
from specds.sampling import Sampling

NONE, ANSWER, STEP = "none", "answer", "step"
"""How often a replay runs the model: never, once an answer, or at every step, as decoding does."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """What a method would have done with one answer.

    Attributes:
        answer: the recorded turn.
        method: by name.
        passes: how often the model ran: `none`, `answer` (once over the whole) or `step`.
        steps: as decoding would have made them; seconds are the replay's own.
        counters: their sums. Drafting seconds are measured, those of the passes are of no meaning.
        seconds: what decoding would take, by the cost curve; None without one.
        plain_seconds: what plain decoding would take.
    """

    answer: Recorded
    method: str
    passes: str
    steps: tuple[Step, ...]
    counters: Counters
    seconds: float | None
    plain_seconds: float | None

    def record(self) -> dict[str, Any]:
        """As JSON; without the seconds of passes, which mean nothing here."""
        counters = self.counters.record()
        for measured in ("seconds", "forward_seconds"):
            del counters[measured]
        return {
            "id": self.answer.id,
            "turn": self.answer.turn,
            "method": self.method,
            "passes": self.passes,
            "counters": counters,
            "predicted_seconds": self.seconds,
            "predicted_plain_seconds": self.plain_seconds,
        }


class Shared:
    """What replays over the same answers have in common: targets, opened indexes, and readings of the answers.

    Args:
        model: the one that answered.
        bytes: how much of the readings is kept; what is not is read again when it is asked for again.
    """

    def __init__(self, model: LanguageModel, runtime: str = "auto", *, bytes: int = 0) -> None:
        self.model = model
        self._runtime = runtime
        self._room = bytes
        self._targets: dict[tuple[str, Captures], Target] = {}
        self.library = Library(model)
        self._readings: dict[tuple[Recorded, Captures, bool], Reading] = {}
        self.warm: set[tuple[str, bool]] = set()
        """Drafters, with a budget that is fixed or not, that have run: what they call is compiled."""

    def target(self, what: str, captures: Captures) -> Target:
        """The model's own, one for each use."""
        if (what, captures) not in self._targets:
            self._targets[what, captures] = make_target(self.model, self._runtime, captures)
        return self._targets[what, captures]

    def reading(self, answer: Recorded, captures: Captures, logits: bool) -> Reading:
        """What the model says to an answer."""
        key = answer, captures, logits
        if key not in self._readings:
            fresh = read(self.target(ANSWER, captures), answer.prompt, answer.tokens, logits=logits)
            if fresh.size > self._room:
                return fresh
            self._room -= fresh.size
            self._readings[key] = fresh
        return self._readings[key]


class Replay:
    """Methods, replayed on one answer after another through the decoding loop itself.

    The target is the record. What a drafter asks of the model is given by one pass over each answer, shared by all
    drafters; a drafter that looks at what the model says to rejected tokens (token recycling, alone or as another's
    fallback) gets the model's own pass at every step, and costs what decoding costs. Where nothing is asked, no
    weights are read.

    A budget that is not fixed learns from answer to answer, as in a run over the same prompts in the same order.

    Args:
        model: the one that answered.
        methods: none with a draft model or a lossy verifier.
        curve: T(n), for predictions and for budgets that are not fixed.
        shared: with other replays.

    Raises:
        UsageError: a method that cannot be replayed, or a budget that needs a cost curve.
        and what opening the methods' stores raises.
    """

    def __init__(
        self,
        model: LanguageModel,
        methods: Sequence[Method],
        *,
        curve: CostCurve | None = None,
        runtime: str = "auto",
        shared: Shared | None = None,
    ) -> None:
        self._curve = curve
        self._shared = shared or Shared(model, runtime)
        self._methods = [_Drafting(method, curve, self._shared) for method in methods]
        reading = [drafting for drafting in self._methods if drafting.passes == ANSWER]
        self._captures = [drafting.captures for drafting in reading]
        self._logits = any(drafting.needs & {Signal.TOPK, Signal.ENTROPY} for drafting in reading)

    @property
    def passes(self) -> dict[str, str]:
        """How often the model will run, by method."""
        return {drafting.method.name: drafting.passes for drafting in self._methods}

    def of(self, answer: Recorded) -> list[Replayed]:
        """What every method would have done, in order."""
        readings: dict[Captures, Reading] = {}
        return [self._one(drafting, answer, readings) for drafting in self._methods]

    def _one(self, drafting: _Drafting, answer: Recorded, readings: dict[Captures, Reading]) -> Replayed:
        steps = tuple(
            decode_one(
                self._target(drafting, answer, readings),
                drafting.make(),
                Verifier(answer.text),
                answer.prompt,
                max_new_tokens=answer.most if answer.stopped else len(answer.tokens),
                budget=drafting.budget,
                stop_tokens={answer.tokens[-1]} if answer.stopped else (),
            )
        )
        counters = Counters.of(steps)
        seconds = plain = None
        if self._curve is not None:
            plain = _plain_seconds(self._curve, answer)
            seconds = _seconds(self._curve, answer, steps)
        return Replayed(answer, drafting.method.name, drafting.passes, steps, counters, seconds, plain)

    def _target(self, drafting: _Drafting, answer: Recorded, readings: dict[Captures, Reading]) -> Target:
        if drafting.passes == NONE:
            return RecordedTarget(answer.text, len(answer.prompt))
        if drafting.passes == STEP:
            return self._shared.target(STEP, drafting.captures)
        captures = self._union(drafting.captures)
        if captures not in readings:
            readings[captures] = self._shared.reading(answer, captures, self._logits)
        return RecordedTarget(answer.text, len(answer.prompt), readings[captures])

    def _union(self, wanted: Captures) -> Captures:
        """What one pass over an answer hands over: all that anybody asks for, except for the states of two layers."""
        layer = wanted.layer or max(captures.layer for captures in self._captures)
        hidden, top = (any(asked) for asked in zip(*((each.hidden, each.top) for each in self._captures), strict=True))
        return Captures(hidden, layer, top)


class _Drafting:
    """A method made ready for replays."""

    def __init__(self, method: Method, curve: CostCurve | None, shared: Shared) -> None:
        self.method = method
        kind = drafter_class(method.drafter)
        if kind.draft_model is Use.ALWAYS or method.draft_model is not None:
            raise UsageError(
                f"{method.name} drafts with a model, and replaying that is as long as decoding",
                "measure it with decode",
            )
        if method.verifier != AUTO and not verifier_class(method.verifier, Sampling()).lossless:
            raise UsageError(
                f"{method.name} has a lossy verifier: with it the answers would be others", "decode with it instead"
            )
        if method.stores and not kind.indexes:
            raise UsageError(f"drafter {method.drafter} looks nothing up", f"write {method.drafter} without a store")
        prepared = prepare(method, shared.model, shared.library)
        if method.budget is None and curve is None and kind.drafts:
            raise UsageError(
                f"{method.name} is to draft as much as pays for itself, and no cost curve is given",
                "`specds profile --json > C.json` and --cost C.json, or --budget 16",
            )
        self._assembly = prepared.assemble(curve)
        self.needs, self.captures = prepared.needs, prepared.captures
        self.passes = NONE if not self.needs else ANSWER if self.needs <= PER_ANSWER else STEP
        ran = method.drafter, method.budget is not None
        if ran not in shared.warm:
            shared.warm.add(ran)
            self._assembly.warm_up()

    @property
    def budget(self) -> Budget:
        return self._assembly.budget

    def make(self) -> Drafter:
        return self._assembly.make_drafter()


def replay(
    model: LanguageModel,
    methods: Sequence[Method],
    answers: Sequence[Recorded],
    *,
    curve: CostCurve | None = None,
    runtime: str = "auto",
) -> Iterator[Replayed]:
    """Every method on every answer, answer by answer. See `Replay`."""
    prepared = Replay(model, methods, curve=curve, runtime=runtime)
    for answer in answers:
        yield from prepared.of(answer)


@dataclass(frozen=True, slots=True)
class Summary:
    """What a method would have done with some answers.

    Attributes:
        method: by name.
        passes: as in `Replayed`.
        answers: how many.
        counters: sums over them.
        seconds, plain_seconds: predicted; None without a cost curve.
    """

    method: str
    passes: str
    answers: int
    counters: Counters
    seconds: float | None
    plain_seconds: float | None

    @property
    def speedup(self) -> float | None:
        """Predicted time of plain decoding over the method's."""
        return self.plain_seconds / self.seconds if self.seconds and self.plain_seconds else None

    @property
    def tokens_per_second(self) -> float | None:
        """Predicted."""
        return self.counters.tokens / self.seconds if self.seconds else None

    def row(self) -> dict[str, Any]:
        """As JSON."""
        counters, drafted = self.counters, max(1, self.counters.steps - self.answers)
        return {
            "method": self.method,
            "answers": self.answers,
            "tokens": counters.tokens,
            "steps": counters.steps,
            "mat": round(counters.mat, 4),
            "drafted": counters.drafted,
            "accepted": counters.accepted,
            "acceptance": round(counters.acceptance, 4),
            "node_acceptance": round(counters.node_acceptance, 4),
            "draft_ms_a_step": round(1e3 * counters.draft_seconds / drafted, 4),
            "passes": self.passes,
            "seconds": self.seconds,
            "plain_seconds": self.plain_seconds,
            "tokens_per_second": self.tokens_per_second,
            "speedup": self.speedup,
        }


def summarise(rows: Sequence[Replayed]) -> list[Summary]:
    """One summary a method, in the order of their first rows."""
    summaries = []
    for method in dict.fromkeys(row.method for row in rows):
        replayed = [row for row in rows if row.method == method]
        known = replayed[0].seconds is not None
        summaries.append(
            Summary(
                method,
                replayed[0].passes,
                len(replayed),
                sum((row.counters for row in replayed), Counters()),
                sum(row.seconds or 0.0 for row in replayed) if known else None,
                sum(row.plain_seconds or 0.0 for row in replayed) if known else None,
            )
        )
    return summaries


def _plain_seconds(curve: CostCurve, answer: Recorded) -> float:
    contexts = len(answer.prompt) + np.arange(len(answer.tokens) - 1)
    return _prompt_seconds(curve, len(answer.prompt)) + float(curve.predict(np.ones_like(contexts), contexts).sum())


def _seconds(curve: CostCurve, answer: Recorded, steps: Sequence[Step]) -> float:
    """The passes by the curve; drafting as it was measured."""
    rows = np.array([len(step.draft) + 1 for step in steps[1:]], np.int64)
    contexts = np.array([step.position - 1 for step in steps[1:]], np.int64)
    drafting = sum(step.draft_seconds for step in steps)
    return _prompt_seconds(curve, len(answer.prompt)) + float(curve.predict(rows, contexts).sum()) + drafting


def _prompt_seconds(curve: CostCurve, tokens: int) -> float:
    """A prompt's passes, as many rows at once as were measured; a little too much, as it shows no rows but the last."""
    most = curve.rows[-1]
    starts = np.arange(0, tokens, most)
    return float(curve.predict(np.minimum(most, tokens - starts), starts).sum())
