"""Source model: what a draft model generates."""

from __future__ import annotations

from typing import Any

from specds.decode.auto.candidates import propose, set_all
from specds.decode.auto.features import MODEL, columns
from specds.decode.auto.tries import MODEL_TRIE
from specds.jit import compiled_inside

(_SCORE,) = columns(MODEL)


@compiled_inside
def from_model(tries: Any, position: Any, candidates: Any) -> None:
    """The next token of the draft model's chain, if the node is on it.

    Args:
        tries: `Tries`.
    """
    trie = tries.trie
    here = position.cursors[MODEL_TRIE]
    if here < 0 or trie.weight[here] <= 0 or trie.child[here] < 0:
        return
    below = trie.child[here]
    set_all(candidates, _SCORE, 0.0)
    row = propose(candidates, trie.token[below], MODEL)
    if row >= 0:
        candidates.features[row, _SCORE] = trie.weight[below]
