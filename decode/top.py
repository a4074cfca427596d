"""What rows of logits say: their likeliest tokens, and how sure they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numba import float32
from numpy.typing import NDArray

from specds.decode.targets.elementwise import exponential
from specds.decode.targets.microkernel import LANES, address, largest
from specds.jit import compiled, compiled_loosely


def rows_of(values: torch.Tensor, rows: Sequence[int]) -> NDArray[np.float32]:
    """float32[m, d]: some rows of a float[n, d] tensor on any device."""
    if values.device.type == "cpu" and values.dtype == torch.float32:
        found: NDArray[np.float32] = values.numpy()[rows]
        return found
    return values[list(rows)].float().cpu().numpy()


def top_ids(logits: torch.Tensor, count: int, rows: Sequence[int] | None = None) -> NDArray[np.int32]:
    """int32[m, count]: ids of the largest logits of each row, largest first; of equals the smaller id.

    Rows of fewer than `count` entries are filled up with -1.

    Args:
        logits: float[n, vocabulary], on any device.
        rows: m of its rows; None: all.
    """
    found = np.full((len(logits) if rows is None else len(rows), count), -1, np.int32)
    if logits.device.type == "cpu" and logits.dtype == torch.float32:
        places = np.arange(len(logits)) if rows is None else np.asarray(rows, np.int64)
        _top(_side_by_side(logits), places, found, np.empty(found.shape, np.float32))
    else:
        width = min(count, logits.shape[-1])
        wanted = logits if rows is None else logits[list(rows)]
        found[:, :width] = torch.topk(wanted, width, dim=-1).indices.cpu().numpy()
    return found


def top_gaps(logits: torch.Tensor, count: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """The ids of `top_ids` for all rows, and by how much each one's logit is below its row's largest.

    Returns:
        int32[n, count], -1 behind the last, and float32[n, count], infinite there.
    """
    found = np.full((len(logits), count), -1, np.int32)
    values = np.full(found.shape, -np.inf, np.float32)
    if logits.device.type == "cpu" and logits.dtype == torch.float32:
        _top(_side_by_side(logits), np.arange(len(logits)), found, values)
    else:
        width = min(count, logits.shape[-1])
        top = torch.topk(logits, width, dim=-1)
        found[:, :width], values[:, :width] = top.indices.cpu().numpy(), top.values.float().cpu().numpy()
    return found, values[:, :1] - values


def entropies(logits: torch.Tensor, rows: Sequence[int]) -> NDArray[np.float32]:
    """float32[m]: the entropies of some rows' distributions, in nats.

    Args:
        logits: float[n, vocabulary], on any device.
        rows: m of its rows.
    """
    if logits.device.type == "cpu" and logits.dtype == torch.float32:
        found = np.empty(len(rows), np.float32)
        # Not by torch: its threads would wake up, and spin for a while beside the target's next pass.
        _entropies(_side_by_side(logits), np.array(rows), found)
        return found
    logs = torch.log_softmax(logits[list(rows)].float(), dim=-1)
    # A token that cannot be drawn adds nothing.
    entropy: NDArray[np.float32] = -(logs.exp() * logs.clamp(min=-1e4)).sum(dim=-1).cpu().numpy()
    return entropy


def _side_by_side(logits: torch.Tensor) -> NDArray[np.float32]:
    """Its rows, the numbers of each side by side in memory."""
    rows: NDArray[np.float32] = logits.numpy()
    return rows if rows.strides[1] == rows.itemsize else np.ascontiguousarray(rows)


# Numbers looked at together.
_BLOCK = 128


@compiled
def _highest(line: Any, start: int, end: int) -> float:
    """The largest of line[start:end]; its numbers stand side by side."""
    blocks = (end - start) // LANES
    highest: float = largest(address(line, start), blocks) if blocks else line[start]
    for entry in range(start + blocks * LANES, end):
        highest = max(highest, line[entry])
    return highest


@compiled_loosely
def _entropies(logits: Any, rows: Any, found: Any) -> None:
    distances, weights = np.empty(_BLOCK, np.float32), np.empty(_BLOCK, np.float32)
    for place in range(len(rows)):
        line = logits[rows[place]]
        highest = _highest(line, 0, len(line))
        mass, weighted = 0.0, 0.0
        for start in range(0, len(line), _BLOCK):
            size = min(_BLOCK, len(line) - start)
            for entry in range(size):
                distances[entry] = max(line[start + entry] - highest, float32(-80.0))
            for entry in range(size):
                weights[entry] = exponential(distances[entry])
            one, other = float32(0.0), float32(0.0)
            for entry in range(size):
                one += weights[entry]
                other += weights[entry] * distances[entry]
            mass += one
            weighted += other
        found[place] = np.log(mass) - weighted / mass


@compiled
def _top(logits: Any, rows: Any, found: Any, values: Any) -> None:
    vocabulary = logits.shape[1]
    count = min(found.shape[1], vocabulary)
    for place in range(len(rows)):
        line, out = logits[rows[place]], found[place]
        best = values[place, :count]
        best[:] = -np.inf
        held = 0
        for start in range(0, vocabulary, _BLOCK):
            end = min(vocabulary, start + _BLOCK)
            # A maximum is found many numbers at a time; few blocks hold anything that is larger than what is held.
            if held == count and not _highest(line, start, end) > best[count - 1]:
                continue
            for entry in range(start, end):
                value = line[entry]
                if held == count and not value > best[count - 1]:
                    continue
                held = min(held + 1, count)
                at = held - 1
                while at > 0 and best[at - 1] < value:
                    best[at], out[at] = best[at - 1], out[at - 1]
                    at -= 1
                best[at], out[at] = value, entry
