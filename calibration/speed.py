"""How fast decoding was, against plain decoding that was not measured."""

from __future__ import annotations

from collections import deque

import numpy as np

from specds.calibration.explanation import pass_line
from specds.decode.answering import Answer
from specds.decode.engine import Engine

# Forward passes, the latest ones, by which the speed of plain decoding is estimated where there is no cost curve.
_PASSES = 100_000
# Of fewer passes nothing is said: the first ones are slower than those of a long job.
_LEAST_PASSES = 32


class PlainDecoding:
    """What the answers would have taken without drafts: by the engine's cost curve, else by this run's passes."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._by_curve = self._prefills = 0.0
        self._tokens = 0
        self._passes: deque[tuple[int, float]] = deque(maxlen=_PASSES)

    def saw(self, answer: Answer) -> None:
        """One more answer."""
        self._by_curve += self._engine.plain_seconds(answer) or 0.0
        for turn in answer.turns:
            first, *later = turn.steps
            self._prefills += first.forward_seconds + first.verify_seconds
            self._tokens += sum(len(step.tokens) for step in later)
            self._passes += [(len(step.draft), step.forward_seconds + step.verify_seconds) for step in later]

    def seconds(self) -> float | None:
        """All of it; None where nothing can be said, or was to be saved."""
        if self._engine.method.drafter == "none" or len(self._passes) < _LEAST_PASSES:
            return None
        if self._by_curve:
            return self._by_curve
        rows, took = np.array(self._passes).T
        return self._prefills + self._tokens * pass_line(np.stack([np.ones_like(rows), rows], axis=1), took)[0]
