"""The running context: prompt and committed tokens in one growing array."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from specds.decode.arrays import with_room


class Context:
    """Token ids in a buffer that grows geometrically; appending costs O(1) amortised."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._buffer = np.empty(max(256, 2 * len(tokens)), dtype=np.int64)
        self._buffer[: len(tokens)] = tokens
        self._length = len(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append committed tokens."""
        end = self._length + len(tokens)
        self._buffer = with_room(self._buffer, self._length, end)
        self._buffer[self._length : end] = tokens
        self._length = end

    @property
    def tokens(self) -> NDArray[np.int64]:
        """int64[length]: a view, valid until the next `extend`."""
        return self._buffer[: self._length]
