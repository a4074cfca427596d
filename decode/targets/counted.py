"""A target that counts its passes: what a trace says is compared with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from specds.decode.contracts import Activations, Forward, Item, Slot, Target

if TYPE_CHECKING:
    import torch


class Counted:
    """Another target, each of whose passes is counted, whoever asks for it.

    Attributes:
        chunk, capacity: the other's.
        passes: forward passes since it was last set to 0; those that read a prompt without its end are part of the one
            that does.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self.chunk, self.capacity = target.chunk, target.capacity
        self.passes = 0

    def open(self, prompt: Sequence[int], length: int) -> Slot | None:
        """See `Target.open`."""
        return self._target.open(prompt, length)

    def close(self, slot: Slot, *, keep: bool = True) -> None:
        """See `Target.close`."""
        self._target.close(slot, keep=keep)

    def forget(self) -> None:
        """See `Target.forget`."""
        self._target.forget()

    def forward(self, items: Sequence[Item]) -> Forward:
        """See `Target.forward`."""
        self.passes += any(item.wanted for item in items)
        return self._target.forward(items)

    def commit(self, slot: Slot, rows: Sequence[int]) -> None:
        """See `Target.commit`."""
        self._target.commit(slot, rows)

    def layer_skip(self, slot: Slot, token: int, ahead: int, skip: frozenset[int]) -> torch.Tensor:
        """See `Target.layer_skip`. It is drafting, not a pass."""
        return self._target.layer_skip(slot, token, ahead, skip)

    def activations(self, slot: Slot, start: int = 0) -> Activations:
        """See `Target.activations`."""
        return self._target.activations(slot, start)

    def embed(self, tokens: NDArray[np.integer]) -> NDArray[np.float32]:
        """See `Target.embed`."""
        return self._target.embed(tokens)
