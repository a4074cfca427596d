"""How fast decoding was, against plain decoding that was not measured."""

from __future__ import annotations

from collections import Counter, deque
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

    By the engine's cost curve; without one by this run's passes, as long as no requests shared any.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._prefills = 0.0
        self._contexts = 0
        # Of each forward pass: how many requests took steps in it, and how many tokens came of them.
        self._requests: list[int] = []
        self._tokens: list[int] = []
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
                self._steps.append((len(step.draft), step.forward_seconds + step.verify_seconds))

    def seconds(self) -> float | None:
        """All of it; None where nothing can be said, or was to be saved."""
        if self._engine.method.drafter == "none" or len(self._steps) < _LEAST_STEPS:
            return None
        tokens: Counter[int] = Counter()
        for requests, count in zip(self._requests, self._tokens, strict=True):
            tokens[requests] += count
        context = self._contexts // tokens.total()
        del tokens[0]
        each = {requests: self._engine.plain_seconds(requests, context) for requests in tokens}
        known = {requests: seconds for requests, seconds in each.items() if seconds is not None}
        if len(known) == len(tokens):
            return self._prefills + sum(count * known[requests] for requests, count in tokens.items())
        if max(tokens) > 1:
            return None
        rows, took = np.array(self._steps).T
        return self._prefills + tokens[1] * pass_line(np.stack([np.ones_like(rows), rows], axis=1), took)[0]

    def _grow(self, passes: int) -> None:
        for numbers in (self._requests, self._tokens):
            numbers.extend(repeat(0, passes - len(numbers)))
