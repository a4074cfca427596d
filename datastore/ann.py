"""Approximate nearest neighbours by ScaNN or faiss, behind one small interface."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from specds.errors import CorruptStore, UsageError, first_line

KINDS = ("scann", "faiss")
KEYS = ("float32", "half", "int8", "none")
"""How keys are kept: as they are, in two bytes, in one, or only as the codes that a first look needs."""
_EXACT_BELOW = 20_000
_TRAIN = 250_000
_ASSET_LINE = re.compile(r'assets \{|\}|\s*asset_type: [A-Z0-9_]+|\s*asset_path: "[A-Za-z0-9_-][A-Za-z0-9_.-]*"|\s*')


class Searcher(Protocol):
    """An opened index."""

    def search(self, query: NDArray[np.float32], k: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """The k nearest rows by dot product, nearest first: similarity float32[≤ k], rows int64[≤ k]."""


def default_kind() -> str:
    """`scann` where it can be imported, else `faiss`."""
    return "scann" if importlib.util.find_spec("scann") else "faiss"


def build(
    kind: str,
    keys: NDArray[np.float32],
    directory: Path,
    *,
    leaves: int | None = None,
    search: int = 250,
    kept: str = "float32",
) -> dict[str, Any]:
    """Index unit-length keys for dot-product search and write the index's files into a directory.

    Below 20,000 keys all are compared; a partition would only lose recall.

    Args:
        kind: `scann` or `faiss`.
        keys: float32[n, d]; may be memory-mapped.
        leaves: cells of the partition; None: 5 √n.
        search: cells looked into for one query (DReSD's setting: 250).
        kept: one of KEYS. bfloat16 (ScaNN) or float16 (faiss) for `half`. Without keys, neighbours are as near as their
            codes say; so few that all are compared are kept in one byte then.

    Returns:
        what `load` needs, for the manifest.

    Raises:
        UsageError: no such kind, or its package is not installed.
    """
    leaves = min(leaves or round(5 * math.sqrt(len(keys))), len(keys))
    if len(keys) < _EXACT_BELOW:
        leaves = 0
        if kept == "none":
            kept = "int8"
    parameters = {"ann": kind, "leaves": leaves, "leaves_searched": min(search, leaves), "kept": kept}
    if kind not in KINDS:
        raise UsageError(f"no index kind {kind!r}", f"--index is one of {', '.join(KINDS)}")
    if kept not in KEYS:
        raise UsageError(f"no way to keep keys called {kept!r}", f"--keys is one of {', '.join(KEYS)}")
    if kind == "scann":
        _build_scann(keys, directory, leaves, search, kept)
    else:
        _build_faiss(keys, directory, leaves, kept)
    return parameters


def stored_keys(
    directory: Path, parameters: dict[str, Any], shape: tuple[int, int] | None = None
) -> NDArray[np.float32] | None:
    """The keys of an index that was built with `float32` or `half`; None where they are not kept that well.

    Args:
        shape: what they must be, looked at before memory is taken; None: whatever they are.

    Raises:
        CorruptStore: the files are not what the parameters say.
    """
    try:
        if parameters["kept"] == "float32" and parameters["ann"] == "scann":
            return _checked(np.load(directory / "dataset.npy", mmap_mode="r", allow_pickle=False), np.float32, shape)
        if parameters["kept"] == "half" and parameters["ann"] == "scann":
            halves = np.load(directory / "bfloat16_dataset.npy", mmap_mode="r", allow_pickle=False)
            return (_checked(halves, np.int16, shape).view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        if parameters["kept"] in ("float32", "half"):
            index = _faiss().read_index(str(directory / "index.faiss"), _faiss().IO_FLAG_MMAP)
            if shape is not None and (index.ntotal, index.d) != shape:
                raise ValueError(f"{index.ntotal} keys of {index.d} numbers, not {shape}")
            if parameters["leaves"]:
                index.make_direct_map()
            return _checked(index.reconstruct_n(0, index.ntotal), np.float32, shape)
    except (UsageError, CorruptStore):
        raise
    except Exception as error:  # faiss raises plain RuntimeError on damaged files
        raise CorruptStore(f"{directory} does not give its keys: {first_line(error)}", "build it again") from error
    return None


def _checked(keys: NDArray[Any], dtype: Any, shape: tuple[int, int] | None) -> NDArray[Any]:
    if keys.ndim != 2 or keys.dtype != dtype or (shape is not None and keys.shape != shape):
        raise ValueError(f"keys are {keys.shape} of {keys.dtype}")
    return keys


def load(directory: Path, parameters: dict[str, Any], dims: int) -> Searcher:
    """Open the index that `build` wrote.

    Args:
        parameters: what `build` returned.
        dims: d, the length of the keys.

    Raises:
        CorruptStore: the files are not an index. UsageError: its package is not installed.
    """
    kind = parameters.get("ann")
    searcher: Searcher
    try:
        if kind == "scann":
            searcher = _Scann(directory)
        elif kind == "faiss":
            searcher = _Faiss(directory, int(parameters["leaves_searched"]))
        else:
            raise CorruptStore(f"{directory}: no index kind {kind!r}", "build it again")
        # Keys of another length are noticed at the first search only, so here is one.
        searcher.search(np.zeros(dims, np.float32), 1)
        return searcher
    except (UsageError, CorruptStore):
        raise
    except Exception as error:  # both libraries raise plain RuntimeError and ValueError on damaged files
        reason = first_line(error)
        raise CorruptStore(f"{directory} does not open as a {kind} index: {reason}", "build it again") from error


class _Scann:
    def __init__(self, directory: Path) -> None:
        scann = _scann()
        # ScaNN would unpickle this file if it were there; specds writes none.
        if (directory / "scann_docids.pkl").exists():
            raise CorruptStore(f"{directory} holds a pickle", "this store was not written by specds; do not trust it")
        # Line by line as ScaNN writes it: the text format has other spellings, and a path must not hide in one.
        for line in (directory / "scann_assets.pbtxt").read_text().splitlines():
            if not _ASSET_LINE.fullmatch(line):
                raise CorruptStore(
                    f"{directory}: {line.strip()[:80]!r} in its list of assets may lead out of the index",
                    "do not trust this store; build the index again",
                )
        with _silent():
            self._searcher = scann.load_searcher(str(directory))

    def search(self, query: NDArray[np.float32], k: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        rows, similarity = self._searcher.search(query, final_num_neighbors=k)
        # Below `k` reordered candidates ScaNN pads with NaN similarities.
        real = ~np.isnan(similarity)
        return similarity[real], rows[real].astype(np.int64)


class _Faiss:
    def __init__(self, directory: Path, searched: int) -> None:
        faiss = _faiss()
        self._index = faiss.read_index(str(directory / "index.faiss"), faiss.IO_FLAG_MMAP)
        if searched:
            faiss.extract_index_ivf(self._index).nprobe = searched

    def search(self, query: NDArray[np.float32], k: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        similarity, rows = self._index.search(query[None], k)
        real = rows[0] >= 0
        return similarity[0][real], rows[0][real]


def _build_scann(keys: NDArray[np.float32], directory: Path, leaves: int, search: int, kept: str) -> None:
    scann = _scann()
    from scann.scann_ops.py.scann_builder import ReorderType

    quantized = {"float32": ReorderType.FLOAT32, "half": ReorderType.BFLOAT16, "int8": ReorderType.INT8}.get(kept)
    builder = scann.builder(np.ascontiguousarray(keys), 10, "dot_product")
    if leaves:
        builder = builder.tree(leaves, min(search, leaves), training_sample_size=min(len(keys), _TRAIN))
        builder = builder.score_ah(2, anisotropic_quantization_threshold=0.2)
        if quantized is not None:
            builder = builder.reorder(max(250, search), quantized)
    else:
        builder = builder.score_brute_force(quantized)
    with _silent():
        index = builder.build()
    with _saving():
        index.serialize(str(directory), relative_path=True)


def _build_faiss(keys: NDArray[np.float32], directory: Path, leaves: int, kept: str) -> None:
    faiss = _faiss()
    dims = keys.shape[1]
    quantizers = {"half": faiss.ScalarQuantizer.QT_fp16, "int8": faiss.ScalarQuantizer.QT_8bit}
    metric = faiss.METRIC_INNER_PRODUCT
    if leaves:
        coarse = faiss.IndexFlatIP(dims)
        if kept in quantizers:
            index = faiss.IndexIVFScalarQuantizer(coarse, dims, leaves, quantizers[kept], metric)
        elif kept == "none":
            index = faiss.IndexIVFPQ(coarse, dims, leaves, math.gcd(dims, max(1, dims // 2)), 8, metric)
        else:
            index = faiss.IndexIVFFlat(coarse, dims, leaves, metric)
    elif kept in quantizers:
        index = faiss.IndexScalarQuantizer(dims, quantizers[kept], metric)
    else:
        index = faiss.IndexFlatIP(dims)
    if not index.is_trained:
        sample = np.random.default_rng(0).choice(len(keys), min(len(keys), max(_TRAIN, 40 * leaves)), replace=False)
        with _silent():
            index.train(np.ascontiguousarray(keys[np.sort(sample)]))
    for start in range(0, len(keys), _TRAIN):
        index.add(np.ascontiguousarray(keys[start : start + _TRAIN]))
    # Through Python's file: faiss's own does not notice that the last bytes could not be written.
    with _saving(), (directory / "index.faiss").open("wb") as file:
        faiss.write_index(index, faiss.PyCallbackIOWriter(file.write))


def _scann() -> Any:
    try:
        from scann.scann_ops.py import scann_ops_pybind
    except ImportError as error:
        raise UsageError(
            "ScaNN is not installed here (it exists for Linux only)", "pip install scann, or use --index faiss"
        ) from error
    return scann_ops_pybind


def _faiss() -> Any:
    try:
        import faiss
    except ImportError as error:
        raise UsageError("faiss is not installed", "pip install faiss-cpu") from error
    return faiss


@contextlib.contextmanager
def _saving() -> Iterator[None]:
    """Both libraries raise RuntimeError, and talk, where a file cannot be written."""
    try:
        with _silent():
            yield
    except RuntimeError as error:
        raise OSError((str(error).strip().splitlines() or ["the index cannot be saved"])[-1]) from error


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """The libraries' C++ logs go to file descriptor 2, where progress bars and error lines live."""
    sys.stderr.flush()
    saved = os.dup(2)
    try:
        with Path(os.devnull).open("wb") as sink:
            os.dup2(sink.fileno(), 2)
            yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
