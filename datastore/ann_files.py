"""The files of an ANN index, held against what `ann.build` writes: ScaNN and faiss trust theirs, and die of bad ones.

`check_files` looks at names, sizes and headers, and reads nothing else: milliseconds. `check_contents` reads every
number by which a library finds its way, and takes as long as reading the files.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

KINDS = ("scann", "faiss")
KEYS = ("float32", "half", "int8", "none")
"""How keys are kept: as they are, in two bytes, in one, or only as the codes that a first look needs."""
_SCANN_ASSETS = "scann_assets.pbtxt"
_SCANN_CONFIG = "scann_config.pb"
_CODEBOOK = "ah_codebook.pb"
_PARTITIONER = "serialized_partitioner.pb"
_FAISS = "index.faiss"
_ASSET = re.compile(r'assets \{\n  asset_type: ([A-Z0-9_]+)\n  asset_path: "([A-Za-z0-9_.]+)"\n\}\n')
_NPY_HEADER = re.compile(r"\{'descr': ?'[<|]\w\d', 'fortran_order': ?False, 'shape': ?\([\d, ]+\),? ?\} *\n")
_MOST_LISTED = 1 << 16
_CODES = 16  # ScaNN's hashes have four bits
_HASHED_TOGETHER = 2
_CHUNK = 1 << 20
_FAISS_INNER_PRODUCT = 0
_FAISS_QUANTIZERS = {"int8": 0, "half": 4}
_FAISS_BITS = 8
_BFLOAT16_EXPONENT = 0x7F80


@dataclass(frozen=True, slots=True)
class IndexShape:
    """What a manifest says of an index.

    Attributes:
        kind, kept: of KINDS and KEYS.
        keys, dims: float32[keys, dims] was indexed.
        leaves: cells of the partition; 0: none.
        searched: cells looked into for one query.
        search: as many as were asked for.
    """

    kind: str
    kept: str
    keys: int
    dims: int
    leaves: int
    searched: int
    search: int

    @classmethod
    def of(cls, parameters: dict[str, Any]) -> IndexShape:
        """Of the parameters in a manifest.

        Raises:
            ValueError: no index that `ann.build` makes has these.
        """
        kind, kept = parameters.get("ann"), parameters.get("kept")
        if kind not in KINDS:
            raise ValueError(f"no index kind {str(kind)[:40]!r}")
        if kept not in KEYS:
            raise ValueError(f"no way to keep keys called {str(kept)[:40]!r}")
        numbers = []
        for name in ("keys", "dims", "leaves", "leaves_searched", "search"):
            value = parameters.get(name)
            if type(value) is not int or not 0 <= value < 1 << 62:
                raise ValueError(f"{name} is {str(value)[:40]!r}")
            numbers.append(value)
        shape = cls(kind, kept, *numbers)
        if not shape.keys or not shape.dims:
            raise ValueError(f"{shape.keys} keys of {shape.dims} numbers")
        if (
            shape.leaves > shape.keys
            or shape.searched != min(shape.search, shape.leaves)
            or bool(shape.leaves) != bool(shape.searched)
        ):
            raise ValueError(f"{shape.searched:,} of {shape.leaves:,} cells are searched, of {shape.keys:,} keys")
        if kept == "none" and not shape.leaves:
            raise ValueError("there is neither a partition nor a key")
        return shape


@dataclass(frozen=True, slots=True)
class _Asset:
    """A file of a ScaNN index: its type, its name, and the array that it is; None for a message."""

    type: str
    name: str
    dtype: Any = None
    shape: tuple[int, ...] | None = None


def asset_names(shape: IndexShape) -> frozenset[str]:
    """The names of all files that an index has."""
    if shape.kind == "faiss":
        return frozenset([_FAISS])
    return frozenset([_SCANN_ASSETS, _SCANN_CONFIG, *(asset.name for asset in _scann_assets(shape))])


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
    if shape.kind == "faiss":
        _faiss_lists(directory / _FAISS, shape)
        return
    _check_asset_list(directory / _SCANN_ASSETS, shape)
    for asset in _scann_assets(shape):
        if asset.shape is not None:
            _check_array(directory / asset.name, asset.dtype, asset.shape)


def check_contents(directory: Path, shape: IndexShape) -> None:
    """That nothing in the files of an index leads a library astray; `check_files` comes before.

    Raises:
        ValueError: something does. OSError: a file cannot be read.
    """
    if shape.kind == "faiss":
        _check_faiss_contents(directory / _FAISS, shape)
        return
    for asset in _scann_assets(shape):
        if asset.shape is None:
            continue
        values = np.load(directory / asset.name, mmap_mode="r", allow_pickle=False)
        for start in range(0, len(values), _CHUNK):
            _check_finite(asset, np.asarray(values[start : start + _CHUNK]))
    _check_scann_config(directory / _SCANN_CONFIG, shape)
    if shape.leaves:
        _check_codebook(directory / _CODEBOOK, shape)
        cells = _check_partitioner(directory / _PARTITIONER, shape)
        _check_below(directory / "datapoint_to_token.npy", cells, "cell")
        _check_below(directory / "hashed_dataset.npy", _CODES, "code")


def _scann_assets(shape: IndexShape) -> list[_Asset]:
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
        found = _ASSET.match(text, at)
        if not found:
            raise ValueError(f"its list of assets is not as ScaNN writes it: {text[at : at + 80].strip()!r}")
        listed.append((found[1], found[2]))
        at = found.end()
    if sorted(listed) != sorted((asset.type, asset.name) for asset in _scann_assets(shape)):
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


def _check_scann_config(path: Path, shape: IndexShape) -> None:
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


class _Reader:
    """The bytes of a file, from front to end."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self._size, self.at = file, size, 0

    def skip(self, count: int) -> int:
        """Go past so many bytes; where they start."""
        start = self.at
        if count > self._size - start:
            raise ValueError(f"it ends after {self._size:,} bytes")
        self.at += count
        return start

    def take(self, form: str) -> tuple[Any, ...]:
        size = struct.calcsize(form)
        self._file.seek(self.skip(size))
        return struct.unpack(form, self._file.read(size))

    def integers(self, count: int) -> NDArray[np.uint64]:
        self._file.seek(self.skip(8 * count))
        return np.frombuffer(self._file.read(8 * count), "<u8")

    def expect(self, what: str, form: str, *values: Any) -> None:
        found = self.take(form)
        if found != values:
            raise ValueError(f"its {what} is {', '.join(map(str, found))}, not {', '.join(map(str, values))}")

    def finish(self) -> None:
        if self.at != self._size:
            raise ValueError(f"{self._size - self.at:,} bytes too many")


