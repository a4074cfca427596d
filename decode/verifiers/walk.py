"""What verifiers share: walk down the draft, at each node the target's own token or a drafted one that is let pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from specds.decode.contracts import Rescue, Verdict
from specds.decode.draft import Draft
from specds.sampling import highest, known, likeliest_rows

Pick = Callable[[int, int], int]
"""(row of the logits, its depth, 0 for the first) → the target's token there. Called for visited rows only."""


def likeliest(logits: torch.Tensor) -> Pick:
    """The most likely token of a row; on a CPU rows that nobody asks for cost nothing."""
    if logits.device.type == "cpu" and logits.dtype == torch.float32:
        # One row at a time, and torch's threads stay asleep.
        rows = logits.detach().numpy()
        return lambda row, depth: highest(rows[row])
    picks = likeliest_rows(logits)
    return lambda row, depth: known(picks[row])


def follow(
    draft: Draft, pick: Pick, rescue: Callable[[int, int, int], Rescue | None] = lambda node, token, depth: None
) -> Verdict:
    """Walk down from the root while the picked token is a child, or another child is rescued.

    Args:
        draft: the tree.
        pick: the target's token.
        rescue: (node, the token picked behind it, which is not drafted, depth) → a child to go on with, if any.
    """
    if not len(draft):
        return Verdict((), pick(0, 0))
    children = draft.children()
    path: list[int] = []
    rescues: list[Rescue] = []
    node = -1
    while True:
        more, token = descend(children, node, pick, len(path))
        path += more
        node = path[-1] if path else -1
        passed = rescue(node, token, len(path))
        if passed is None:
            return Verdict(tuple(path), token, tuple(rescues))
        rescues.append(passed)
        path.append(passed.node)
        node = passed.node


def descend(children: Mapping[tuple[int, int], int], node: int, pick: Pick, depth: int) -> tuple[list[int], int]:
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


def below(draft: Draft, node: int) -> list[int]:
    """A node's children as they were proposed; -1 is the root."""
    found: list[int] = (draft.parents == node).nonzero()[0].tolist()
    return found
