"""Sources context and session: what followed the last tokens in a text so far, by counts."""

from __future__ import annotations

from typing import Any

from specds.decode.auto.candidates import enter, set_all
from specds.decode.auto.features import CONTEXT, SESSION, columns
from specds.decode.auto.ngrams import COUNTS, ORDERS, PLACES, RECENT, TOKENS, TOTAL, WIDTH, find_row
from specds.jit import compiled_inside

# Different followers after which shorter contexts are not looked at.
_ENOUGH = 4
# What is added to a context's total, so that a follower seen once out of once has no share of 1.
_PRIOR = 0.5
_CONTEXT_COLUMN, _SESSION_COLUMN = columns(CONTEXT)[0], columns(SESSION)[0]
# Columns of both, from the first one on; the last is context's alone.
_ORDER, _OWN_ORDER, _SHARE, _COUNT, _RECENT = range(5)


@compiled_inside
def from_counts(table: Any, source: int, position: Any, candidates: Any) -> None:
    """Candidates by the longest context that a table knows, then by shorter ones.

    Args:
        table: int32[n, 16], `Followers.rows`.
        source: CONTEXT, whose places are places in the text, or SESSION.
    """
    column = _CONTEXT_COLUMN if source == CONTEXT else _SESSION_COLUMN
    rows = position.rows
    known = 0
    while known < position.orders:
        rows[known] = find_row(table, position.hashes[known])
        if rows[known] < 0:
            break
        known += 1
    set_all(candidates, column + _ORDER, ORDERS[known - 1] if known else 0)
    different = 0
    for order in range(known - 1, -1, -1):
        row = table[rows[order]]
        for slot in range(WIDTH):
            if row[COUNTS + slot] == 0:
                continue
            at = enter(candidates, row[TOKENS + slot])
            if at < 0 or candidates.sources[at] >> source & 1:
                continue
            candidates.sources[at] |= 1 << source
            features = candidates.features[at]
            features[column + _OWN_ORDER] = ORDERS[order]
            features[column + _SHARE] = row[COUNTS + slot] / (row[TOTAL] + _PRIOR)
            features[column + _COUNT] = row[COUNTS + slot]
            if source == CONTEXT:
                candidates.places[at] = row[PLACES + slot]
                features[column + _RECENT] = 1.0 if row[RECENT] == slot else 0.0
            different += 1
        if different >= _ENOUGH:
            break
