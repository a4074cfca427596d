"""What verifiers share: pick the target's token at each node, follow it if it was drafted."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from specds.decode.contracts import Verdict
from specds.decode.draft import Draft
from specds.sampling import numbers


def likeliest(logits: torch.Tensor) -> Callable[[int], int]:
    """A function from a row of the logits to its most likely token; rows that nobody asks for cost nothing on a CPU."""
    if logits.device.type == "cpu" and logits.dtype == torch.float32:
        # One row at a time, and torch's threads stay asleep.
        return lambda row: int(numbers(logits[row]).argmax())
    picks = logits.argmax(dim=-1).tolist()
    return lambda row: int(picks[row])


def follow(draft: Draft, pick: Callable[[int, int], int]) -> Verdict:
    """Walk down from the root while the picked token is a child.

    Args:
        draft: the tree.
        pick: (row of the logits, depth) → the target's token there; called for visited rows only.
    """
    if not len(draft):
        return Verdict((), pick(0, 0))
    path, token = descend(draft.children(), -1, pick, 0)
    return Verdict(tuple(path), token)


def descend(
    children: Mapping[tuple[int, int], int], node: int, pick: Callable[[int, int], int], depth: int
) -> tuple[list[int], int]:
    """The nodes below `node` that are the target's own tokens, and its token after the last of them.

    Args:
        children: (parent, token) → node.
        depth: of `node`; 0 for the root, -1.
    """
    path: list[int] = []
    while True:
        token = pick(node + 1, depth + len(path))
        child = children.get((node, token))
        if child is None:
            return path, token
        path.append(child)
        node = child
