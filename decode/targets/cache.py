"""A key-value cache that is written past its end and cut back to the accepted path."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

_GRAIN = 256


class _Layer(CacheLayerMixin):  # type: ignore[misc]  # transformers is untyped here
    """Keys and values of one layer in buffers that grow geometrically; only the first `length` entries count.

    Sliding-window layers keep everything too: the mask, not the cache, decides what a token sees, so that
    rejected branches can be forgotten.
    """

    is_sliding = False

    def __init__(self) -> None:
        super().__init__()
        self.length = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys = key_states.new_empty((*key_states.shape[:2], 0, key_states.shape[3]))
        self.values = value_states.new_empty((*value_states.shape[:2], 0, value_states.shape[3]))
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        end = self.length + key_states.shape[2]
        if end > self.keys.shape[2]:
            room = max(end + _GRAIN, self.keys.shape[2] * 3 // 2)
            self.keys = _grown(self.keys, self.length, room)
            self.values = _grown(self.values, self.length, room)
        self.keys[:, :, self.length : end] = key_states
        self.values[:, :, self.length : end] = value_states
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def keep(self, start: int, rows: Sequence[int]) -> None:
        """Move the entries at `start + row` to `start`, `start + 1`, …; forget everything behind them."""
        if list(rows) != list(range(len(rows))):
            source = torch.tensor([start + row for row in rows], device=self.keys.device)
            for buffer in (self.keys, self.values):
                buffer[:, :, start : start + len(rows)] = buffer[:, :, source]
        self.length = start + len(rows)

    def get_seq_length(self) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self.length = 0


class TreeCache(Cache):  # type: ignore[misc]
    """The cache of one request: what transformers needs of a cache, and compaction to an accepted path."""

    def __init__(self, layers: int) -> None:
        super().__init__(layers=[_Layer() for _ in range(layers)])

    @property
    def length(self) -> int:
        """How many entries are held."""
        return int(self.layers[0].length)

    @torch.inference_mode()
    def keep(self, start: int, rows: Sequence[int]) -> None:
        """Of the entries from `start` on keep those at `start + row`, in order, and forget the others."""
        for layer in self.layers:
            layer.keep(start, rows)

    def clear(self) -> None:
        """Forget everything; the buffers stay for the next request."""
        for layer in self.layers:
            layer.length = 0


def _grown(buffer: torch.Tensor, length: int, room: int) -> torch.Tensor:
    larger = buffer.new_empty((*buffer.shape[:2], room, buffer.shape[3]))
    larger[:, :, :length] = buffer[:, :, :length]
    return larger
