"""Source recycling: the target's likeliest tokens where the last 1, 2 or 3 tokens were last forwarded."""

from __future__ import annotations

from typing import Any

from specds.decode.auto.candidates import find, propose, set_all
from specds.decode.auto.features import RECYCLING, columns
from specds.decode.auto.ngrams import KEPT, find_row
from specds.decode.contracts import TOP
from specds.jit import compiled_inside

_ORDER, _RANK, _GAP, _MARGIN = columns(RECYCLING)
# Ranks and logit gaps below which a token is proposed; others only say something of tokens that are proposed already.
_MOST_RANK, _MOST_GAP = 5, 6.0


@compiled_inside
def from_recycling(likeliest: Any, position: Any, candidates: Any) -> None:
    """Candidates of the rows that are kept, by the most last tokens of which there is a row.

    Args:
        likeliest: `LikeliestRows`.
    """
    for order in range(min(position.orders, KEPT) - 1, -1, -1):
        place = find_row(likeliest.keys, position.hashes[order])
        if place < 0:
            continue
        ids, gaps = likeliest.ids[place], likeliest.gaps[place]
        set_all(candidates, _ORDER, order + 1)
        set_all(candidates, _RANK, TOP)
        set_all(candidates, _MARGIN, gaps[1])
        for rank in range(TOP):
            if ids[rank] < 0:
                break
            if rank < _MOST_RANK and gaps[rank] < _MOST_GAP:
                row = propose(candidates, ids[rank], RECYCLING)
            else:
                row = find(candidates, ids[rank])
                if row >= 0:
                    candidates.sources[row] |= 1 << RECYCLING
            if row >= 0:
                candidates.features[row, _RANK] = rank
                candidates.features[row, _GAP] = gaps[rank]
        break
