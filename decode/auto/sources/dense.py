"""Source dense: what followed the nearest states of a store, weighed by their similarity."""

from __future__ import annotations

from typing import Any

from specds.decode.auto.candidates import propose, set_all
from specds.decode.auto.features import DENSE, columns
from specds.decode.auto.tries import BRANCHES, DENSE_TRIE
from specds.jit import compiled_inside

_SHARE, _WEIGHT, _SIMILARITY, _MARGIN = columns(DENSE)


@compiled_inside
def from_dense(tries: Any, position: Any, candidates: Any) -> None:
    """Candidates of the tree of neighbours' continuations.

    Args:
        tries: `Tries`.
    """
    trie = tries.trie
    here = position.cursors[DENSE_TRIE]
    if here < 0 or trie.weight[here] <= 0:
        return
    set_all(candidates, _SHARE, 0.0)
    set_all(candidates, _WEIGHT, trie.weight[here])
    set_all(candidates, _SIMILARITY, tries.similarity)
    set_all(candidates, _MARGIN, tries.margin)
    below, looked_at = trie.child[here], 0
    while below >= 0 and looked_at < BRANCHES:
        row = propose(candidates, trie.token[below], DENSE)
        if row >= 0:
            candidates.features[row, _SHARE] = trie.weight[below] / trie.weight[here]
        looked_at += 1
        below = trie.sibling[below]
