"""Source alternatives: what was likely in the last token's place, as guesses of the token after it."""

from __future__ import annotations

from typing import Any

from specds.decode.auto.candidates import propose, set_all
from specds.decode.auto.features import ALTERNATIVES, columns
from specds.decode.contracts import TOP
from specds.jit import compiled_inside

_RANK, _GAP = columns(ALTERNATIVES)
# Ranks and logit gaps below which a token is proposed.
_MOST_RANK, _MOST_GAP = 6, 6.0


@compiled_inside
def from_alternatives(picked: Any, position: Any, candidates: Any) -> None:
    """Candidates behind the text itself: alternative top-k tokens of the last one.

    Args:
        picked: `Picked`.
    """
    if position.depth > 1:
        return
    set_all(candidates, _RANK, TOP)
    for rank in range(min(len(picked.tokens), _MOST_RANK)):
        if picked.gaps[rank] < _MOST_GAP:
            row = propose(candidates, picked.tokens[rank], ALTERNATIVES)
            if row >= 0:
                candidates.features[row, _RANK] = rank
                candidates.features[row, _GAP] = picked.gaps[rank]
