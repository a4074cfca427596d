"""The key-value cache as transformers sees it: any requests' rows go where their slots are, and are read from there."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

from specds.decode.targets.pool import Buffer, Pool

Rows = torch.Tensor | slice
"""Rows of the pool, in order; a slice where they stand side by side."""


@dataclass(frozen=True, slots=True)
class Call:
    """What one call of the network puts into the pool and reads there.

    Attributes:
        writes: where keys and values go.
        reads: the rows that all lines look at, line by line, each as many.
        lines: requests.
        held: tokens that came before; of several lines those of the longest.
        cells: int64[k], which cells of the call hold what is written; None: all.
    """

    writes: Rows
    reads: Rows
    lines: int
    held: int
    cells: torch.Tensor | None = None


_NOTHING = Call(slice(0), slice(0), 1, 0)


@dataclass(slots=True)
class _Current:
    call: Call = field(default=_NOTHING)


class _Layer(CacheLayerMixin):  # type: ignore[misc]  # transformers is untyped here
    """One layer's keys and values.

    Sliding-window layers keep everything too: the mask, not the cache, decides what a token sees, so that
    rejected branches can be forgotten.
    """

    is_sliding = False

    def __init__(self, pool: Pool, place: int, current: _Current) -> None:
        super().__init__()
        self._pool, self._place, self._current = pool, place, current
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """The pool is there already."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self._pool.tensors[self._place : self._place + 2]
        return _passed(keys, key_states, self._current.call), _passed(values, value_states, self._current.call)

    def get_seq_length(self) -> int:
        return self._current.call.held

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._current.call.held + query_length, 0

    def get_max_length(self) -> int:
        return -1


class SlotCache(Cache):  # type: ignore[misc]
    """The pool of all slots in the place of transformers' own cache.

    Attributes:
        call: to be set before each call of the network.
    """

    def __init__(self, layers: int, pool: Pool) -> None:
        self._current = _Current()
        super().__init__(layers=[_Layer(pool, 2 * layer, self._current) for layer in range(layers)])

    @property
    def call(self) -> Call:
        return self._current.call

    @call.setter
    def call(self, call: Call) -> None:
        self._current.call = call


@torch.inference_mode()
def buffers(network: Any) -> list[Buffer]:
    """What a network keeps of a token: of each layer its keys and its values; of a layer that keeps nothing, nothing.

    A token is passed through it, because configurations say it in too many ways.
    """
    cache = DynamicCache()
    network(
        input_ids=torch.zeros((1, 1), dtype=torch.long, device=network.device),
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    )
    found = []
    for layer in range(network.config.get_text_config().num_hidden_layers):
        known = cache.layers[layer] if layer < len(cache.layers) else None
        for states in (known.keys, known.values) if known is not None and known.is_initialized else (None, None):
            if states is None:
                found.append(Buffer(0, 0, network.dtype, network.device))
            else:
                found.append(Buffer(states.shape[1], states.shape[3], states.dtype, states.device))
    return found


def _passed(tensor: torch.Tensor, states: torch.Tensor, call: Call) -> torch.Tensor:
    """Write states [lines, heads, n, head] into [heads, rows, head]; what is looked at, [lines, heads, span, head]."""
    rows = states.transpose(0, 1).flatten(1, 2)
    if call.cells is not None:
        rows = rows.index_select(1, call.cells.to(rows.device))
    if isinstance(call.writes, slice):
        tensor[:, call.writes] = rows
    else:
        tensor.index_copy_(1, call.writes.to(tensor.device), rows)
    if isinstance(call.reads, slice):
        found = tensor[:, call.reads]
    else:
        found = tensor.index_select(1, call.reads.to(tensor.device))
    return found.view(len(found), call.lines, -1, found.shape[2]).transpose(0, 1)
