"""The files of an ANN index, held against what `ann.build` writes: ScaNN and faiss trust theirs, and die of bad ones.

`check_files` looks at names, sizes and headers, and reads nothing else: milliseconds. `check_contents` reads every
number by which a library finds its way, and takes as long as reading the files.
"""

from __future__ import annotations

from pathlib import Path

from specds.datastore import faiss_files, scann_files
from specds.datastore.ann_shape import IndexShape


def asset_names(shape: IndexShape) -> frozenset[str]:
    """The names of all files that an index has."""
    return faiss_files.NAMES if shape.kind == "faiss" else scann_files.names(shape)


def check_files(directory: Path, shape: IndexShape) -> None:
    """That an index has the files which it should have, and each the type, rows and dimensions.

    Raises:
        ValueError: it has not. OSError: a file cannot be read.
    """
    there = {path.name for path in directory.iterdir()}
    if pickles := sorted(name for name in there if name.endswith(".pkl")):
        # ScaNN would unpickle this; specds writes none.
        raise ValueError(f"it holds a pickle, {pickles[0]!r}")
    wanted = asset_names(shape)
    if there != wanted:
        missing, more = sorted(wanted - there), sorted(there - wanted)
        raise ValueError(f"it lacks {missing[0]}" if missing else f"it holds {more[0][:80]!r}, which no index has")
    (faiss_files if shape.kind == "faiss" else scann_files).check_files(directory, shape)


def check_contents(directory: Path, shape: IndexShape) -> None:
    """That nothing in the files of an index leads a library astray; `check_files` comes before.

    Raises:
        ValueError: something does. OSError: a file cannot be read.
    """
    (faiss_files if shape.kind == "faiss" else scann_files).check_contents(directory, shape)
