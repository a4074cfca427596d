"""Source suffix: a store's counted trees behind the longest match, a shorter one, and the last token alone."""

from __future__ import annotations

from typing import Any

import numpy as np

from specds.decode.auto.candidates import propose, set_all
from specds.decode.auto.features import SUFFIX, columns
from specds.decode.auto.tries import BRANCHES, SUFFIX_TRIES
from specds.jit import compiled_inside

_LENGTH, _SHARE, _COUNT, _SECOND_SHARE, _ = columns(SUFFIX)
# What is added to a parent's count, so that what was seen once out of once has no share of 1.
_PRIOR = 0.5


@compiled_inside
def from_suffix(tries: Any, position: Any, candidates: Any) -> None:
    """Candidates of the suffix index's trees, the longest match's first.

    Args:
        tries: `Tries`.
    """
    trie = tries.trie
    first = -1
    for number in range(SUFFIX_TRIES):
        here = position.cursors[number]
        if here < 0 or trie.weight[here] <= 0:
            continue
        if first < 0:
            first = number
            column = _SHARE
            set_all(candidates, _LENGTH, tries.length[number] + position.depth - 1)
            set_all(candidates, _COUNT, np.log2(trie.weight[here]))
        else:
            column = _SECOND_SHARE + number - 1
        set_all(candidates, column, 0.0)
        below, looked_at = trie.child[here], 0
        while below >= 0 and looked_at < BRANCHES:
            row = propose(candidates, trie.token[below], SUFFIX)
            if row >= 0:
                candidates.features[row, column] = trie.weight[below] / (trie.weight[here] + _PRIOR)
            looked_at += 1
            below = trie.sibling[below]
