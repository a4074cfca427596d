"""What is kept for drafters of the tokens in a key-value cache: captured states, and the likeliest next tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from specds.decode.arrays import with_room
from specds.decode.contracts import TOP, Activations, Captures, Forward, Item
from specds.decode.targets.pages import PAGE, PagedSlot, paged
from specds.decode.top import top_ids

# Numbers in the logits of one pass over a prompt, where all its rows are asked for: 64 MiB in float32.
_MOST_LOGITS = 1 << 24


def most_wanted(rows: int, vocabulary: int, captures: Captures) -> int:
    """Rows of one pass over a prompt: `rows`, or fewer where their logits, which are asked for, would be large."""
    return max(1, min(rows, _MOST_LOGITS // vocabulary)) if captures.top else rows


class Held:
    """Captured states and likeliest tokens, page by page as the key-value cache is.

    Args:
        captures: what is kept.
        width: d, the model's hidden size.
    """

    def __init__(self, captures: Captures, width: int) -> None:
        self._captures = captures
        self._states = np.empty((0, width), np.float32)
        self._top = np.empty((0, TOP), np.int32)
        # Of the last pass, by slot: captured states of its tokens, and their likeliest tokens.
        self._recorded: dict[int, tuple[NDArray[np.float32] | None, NDArray[np.int32] | None]] = {}

    def activations(self, slot: PagedSlot, start: int) -> Activations:
        """See `Target.activations`."""
        if not self._captures.layer and not self._captures.top:
            return Activations()
        places = slot.places(start, len(slot))
        return Activations(
            self._states[places] if self._captures.layer else None, self._top[places] if self._captures.top else None
        )

    def wanted(self, items: Sequence[Item]) -> Sequence[Item]:
        """What a pass is to give: where the likeliest tokens are kept, the logits of all tokens of each item."""
        if not self._captures.top:
            return items
        return [replace(item, wanted=len(item.tokens)) for item in items]

    def record(self, items: Sequence[Item], result: Forward, states: NDArray[np.float32] | None) -> None:
        """What a pass gave: float32[n, d], the captured states of all its tokens.

        Where the likeliest tokens are kept, the logits of all tokens are wanted.
        """
        self._recorded = {}
        at = 0
        for number, item in enumerate(items):
            end = at + len(item.tokens)
            slot = paged(item.slot)
            slot.staged = item.tokens
            if self._captures.layer or self._captures.top:
                top = top_ids(result.of(number).logits, TOP) if self._captures.top else None
                self._recorded[slot.number] = (None if states is None else states[at:end]), top
            at = end

    def commit(self, slot: PagedSlot, rows: Sequence[int]) -> None:
        """Keep what was recorded of rows that come to stand behind what the slot holds."""
        if slot.number not in self._recorded:
            return
        states, top = self._recorded[slot.number]
        places = slot.places(len(slot), len(slot) + len(rows))
        room = (max(slot.pages) + 1) * PAGE
        kept = list(rows)
        if states is not None:
            self._states = with_room(self._states, len(self._states), room)
            self._states[places] = states[kept]
        if top is not None:
            self._top = with_room(self._top, len(self._top), room)
            self._top[places] = top[kept]

    def copy(self, source: int, target: int, count: int) -> None:
        """The first tokens of a page are those of another."""
        begin, to, room = source * PAGE, target * PAGE, (max(source, target) + 1) * PAGE
        if self._captures.layer:
            self._states = with_room(self._states, len(self._states), room)
            self._states[to : to + count] = self._states[begin : begin + count]
        if self._captures.top:
            self._top = with_room(self._top, len(self._top), room)
            self._top[to : to + count] = self._top[begin : begin + count]
