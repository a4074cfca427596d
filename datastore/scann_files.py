"""The files of a ScaNN index, held against what `ann.build` has ScaNN write."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specds.datastore.ann_shape import IndexShape

_ASSETS = "scann_assets.pbtxt"
_CONFIG = "scann_config.pb"
_CODEBOOK = "ah_codebook.pb"
_PARTITIONER = "serialized_partitioner.pb"
_ASSET = re.compile(r'assets \{\n  asset_type: ([A-Z0-9_]+)\n  asset_path: "([A-Za-z0-9_.]+)"\n\}\n')
_NPY_HEADER = re.compile(r"\{'descr': ?'[<|]\w\d', 'fortran_order': ?False, 'shape': ?\([\d, ]+\),? ?\} *\n")
_MOST_LISTED = 1 << 16
_CODES = 16  # ScaNN's hashes have four bits
_HASHED_TOGETHER = 2
_CHUNK = 1 << 20
_BFLOAT16_EXPONENT = 0x7F80


@dataclass(frozen=True, slots=True)
class _Asset:
    """A file of a ScaNN index: its type, its name, and the array that it is; None for a message."""

    type: str
    name: str
    dtype: Any = None
    shape: tuple[int, ...] | None = None


def names(shape: IndexShape) -> frozenset[str]:
    """The names of all files that an index has."""
    return frozenset([_ASSETS, _CONFIG, *(asset.name for asset in _assets_of(shape))])


def check_files(directory: Path, shape: IndexShape) -> None:
    """The list of assets, and the type and shape of each array; see `ann_files.check_files`."""
    _check_asset_list(directory / _ASSETS, shape)
    for asset in _assets_of(shape):
        if asset.shape is not None:
            _check_array(directory / asset.name, asset.dtype, asset.shape)


def check_contents(directory: Path, shape: IndexShape) -> None:
    """Every number by which ScaNN finds its way; see `ann_files.check_contents`."""
    for asset in _assets_of(shape):
        if asset.shape is None:
            continue
        values = np.load(directory / asset.name, mmap_mode="r", allow_pickle=False)
        for start in range(0, len(values), _CHUNK):
            _check_finite(asset, np.asarray(values[start : start + _CHUNK]))
    _check_config(directory / _CONFIG, shape)
    if shape.leaves:
        _check_codebook(directory / _CODEBOOK, shape)
        cells = _check_partitioner(directory / _PARTITIONER, shape)
        _check_below(directory / "datapoint_to_token.npy", cells, "cell")
        _check_below(directory / "hashed_dataset.npy", _CODES, "code")


def _assets_of(shape: IndexShape) -> list[_Asset]:
    rows, dims = shape.keys, shape.dims
    assets: list[_Asset] = []
    if shape.leaves:
        blocks = -(-dims // _HASHED_TOGETHER)
        assets += [
            _Asset("AH_CENTERS", _CODEBOOK),
            _Asset("PARTITIONER", _PARTITIONER),
            _Asset("TOKENIZATION_NPY", "datapoint_to_token.npy", np.int32, (rows,)),
            _Asset("AH_DATASET_NPY", "hashed_dataset.npy", np.uint8, (rows, blocks)),
        ]
    if shape.kept == "float32":
        assets += [_Asset("DATASET_NPY", "dataset.npy", np.float32, (rows, dims))]
    elif shape.kept == "half":
        assets += [_Asset("BF16_DATASET_NPY", "bfloat16_dataset.npy", np.int16, (rows, dims))]
    elif shape.kept == "int8":
        assets += [
            _Asset("INT8_DATASET_NPY", "int8_dataset.npy", np.int8, (rows, dims)),
            _Asset("INT8_MULTIPLIERS_NPY", "int8_multipliers.npy", np.float32, (dims,)),
            _Asset("INT8_NORMS_NPY", "dp_norms.npy", np.float32, (0,)),
        ]
    return assets


def _check_asset_list(path: Path, shape: IndexShape) -> None:
    """As ScaNN writes it, byte by byte: the text format has other spellings, and a path must not hide in one."""
    with path.open("rb") as file:
        text = file.read(_MOST_LISTED).decode("ascii", "backslashreplace")
    listed: list[tuple[str, str]] = []
    at = 0
    while at < len(text):
        match = _ASSET.match(text, at)
        if not match:
            raise ValueError(f"its list of assets is not as ScaNN writes it: {text[at : at + 80].strip()!r}")
        listed.append((match[1], match[2]))
        at = match.end()
    if sorted(listed) != sorted((asset.type, asset.name) for asset in _assets_of(shape)):
        raise ValueError(f"its list of assets names others than its parameters do: {', '.join(n for _, n in listed)}")


def _check_array(path: Path, dtype: Any, shape: tuple[int, ...]) -> None:
    with path.open("rb") as file:
        if np.lib.format.read_magic(file) != (1, 0):
            raise ValueError(f"{path.name} is not a NumPy array as ScaNN writes it")
        begin = file.tell()
        there, transposed, kind = np.lib.format.read_array_header_1_0(file)
        end = file.tell()
        file.seek(begin + 2)
        # ScaNN has a reader of its own, which must not see anything else in it than NumPy's did.
        header = file.read(end - begin - 2).decode("latin-1")
    size = end + math.prod(shape) * np.dtype(dtype).itemsize
    if there != shape or transposed or kind != dtype or not _NPY_HEADER.fullmatch(header):
        raise ValueError(f"{path.name} is {kind}{list(there)}, not {np.dtype(dtype)}{list(shape)}")
    if path.stat().st_size != size:
        raise ValueError(f"{path.name} has {path.stat().st_size:,} bytes, not {size:,}")


def _check_finite(asset: _Asset, values: NDArray[Any]) -> None:
    if asset.type == "BF16_DATASET_NPY":
        sound = (values & _BFLOAT16_EXPONENT) != _BFLOAT16_EXPONENT
    elif asset.dtype is np.float32:
        sound = np.isfinite(values)
    else:
        return
    if not sound.all():
        raise ValueError(f"{asset.name} holds a value that is not a number")


def _check_below(path: Path, end: int, what: str) -> None:
    values = np.load(path, mmap_mode="r", allow_pickle=False)
    for start in range(0, len(values), _CHUNK):
        some = values[start : start + _CHUNK]
        if some.min() < 0 or some.max() >= end:
            raise ValueError(f"{path.name} names a {what} that there is not")


def _check_config(path: Path, shape: IndexShape) -> None:
    """That it is the configuration `ann.build` would give ScaNN, but for how much was spent on training."""
    from google.protobuf import text_format
    from scann.proto import scann_pb2

    from specds.datastore.ann import scann_builder

    keys = np.broadcast_to(np.float32(0), (shape.keys, shape.dims))
    text = scann_builder(keys, shape.leaves, shape.search, shape.kept).create_config()
    wanted = text_format.Parse(text, scann_pb2.ScannConfig())
    there = _parsed(path, scann_pb2.ScannConfig)
    for config in (wanted, there):
        if config.HasField("partitioning"):
            for name in ("max_clustering_iterations", "min_cluster_size", "expected_sample_size"):
                config.partitioning.ClearField(name)
            config.partitioning.ClearField("single_machine_center_initialization")
        if config.HasField("hash"):
            for name in ("max_clustering_iterations", "expected_sample_size", "noise_shaping_threshold"):
                config.hash.asymmetric_hash.ClearField(name)
        for name in ("fixed_point", "bfloat16"):
            if config.HasField("exact_reordering") and config.exact_reordering.HasField(name):
                getattr(config.exact_reordering, name).ClearField("noise_shaping_threshold")
    # As bytes, which hold unknown fields, too.
    if there.SerializeToString(deterministic=True) != wanted.SerializeToString(deterministic=True):
        raise ValueError(f"{path.name} configures another index than the manifest describes")


def _check_codebook(path: Path, shape: IndexShape) -> None:
    """16 centres for every two dimensions."""
    from scann.proto import centers_pb2, hash_pb2

    codebook = _parsed(path, centers_pb2.CentersForAllSubspaces)
    widths = [min(_HASHED_TOGETHER, shape.dims - start) for start in range(0, shape.dims, _HASHED_TOGETHER)]
    fits = _fields(codebook) <= {"subspace_centers", "quantization_scheme"}
    fits = (
        fits
        and codebook.quantization_scheme == hash_pb2.AsymmetricHasherConfig.PRODUCT
        and len(codebook.subspace_centers) == len(widths)
    )
    for subspace, width in zip(codebook.subspace_centers, widths, strict=False):
        fits = fits and _fields(subspace) == {"center"} and len(subspace.center) == _CODES
        for centre in subspace.center:
            fits = fits and _fields(centre) == {"feature_type", "feature_value_float"}
            fits = fits and centre.feature_type == centre.FLOAT and len(centre.feature_value_float) == width
            fits = fits and all(map(math.isfinite, centre.feature_value_float))
    if not fits:
        raise ValueError(f"{path.name} is not a codebook of {len(widths)} times {_CODES} centres")


def _check_partitioner(path: Path, shape: IndexShape) -> int:
    """One centre for each cell, in a tree of one level; how many cells."""
    from scann.partitioning import partitioner_pb2
    from scann.proto import partitioning_pb2

    partitioner = _parsed(path, partitioner_pb2.SerializedPartitioner)
    tree = partitioner.kmeans.kmeans_tree
    root, cells = tree.root, partitioner.n_tokens
    fits = (
        _fields(partitioner) == {"n_tokens", "kmeans"}
        and _fields(partitioner.kmeans) == {"kmeans_tree"}
        and _fields(tree) <= {"root", "learned_spilling_type"}
        and tree.learned_spilling_type == partitioning_pb2.DatabaseSpillingConfig.NO_SPILLING
        and _fields(root) <= {"centers", "children", "learned_spilling_threshold", "leaf_id"}
        and 0 < cells <= shape.leaves
        and len(root.centers) == len(root.children) == cells
    )
    for centre in root.centers if fits else ():
        fits = fits and _fields(centre) == {"dimension"} and len(centre.dimension) == shape.dims
        fits = fits and all(map(math.isfinite, centre.dimension))
    for number, child in enumerate(root.children if fits else ()):
        fits = fits and _fields(child) <= {"learned_spilling_threshold", "leaf_id"} and child.leaf_id == number
    if not fits:
        raise ValueError(f"{path.name} is not a partition into {shape.leaves:,} cells of {shape.dims} dimensions")
    return int(cells)


def _parsed(path: Path, kind: Any) -> Any:
    from google.protobuf.message import DecodeError

    try:
        return kind.FromString(path.read_bytes())
    except DecodeError as error:
        raise ValueError(f"{path.name} is not a message of ScaNN's") from error


def _fields(message: Any) -> set[str]:
    """The fields that are there; unknown ones under a name that no field has."""
    from google.protobuf.unknown_fields import UnknownFieldSet

    unknown = {"?"} if len(UnknownFieldSet(message)) else set()
    return {field.name for field, _ in message.ListFields()} | unknown
