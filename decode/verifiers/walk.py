"""The rule that all exact verifiers share: pick the target's token at each node, follow it if it was drafted."""

from __future__ import annotations

from collections.abc import Callable

from specds.decode.contracts import Verdict
from specds.decode.draft import Draft


def follow(draft: Draft, pick: Callable[[int, int], int]) -> Verdict:
    """Walk down from the root while the picked token is a child.

    Args:
        draft: the tree.
        pick: (row of the logits, depth) → the target's token there; called for visited rows only.
    """
    if not len(draft):
        return Verdict((), pick(0, 0))
    children = draft.children()
    path: list[int] = []
    node = -1
    while True:
        token = pick(node + 1, len(path))
        child = children.get((node, token))
        if child is None:
            return Verdict(tuple(path), token)
        path.append(child)
        node = child