@dataclass(frozen=True, slots=True)
class _Lists:
    """Where things are in a faiss file: `floats`, (offset, count) of all that are not codes; `lists`, (offset, keys)
    of each inverted list, codes of `code_size` bytes first and then ids.
    """

    floats: list[tuple[int, int]]
    lists: list[tuple[int, int]]
    code_size: int


def _faiss_lists(path: Path, shape: IndexShape) -> _Lists:
    """Read a faiss index as faiss's index_write.cpp writes those that `ann.build` makes: class, lists, all lengths."""
    with path.open("rb") as file:
        reader = _Reader(file, path.stat().st_size)
        rows, dims = shape.keys, shape.dims
        floats: list[tuple[int, int]] = []

        def index(fourcc: bytes, count: int) -> None:
            reader.expect("class", "<4s", fourcc)
            found = reader.take("<iqqqBi")
            if (found[0], found[1], found[4], found[5]) != (dims, count, 1, _FAISS_INNER_PRODUCT):
                raise ValueError(f"it has {found[1]:,} keys of {found[0]} numbers, not {count:,} of {dims}")

        def numbers(count: int) -> None:
            reader.expect("length", "<Q", count)
            floats.append((reader.skip(4 * count), count))

        def quantizer() -> None:
            kind, _, _, wide, size, trained = reader.take("<iifQQQ")
            learned = 2 * dims if shape.kept == "int8" else 0
            if (kind, wide, size, trained) != (_FAISS_QUANTIZERS[shape.kept], dims, code_size, learned):
                raise ValueError("its scalar quantizer is of another kind")
            floats.append((reader.skip(4 * trained), trained))

        products = math.gcd(dims, max(1, dims // 2))
        code_size = {"float32": 4 * dims, "half": 2 * dims, "int8": dims, "none": products}[shape.kept]
        if not shape.leaves:
            index(b"IxFI" if shape.kept == "float32" else b"IxSQ", rows)
            if shape.kept == "float32":
                numbers(rows * dims)
            else:
                quantizer()
                reader.expect("length", "<Q", rows * code_size)
                reader.skip(rows * code_size)
            reader.finish()
            return _Lists(floats, [], code_size)
        index({"float32": b"IwFl", "none": b"IwPQ"}.get(shape.kept, b"IwSq"), rows)
        cells, _ = reader.take("<QQ")
        if cells != shape.leaves:
            raise ValueError(f"it has {cells:,} cells, not {shape.leaves:,}")
        index(b"IxFI", cells)
        numbers(cells * dims)
        reader.expect("direct map", "<BQ", 0, 0)
        if shape.kept in _FAISS_QUANTIZERS:
            quantizer()
            reader.expect("code size", "<Q", code_size)
            _flag(reader)
        elif shape.kept == "none":
            _flag(reader)
            reader.expect("product quantizer", "<QQQQ", code_size, dims, products, _FAISS_BITS)
            numbers((1 << _FAISS_BITS) * dims)
        # Lists on disk ("ilod") would name a file.
        reader.expect("kind of inverted lists", "<4sQQ", b"ilar", cells, code_size)
        lists = []
        for count in _list_sizes(reader, cells, rows):
            lists.append((reader.skip(count * (code_size + 8)), count))
        reader.finish()
        return _Lists(floats, lists, code_size)


def _flag(reader: _Reader) -> None:
    (flag,) = reader.take("<B")
    if flag > 1:
        raise ValueError(f"a truth value is {flag}")


def _list_sizes(reader: _Reader, cells: int, rows: int) -> Iterator[int]:
    form, length = reader.take("<4sQ")
    if form == b"full" and length == cells:
        sizes = reader.integers(cells)
    elif form == b"sprs" and length % 2 == 0 and length <= 2 * cells:
        pairs = reader.integers(length).reshape(-1, 2)
        if (pairs[:, 0] >= cells).any() or (np.diff(pairs[:, 0].astype(np.int64)) <= 0).any():
            raise ValueError("its inverted lists are not in order")
        sizes = pairs[:, 1]
    else:
        raise ValueError("the sizes of its inverted lists are damaged")
    if (sizes > rows).any() or int(sizes.sum()) != rows:
        raise ValueError(f"its inverted lists do not hold {rows:,} keys")
    yield from sizes.tolist()


def _check_faiss_contents(path: Path, shape: IndexShape) -> None:
    layout = _faiss_lists(path, shape)
    data = np.memmap(path, np.uint8, "r")
    seen = np.zeros(shape.keys if layout.lists else 0, np.bool_)
    for start, count in layout.lists:
        end = start + count * layout.code_size
        ids = np.frombuffer(data, "<i8", count, end) if count else np.zeros(0, np.int64)
        if count and (ids.min() < 0 or ids.max() >= shape.keys):
            raise ValueError("an inverted list names a key that there is not")
        seen[ids] = True
        if shape.kept == "float32" and not _all_finite(data, start, count * shape.dims):
            raise ValueError("it holds a value that is not a number")
    if not seen.all():
        raise ValueError("its inverted lists name a key twice")
    if not all(_all_finite(data, start, count) for start, count in layout.floats):
        raise ValueError("it holds a value that is not a number")


def _all_finite(data: NDArray[np.uint8], start: int, count: int) -> bool:
    return all(
        bool(np.isfinite(np.frombuffer(data, "<f4", min(_CHUNK, count - at), start + 4 * at)).all())
        for at in range(0, count, _CHUNK)
    )
