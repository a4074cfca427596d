"""What a target's cache holds: the committed tokens, and what is kept of each for drafters."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from specds.decode.arrays import with_room
from specds.decode.contracts import TOP, Activations, Captures
from specds.decode.draft import Draft, common_prefix
from specds.decode.top import top_ids

# Numbers in the logits of one pass over a prompt, where all its rows are asked for: 64 MiB in float32.
_MOST_LOGITS = 1 << 24


class Held:
    """The committed tokens whose keys and values are cached, and the captured states and likeliest tokens of each.

    Every change is whole: whatever interrupts a pass, what is said to be held is.

    Args:
        captures: what is kept.
        width: d, the model's hidden size.
        vocabulary: how many tokens the model has.
    """

    def __init__(self, captures: Captures, width: int, vocabulary: int) -> None:
        self.tokens: list[int] = []
        self._captures = captures
        self._vocabulary = vocabulary
        self._staged: list[int] = []
        self._states = np.empty((0, width), np.float32)
        self._top = np.empty((0, TOP), np.int32)
        self._recorded: tuple[torch.Tensor, NDArray[np.float32] | None] = (torch.empty(0), None)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def activations(self) -> Activations:
        """What is kept of all that is held."""
        return Activations(
            self._states[: len(self)] if self._captures.layer else None,
            self._top[: len(self)] if self._captures.top else None,
        )

    def chunk(self, rows: int) -> int:
        """Rows of one pass over a prompt: `rows`, or fewer where their logits, which are asked for, would be large."""
        return max(1, min(rows, _MOST_LOGITS // self._vocabulary)) if self._captures.top else rows

    def begin(self, prompt: Sequence[int]) -> int:
        """A new request: keep what the prompt begins with, all but its last token at most; how long that is."""
        same = common_prefix(self.tokens, prompt[:-1])
        self.tokens = list(prompt[:same])
        return same

    def extend(self, tokens: Sequence[int], logits: torch.Tensor, states: NDArray[np.float32] | None) -> None:
        """Tokens that a pass has put into the cache, with their rows of logits and captured states, where captured."""
        self._extend(tokens, logits, range(len(tokens)), states)

    def _extend(
        self, tokens: Sequence[int], logits: torch.Tensor, rows: Sequence[int], states: NDArray[np.float32] | None
    ) -> None:
        start, end = len(self), len(self) + len(tokens)
        if states is not None:
            self._states = with_room(self._states, start, end)
            self._states[start:end] = states
        if self._captures.top:
            self._top = with_room(self._top, start, end)
            self._top[start:end] = top_ids(logits, TOP, rows)
        self.tokens += tokens

    def stage(self, last: int, draft: Draft) -> list[int]:
        """Tokens of a pass over a draft, none of them held yet; what was pending is forgotten."""
        self._staged = [last, *draft.tokens.tolist()]
        return self._staged

    def record(self, logits: torch.Tensor, states: NDArray[np.float32] | None) -> None:
        """What the pass over the pending tokens gave: n + 1 rows of logits and of captured states."""
        self._recorded = logits, states

    def commit(self, path: Sequence[int]) -> list[int]:
        """Hold the last token and the accepted path; the rows of the pass that these are."""
        rows = [0, *(node + 1 for node in path)]
        logits, states = self._recorded
        self._extend([self._staged[row] for row in rows], logits, rows, None if states is None else states[rows])
        return rows
