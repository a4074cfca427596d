"""What a target's cache holds: the committed tokens, and what is kept of each for drafters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specds.decode.contracts import TOP, Taps
from specds.decode.draft import Draft, common_prefix

# Numbers in the logits of one pass over a prompt, where all its rows are asked for: 64 MiB in float32.
_MOST_LOGITS = 1 << 24


class Held:
    """The committed tokens whose keys and values are in the cache, and the tapped states and likeliest tokens of each.

    Every change is whole: whatever interrupts a pass, what is said to be held is.

    Args:
        taps: what is kept.
        width: d, the model's hidden size.
        vocabulary: how many tokens the model has.
    """

    def __init__(self, taps: Taps, width: int, vocabulary: int) -> None:
        self.tokens: list[int] = []
        self._taps = taps
        self._vocabulary = vocabulary
        self._pending: list[int] = []
        self._states = np.empty((0, width), np.float32)
        self._top = np.empty((0, TOP), np.int32)
        self._seen: tuple[NDArray[np.float32] | None, NDArray[np.int32] | None] = (None, None)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def states(self) -> NDArray[np.float32] | None:
        """float32[length, d]: the tapped states of all that is held; None unless tapped."""
        return self._states[: len(self)] if self._taps.layer else None

    @property
    def top(self) -> NDArray[np.int32] | None:
        """int32[length, TOP]: the likeliest tokens after each that is held; None unless asked for."""
        return self._top[: len(self)] if self._taps.top else None

    def chunk(self, rows: int) -> int:
        """Rows of one pass over a prompt: `rows`, or fewer where their logits, which are asked for, would be large."""
        return max(1, min(rows, _MOST_LOGITS // self._vocabulary)) if self._taps.top else rows

    def begin(self, prompt: Sequence[int]) -> int:
        """A new request: keep what the prompt begins with, all but its last token at most; how long that is."""
        same = common_prefix(self.tokens, prompt[:-1])
        self.tokens = list(prompt[:same])
        return same

    def extend(
        self, tokens: Sequence[int], states: NDArray[np.float32] | None = None, top: NDArray[np.int32] | None = None
    ) -> None:
        """Tokens that a pass has put into the cache, with what is kept of them."""
        start, end = len(self), len(self) + len(tokens)
        if states is not None:
            self._states = _with_room(self._states, start, end)
            self._states[start:end] = states
        if top is not None:
            self._top = _with_room(self._top, start, end)
            self._top[start:end] = top
        self.tokens += tokens

    def pend(self, last: int, draft: Draft) -> list[int]:
        """Tokens of a pass over a draft, none of them held yet; what was pending is forgotten."""
        self._pending = [last, *draft.tokens.tolist()]
        return self._pending

    def saw(self, states: NDArray[np.float32] | None, top: NDArray[np.int32] | None) -> None:
        """What the pass over the pending tokens gave: [n + 1, …] rows of states and likeliest tokens."""
        self._seen = states, top

    def commit(self, path: Sequence[int]) -> list[int]:
        """Hold the last token and the accepted path; the rows of the pass that these are."""
        rows = [0, *(node + 1 for node in path)]
        states, top = self._seen
        self.extend(
            [self._pending[row] for row in rows],
            None if states is None else states[rows],
            None if top is None else top[rows],
        )
        return rows


def _with_room(kept: NDArray[Any], used: int, length: int) -> NDArray[Any]:
    """The same rows with room for so many; it grows by half."""
    if length <= len(kept):
        return kept
    larger = np.empty((max(length, 256, len(kept) * 3 // 2), kept.shape[1]), kept.dtype)
    larger[:used] = kept[:used]
    return larger
