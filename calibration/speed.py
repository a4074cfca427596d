"""How fast decoding was, against plain decoding that was not measured."""

from __future__ import annotations

from array import array
from collections import deque
from itertools import repeat

import numpy as np

from specds.calibration.explanation import pass_line
from specds.decode.answering import Answer
from specds.decode.engine import Engine

# Forward passes, the latest ones, by which the speed of plain decoding is estimated where there is no cost curve.
_PASSES = 100_000
# Of fewer steps nothing is said: the first ones are slower than those of a long job.
_LEAST_STEPS = 32


class PlainDecoding:
    """What the answers would have taken without drafts, with as many requests in each pass as there were.

    By the engine's cost curve, but never more than what the passes took, which verified drafts, too; without a curve by
    this run's passes, as long as no requests shared any.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._prefills = 0.0
        self._contexts = 0
        # Of each forward pass: how many requests took steps in it, how many tokens came of them, and their seconds.
        self._requests, self._tokens = array("l"), array("l")
        self._seconds = array("d")
        self._steps: deque[tuple[int, float]] = deque(maxlen=_PASSES)

    def saw(self, answer: Answer) -> None:
        """One more answer."""
        for turn in answer.turns:
            first, *later = turn.steps
            self._prefills += first.forward_seconds + first.verify_seconds
            for step in later:
                self._grow(step.forward_pass + 1)
                self._requests[step.forward_pass] += 1
                self._tokens[step.forward_pass] += len(step.tokens)
                self._contexts += step.position * len(step.tokens)
                seconds = step.forward_seconds + step.verify_seconds
                self._seconds[step.forward_pass] += seconds
                self._steps.append((len(step.draft), seconds))

    def seconds(self) -> float | None:
        """All of it; None where nothing can be said, or was to be saved."""
        if self._engine.method.drafter == "none" or len(self._steps) < _LEAST_STEPS:
            return None
        requests, tokens = np.array(self._requests), np.array(self._tokens)
        took, made = np.array(self._seconds), requests > 0
        requests, tokens, took = requests[made], tokens[made], took[made]
        context = self._contexts // int(tokens.sum())
        known = {number: self._engine.plain_seconds(number, context) for number in np.unique(requests).tolist()}
        if None not in known.values():
            each = np.minimum([known[number] or 0.0 for number in requests.tolist()], took / requests)
            return self._prefills + float((tokens * each).sum())
        if requests.max() > 1:
            return None
        drafted, seconds = np.array(self._steps).T
        one, _ = pass_line(np.stack([np.ones_like(drafted), drafted], axis=1), seconds)
        return self._prefills + float(tokens.sum()) * one

    def _grow(self, passes: int) -> None:
        for numbers in (self._requests, self._tokens, self._seconds):
            numbers.extend(repeat(0, passes - len(numbers)))
