"""Raw arrays on disk, mapped into memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


def map_array(path: Path, dtype: Any, count: int) -> NDArray[Any]:
    """The file as a read-only array[count], without reading it.

    Raises:
        ValueError: the file has another size. OSError: it cannot be opened.
    """
    if count < 1 or path.stat().st_size != count * np.dtype(dtype).itemsize:
        raise ValueError(f"{path.name} does not hold {count:,} values of {np.dtype(dtype).name}")
    # As a plain array, which compiled code takes in faster.
    return np.memmap(path, dtype=dtype, mode="r", shape=(count,)).view(np.ndarray)
