"""The likeliest tokens of rows of logits."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

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
