"""Runs of ranks in a suffix array that one token follows: a node's children are its runs, in the order of tokens.

A range of ranks is given as [low, high); `length` is how many tokens its suffixes share.
"""

from specds.datastore.suffix_parts import END, NOTHING, Array, Part, following, part_at
from specds.jit import compiled

# Columns of `Frontier.cursors`: the part and its share of the width looked for; where the child counted last starts and
# ends; the end of the node's range; the run found next: its token, its start and a rank in it.
PART, SHARE, FROM, BASE, HIGH, NEXT, START, INSIDE = range(8)
# Their NEXT before it is looked for.
UNKNOWN = -2


@compiled
def run_end(part: Part, low: int, high: int, length: int, token: int) -> int:
    """The end of the run of ranks from `low` on, before `high`, that are followed by `token`; `low` has it."""
    step = 1
    probe = low + 1
    while probe < high and following(part, probe, length) == token:
        low = probe
        step *= 2
        probe += step
    high = min(probe, high)
    low += 1
    while low < high:
        middle = (low + high) >> 1
        if following(part, middle, length) == token:
            low = middle + 1
        else:
            high = middle
    return low


@compiled
def _run_start(part: Part, low: int, high: int, length: int, token: int) -> int:
    """The first rank from `low` on that is followed by `token` or more, or `high`."""
    while low < high:
        middle = (low + high) >> 1
        if following(part, middle, length) >= token:
            high = middle
        else:
            low = middle + 1
    return high


@compiled
def next_run(part: Part, rank: int, high: int, length: int, width: int) -> tuple[int, int]:
    """The first run of at least `width` ranks in [rank, high) that are followed by one token: its token and start.

    The token is END where there is none. Each such run holds one of the ranks that are probed.
    """
    while True:
        probe = rank + width - 1
        if probe >= high:
            return END, high
        token = following(part, probe, length)
        if token == END:
            # Separators come last: nothing else follows.
            return END, high
        start = _run_start(part, rank, probe, length, token)
        if start + width > high:
            return END, high
        if start > rank and following(part, start + width - 1, length) != token:
            # Too short, and so is what is left of it after the probe.
            rank = probe + 1
        elif token == NOTHING:
            rank = run_end(part, start + width - 1, high, length, token)
        else:
            return token, start


@compiled
def next_child(table: Array, cursors: Array, active: int, shares: int, length: int, width: int) -> tuple[int, int, int]:
    """The next token that `width` ranks or more may be followed by: the token, their number, the sum of their starts.

    It moves the cursors, int64[S, 8], on. The token is END where no other follows.
    """
    token = END
    for a in range(active):
        if cursors[a, NEXT] == UNKNOWN:
            # The widths asked of the parts are chosen so that a child narrower in each has at most width - 1 ranks.
            part = part_at(table, cursors[a, PART])
            least = 1 + (width - 1) * cursors[a, SHARE] // shares
            cursors[a, NEXT], start = next_run(part, cursors[a, BASE], cursors[a, HIGH], length, least)
            cursors[a, START] = start
            cursors[a, INSIDE] = start + least - 1
        token = min(token, cursors[a, NEXT])
    count = 0
    low = 0
    if token == END:
        return token, count, low
    for a in range(active):
        part = part_at(table, cursors[a, PART])
        start = cursors[a, START]
        end = start
        if cursors[a, NEXT] == token:
            end = run_end(part, cursors[a, INSIDE], cursors[a, HIGH], length, token)
            cursors[a, NEXT] = UNKNOWN
        else:
            start = _run_start(part, cursors[a, BASE], end, length, token)
            if start < end and following(part, start, length) == token:
                end = run_end(part, start, end, length, token)
            else:
                end = start
        cursors[a, FROM] = start
        cursors[a, BASE] = end
        count += end - start
        low += start
    return token, count, low
