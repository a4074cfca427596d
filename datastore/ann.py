"""Approximate nearest neighbours by ScaNN or faiss, behind one small interface."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from specds.datastore.ann_files import check_files
from specds.datastore.ann_shape import KEYS, KINDS, IndexShape
from specds.errors import CorruptStore, UsageError, first_line
from specds.files import create

_EXACT_BELOW = 20_000
_TRAIN = 250_000
_BUILD_AGAIN = "do not trust this store if it is not yours; `specds build-dense --replace` builds the index again"


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
    parameters = {"ann": kind, "leaves": leaves, "leaves_searched": min(search, leaves), "search": search, "kept": kept}
    parameters |= {"keys": len(keys), "dims": keys.shape[1]}
    if kind not in KINDS:
        raise UsageError(f"no index kind {kind!r}", f"--index is one of {', '.join(KINDS)}")
    if kept not in KEYS:
        raise UsageError(f"no way to keep keys called {kept!r}", f"--keys is one of {', '.join(KEYS)}")
    if kind == "scann":
        _build_scann(keys, directory, leaves, search, kept)
    else:
        _build_faiss(keys, directory, leaves, kept)
    return parameters


def stored_keys(directory: Path, parameters: dict[str, Any]) -> NDArray[np.float32] | None:
    """The keys of an index that was built with `float32` or `half`; None where they are not kept that well.

    Raises:
        CorruptStore: the files are not what the parameters say.
    """
    shape = checked(directory, parameters)
    try:
        if shape.kept not in ("float32", "half"):
            return None
        kept: NDArray[np.float32]
        if shape.kind == "scann" and shape.kept == "float32":
            kept = np.load(directory / "dataset.npy", mmap_mode="r", allow_pickle=False)
            return kept
        if shape.kind == "scann":
            halves = np.load(directory / "bfloat16_dataset.npy", mmap_mode="r", allow_pickle=False)
            kept = (halves.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
            return kept
        index = _faiss().read_index(str(directory / "index.faiss"), _faiss().IO_FLAG_MMAP)
        if shape.leaves:
            index.make_direct_map()
        kept = index.reconstruct_n(0, index.ntotal)
        return kept
    except UsageError:
        raise
    except Exception as error:  # faiss raises plain RuntimeError on damaged files
        raise CorruptStore(f"{directory} does not give its keys: {first_line(error)}", _BUILD_AGAIN) from error


def checked(directory: Path, parameters: dict[str, Any]) -> IndexShape:
    """What an index is by its parameters, if its files are of these types, rows and dimensions; no library is asked.

    Raises:
        CorruptStore: they are not, or no index has such parameters.
    """
    try:
        shape = IndexShape.of(parameters)
        check_files(directory, shape)
    except Exception as error:  # NumPy parses a header as Python, and raises whatever comes of it
        kind = str(parameters.get("ann"))[:20]
        raise CorruptStore(
            f"{directory} is not the {kind} index that the manifest describes: {first_line(error)}", _BUILD_AGAIN
        ) from error
    return shape


def load(directory: Path, parameters: dict[str, Any], dims: int) -> Searcher:
    """Open the index that `build` wrote.

    Args:
        parameters: what `build` returned.
        dims: d, the length of the keys.

    Raises:
        CorruptStore: the files are not such an index. UsageError: its package is not installed.
    """
    shape = checked(directory, parameters)
    if shape.dims != dims:
        raise CorruptStore(f"{directory} has keys of {shape.dims} numbers, not {dims}", _BUILD_AGAIN)
    try:
        return _Scann(directory) if shape.kind == "scann" else _Faiss(directory, shape.searched)
    except UsageError:
        raise
    except Exception as error:  # both libraries raise plain RuntimeError and ValueError on damaged files
        reason = first_line(error)
        raise CorruptStore(f"{directory} does not open as a {shape.kind} index: {reason}", _BUILD_AGAIN) from error


class _Scann:
    def __init__(self, directory: Path) -> None:
        scann = _scann()
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


def scann_builder(keys: NDArray[np.float32], leaves: int, search: int, kept: str) -> Any:
    """ScaNN's builder of the index that `build` makes of such keys; see there."""
    scann = _scann()
    from scann.scann_ops.py.scann_builder import ReorderType

    quantized = {"float32": ReorderType.FLOAT32, "half": ReorderType.BFLOAT16, "int8": ReorderType.INT8}.get(kept)
    builder = scann.builder(keys, 10, "dot_product")
    if not leaves:
        return builder.score_brute_force(quantized)
    builder = builder.tree(leaves, min(search, leaves), training_sample_size=min(len(keys), _TRAIN))
    builder = builder.score_ah(2, anisotropic_quantization_threshold=0.2)
    return builder if quantized is None else builder.reorder(max(250, search), quantized)


def _build_scann(keys: NDArray[np.float32], directory: Path, leaves: int, search: int, kept: str) -> None:
    builder = scann_builder(np.ascontiguousarray(keys), leaves, search, kept)
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
    with _saving(), create(directory / "index.faiss", directory) as file:
        faiss.write_index(index, faiss.PyCallbackIOWriter(file.write))


def require_package(kind: str) -> None:
    """Raises UsageError where the package of an index kind is not installed."""
    _ = _scann() if kind == "scann" else _faiss()


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
