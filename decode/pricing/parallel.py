"""How many requests at once make most tokens per second."""

from __future__ import annotations

from specds.decode.pricing.curve import CostCurve, Load

_CHOICES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
# More requests at once must be worth this much, as each of them waits longer.
_WORTH = 1.03


def choose_parallel(curve: CostCurve, context: int, most: int | None = None) -> int:
    """The number of requests at once that makes most plain tokens per second; of about equal ones the least.

    Args:
        context: tokens behind which each request writes, about.
        most: for how many there is room.
    """
    best, speed = 1, 0.0
    for requests in _CHOICES:
        if requests > curve.rows[-1] or (most is not None and requests > max(most, 1)):
            break
        faster = requests / float(curve.costs(Load([context] * requests, 0), 0)[1])
        if faster > _WORTH * speed:
            best, speed = requests, faster
    return best
