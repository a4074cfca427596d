"""Keys and values of all slots as torch tensors: a row for each token, PAGE of them to a page.

The rows of a head stand together, so that attention reads what lies side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from specds.decode.targets.pages import PAGE

# Pages that there is room for at first.
_FEW = 4


class Buffer(NamedTuple):
    """The keys of a layer, or its values, of one token: [heads, head] numbers on a device."""

    heads: int
    head: int
    dtype: torch.dtype
    device: torch.device

    @property
    def size(self) -> int:
        """Bytes."""
        return self.heads * self.head * self.dtype.itemsize


class Pool:
    """Tensors that grow with the pages that are used.

    Args:
        kinds: of each tensor what it holds of a token.
        most: pages, at most.

    Attributes:
        tensors: float[heads, rows + 1, head], one of each kind; the last row is nobody's. Rows that were not written
            to may be no numbers.
    """

    def __init__(self, kinds: Sequence[Buffer], most: int) -> None:
        self._kinds, self._most, self._pages = kinds, most, 0
        self._moves: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
        self.tensors: list[torch.Tensor] = []
        self.reserve(1)

    @property
    def spare(self) -> int:
        """The row that is nobody's."""
        return self._pages * PAGE

    def reserve(self, pages: int) -> bool:
        """Room for so many pages; whether tensors are others now."""
        if pages <= self._pages:
            return False
        room = min(self._most, max(pages, _FEW, self._pages * 3 // 2))
        # One after the other: never two copies of all.
        for number, kind in enumerate(self._kinds):
            larger = torch.empty((kind.heads, room * PAGE + 1, kind.head), dtype=kind.dtype, device=kind.device)
            if self._pages:
                larger[:, : self.spare] = self.tensors[number][:, : self.spare]
                self.tensors[number] = larger
            else:
                self.tensors.append(larger)
        self._pages = room
        return True

    def move(self, sources: NDArray[np.int64], targets: NDArray[np.int64]) -> None:
        """Rows come to stand elsewhere, all at once before the next pass: one call for all requests."""
        self._moves.append((sources, targets))

    @torch.inference_mode()
    def settle(self) -> None:
        """What is to be moved stands where it should."""
        if not self._moves:
            return
        sources, targets = (torch.from_numpy(np.concatenate(side)) for side in zip(*self._moves, strict=True))
        self._moves = []
        for tensor in self.tensors:
            kept = tensor.index_select(1, sources.to(tensor.device))
            tensor.index_copy_(1, targets.to(tensor.device), kept)

    @torch.inference_mode()
    def copy(self, source: int, target: int, count: int) -> bool:
        """The first tokens of a page are those of another; whether tensors are others now."""
        changed = self.reserve(max(source, target) + 1)
        self.settle()
        for tensor in self.tensors:
            tensor[:, target * PAGE : target * PAGE + count] = tensor[:, source * PAGE : source * PAGE + count]
        return changed
