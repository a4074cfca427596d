"""Arrays that grow."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def with_room(kept: NDArray[Any], used: int, length: int, fill: int | None = None) -> NDArray[Any]:
    """The same array with room for `length` rows: itself, or one half as long again with its first `used` rows.

    Args:
        fill: what new rows hold; None: anything.
    """
    if length <= len(kept):
        return kept
    larger = np.empty((max(length, 256, len(kept) * 3 // 2), *kept.shape[1:]), kept.dtype)
    larger[:used] = kept[:used]
    if fill is not None:
        larger[used:] = fill
    return larger
