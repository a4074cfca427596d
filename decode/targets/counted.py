"""A target that counts its passes: what a trace says is compared with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from specds.decode.contracts import Activations, Forward, Target
from specds.decode.draft import Draft

if TYPE_CHECKING:
    import torch


class Counted:
    """Another target, each of whose passes is counted, whoever asks for it.

    Attributes:
        passes: prefills and forward passes since it was last set to 0.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self.passes = 0

    def prefill(self, tokens: Sequence[int]) -> Forward:
        """See `Target.prefill`. A prompt's passes together are one."""
        self.passes += 1
        return self._target.prefill(tokens)

    def forward(self, last: int, draft: Draft) -> Forward:
        """See `Target.forward`."""
        self.passes += 1
        return self._target.forward(last, draft)

    def commit(self, path: Sequence[int]) -> None:
        """See `Target.commit`."""
        self._target.commit(path)

    def layer_skip(self, token: int, ahead: int, skip: frozenset[int]) -> torch.Tensor:
        """See `Target.layer_skip`. It is drafting, not a pass."""
        return self._target.layer_skip(token, ahead, skip)

    def activations(self) -> Activations:
        """See `Target.activations`."""
        return self._target.activations()

    def embed(self, tokens: NDArray[np.integer]) -> NDArray[np.float32]:
        """See `Target.embed`."""
        return self._target.embed(tokens)
