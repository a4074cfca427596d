"""What rows of logits say: their likeliest tokens, and how sure they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numba import float32
from numpy.typing import NDArray

from specds.decode.targets.kernels import exponential
from specds.jit import compiled


def top_ids(logits: torch.Tensor, count: int) -> NDArray[np.int32]:
    """int32[n, count]: ids of the largest logits of each row, largest first; of equals the smaller id.

    Rows of fewer than `count` entries are filled up with -1.

    Args:
        logits: float[n, vocabulary], on any device.
    """
    found = np.full((len(logits), count), -1, np.int32)
    if logits.device.type == "cpu" and logits.dtype == torch.float32:
        _top(logits.numpy(), found)
    else:
        width = min(count, logits.shape[-1])
        found[:, :width] = torch.topk(logits, width, dim=-1).indices.cpu().numpy()
    return found


def entropies(logits: torch.Tensor, rows: Sequence[int]) -> NDArray[np.float32]:
    """float32[m]: the entropies of some rows' distributions, in nats.

    Args:
        logits: float[n, vocabulary], on any device.
        rows: m of its rows.
    """
    if logits.device.type == "cpu" and logits.dtype == torch.float32:
        found = np.empty(len(rows), np.float32)
        # Not by torch: its threads would wake up, and spin for a while beside the target's next pass.
        _entropies(logits.numpy(), np.array(rows), found)
        return found
    logs = torch.log_softmax(logits[list(rows)].float(), dim=-1)
    # A token that cannot be drawn adds nothing.
    entropy: NDArray[np.float32] = -(logs.exp() * logs.clamp(min=-1e4)).sum(dim=-1).cpu().numpy()
    return entropy


@compiled
def _entropies(logits: Any, rows: Any, found: Any) -> None:
    for place in range(len(rows)):
        line = logits[rows[place]]
        highest = line[0]
        for token in range(len(line)):
            highest = max(highest, line[token])
        weights = line - highest
        mass, weighted = 0.0, 0.0
        for token in range(len(line)):
            distance = max(weights[token], float32(-80.0))
            weight = exponential(distance)
            mass += float(weight)
            weighted += float(weight * distance)
        found[place] = np.log(mass) - weighted / mass


@compiled
def _top(logits: Any, found: Any) -> None:
    rows, vocabulary = logits.shape
    count = min(found.shape[1], vocabulary)
    best = np.empty(count, np.float32)
    for row in range(rows):
        line = logits[row]
        held = 0
        least = -np.inf
        for token in range(vocabulary):
            value = line[token]
            if held == count and not value > least:
                continue
            place = held if held < count else count - 1
            while place > 0 and best[place - 1] < value:
                if place < count:
                    best[place] = best[place - 1]
                    found[row, place] = found[row, place - 1]
                place -= 1
            best[place] = value
            found[row, place] = token
            if held < count:
                held += 1
            least = best[held - 1]
