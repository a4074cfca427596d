"""Raw arrays on disk: written, and mapped into memory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specds.files import create, open_regular


def write_array(path: Path, *arrays: NDArray[Any], below: Path) -> None:
    """A new file of these arrays, concatenated. Raises: as `files.create`, and OSError on a full disk."""
    with create(path, below) as file:
        for array in arrays:
            array.tofile(file)


def working_array(path: Path, shape: tuple[int, int], below: Path) -> NDArray[np.float32]:
    """A new file of zeros as an array to write to. Raises: as `files.create`."""
    with create(path, below) as file:
        return np.memmap(file, np.float32, "w+", shape=shape)


def map_array(path: Path, dtype: Any, count: int) -> NDArray[Any]:
    """The file as a read-only array[count], without reading it.

    Raises:
        ValueError: the file has another size. OSError: it cannot be opened.
    """
    with open_regular(path) as file:
        if count < 1 or os.fstat(file.fileno()).st_size != count * np.dtype(dtype).itemsize:
            raise ValueError(f"{path.name} does not hold {count:,} values of {np.dtype(dtype).name}")
        # As a plain array, which compiled code takes in faster.
        return np.memmap(file, dtype=dtype, mode="r", shape=(count,)).view(np.ndarray)
