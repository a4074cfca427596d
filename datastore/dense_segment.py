"""Segments of a dense index: written from keys, read back as keys, and with documents taken out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specds.datastore import ann
from specds.datastore.dense import map_values
from specds.datastore.manifest import Identity, Segment
from specds.datastore.mapped import working_array, write_array
from specds.datastore.normalizer import Normalizer
from specds.datastore.provenance import provenance
from specds.datastore.writer import Writer, writing
from specds.errors import CorruptStore
from specds.files import files_in, link, make_directory, remove_tree

Progress = Callable[[str, int, int], None]

_CHUNK = 65_536
_PROBES = 1_000


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of some documents, and what followed.

    Attributes:
        shards: the corpus files that hold the documents, in the corpus's order.
        corpus_tokens: tokens of the documents.
        keys: float32[n, dims]; may be memory-mapped.
        positions: int64[n], where each key's continuation starts in `tokens`.
        tokens: uint16[m] or uint32[m], each document and a separator.
    """

    shards: list[str]
    corpus_tokens: int
    keys: NDArray[np.float32]
    positions: NDArray[np.int64]
    tokens: NDArray[Any]


def load_normalizer(root: Path, segment: Segment) -> Normalizer:
    """The normalizer of a segment.

    Raises:
        CorruptStore: its file is damaged.
    """
    try:
        return Normalizer.load(root / segment.directory / "normalizer.safetensors")
    except (ValueError, OSError) as error:
        raise _damaged(root, segment, error) from error


def read_keys(root: Path, segment: Segment) -> Keys | None:
    """The keys of a segment but those of removed documents; None where they are not kept well enough.

    Raises:
        CorruptStore: the segment's files are damaged.
    """
    directory = root / segment.directory
    keys = ann.stored_keys(directory / "keys", segment.parameters)
    if keys is None:
        return None
    try:
        positions, tokens = map_values(directory, segment.parameters)
    except (KeyError, TypeError, ValueError, OverflowError, OSError) as error:
        raise _damaged(root, segment, error) from error
    there = positions != np.iinfo(positions.dtype).max
    if not there.all():
        keys, positions = keys[there], positions[there]
    return Keys(segment.shards, segment.tokens, keys, positions.astype(np.int64), tokens)


def write_segment(
    writer: Writer,
    parts: Sequence[Keys],
    normalizer: Normalizer,
    model: Identity,
    about: dict[str, Any],
    progress: Progress,
) -> Segment:
    """Index keys, measure the index, and write a segment, which `Writer.change` then makes part of the store.

    Args:
        parts: keys of documents, concatenated in the corpus's order; at least one key.
        about: `index`, `kept`, `leaves`, `search` (see `ann.build`); everything else goes into the parameters.
    """
    directory = writer.segment_path("dense")
    with writing(directory):
        keys = _joined(parts, directory / "keys.work", writer.path)
        normalizer.save(directory / "normalizer.safetensors", writer.path)
        make_directory(directory / "keys", writer.path, new=True)
        progress("index", 0, len(keys))
        settings = {"leaves": about["leaves"], "search": about["search"], "kept": about["kept"]}
        built = ann.build(about["index"], keys, directory / "keys", **settings)
        starts = np.cumsum([0, *(len(part.tokens) for part in parts)])
        positions = np.concatenate([part.positions + start for part, start in zip(parts, starts, strict=False)])
        # The largest value of the dtype says that a document is gone.
        positions = positions.astype(np.uint32 if starts[-1] < 1 << 32 else np.uint64)
        write_array(directory / "positions.bin", positions, below=writer.path)
        write_array(directory / "tokens.bin", *(part.tokens for part in parts), below=writer.path)
        parameters = {
            **{name: value for name, value in about.items() if name not in ("index", *settings)},
            **built,
            "hidden_size": len(normalizer.mean),
            "sampled": normalizer.sampled,
            "removed": 0,
            "positions": int(starts[-1]),
            "position_dtype": str(positions.dtype),
            "token_dtype": str(parts[0].tokens.dtype),
            "separator": int(np.iinfo(parts[0].tokens.dtype).max),
        }
        quality = {"explained_variance": normalizer.explained_variance}
        quality |= _measure(ann.load(directory / "keys", parameters, keys.shape[1]), keys, progress)
        del keys
        remove_tree(directory / "keys.work", writer.path)
    return Segment(
        directory=directory.relative_to(writer.path).as_posix(),
        shards=[name for part in parts for name in part.shards],
        tokens=sum(part.corpus_tokens for part in parts),
        model=model,
        parameters=parameters,
        quality=quality,
        provenance=provenance(),
    )


def without_documents(writer: Writer, segment: Segment, kept: NDArray[np.bool_]) -> Segment:
    """A copy of a segment that answers with some of its documents only; `Writer.change` makes it part of the store.

    The tokens of the others are not in it, and their keys lead nowhere; the keys themselves go when the segment is
    joined with another, compacted or built anew.

    Args:
        kept: bool[documents], in the segment's order.

    Raises:
        CorruptStore: the segment does not hold so many documents, or is damaged.
    """
    old = writer.path / segment.directory
    try:
        positions, tokens = map_values(old, segment.parameters)
        ends = np.flatnonzero(tokens == np.iinfo(tokens.dtype).max) + 1
        if len(ends) != len(kept):
            raise ValueError(f"it holds {len(ends):,} documents, and the corpus {len(kept):,}")
    except (KeyError, TypeError, ValueError, OverflowError, OSError) as error:
        raise _damaged(writer.path, segment, error) from error
    gone = np.iinfo(positions.dtype).max
    lengths = np.diff(ends, prepend=0)
    owner = np.minimum(np.searchsorted(ends, positions, side="right"), len(ends) - 1)
    shift = np.cumsum(np.where(kept, 0, lengths))
    there = (positions != gone) & kept[owner]
    moved = np.where(there, positions.astype(np.int64) - shift[owner], gone).astype(positions.dtype)
    directory = writer.segment_path("dense")
    with writing(directory):
        write_array(directory / "positions.bin", moved, below=writer.path)
        left = tokens[np.repeat(kept, lengths)]
        write_array(directory / "tokens.bin", left, below=writer.path)
        make_directory(directory / "keys", writer.path, new=True)
        for name in ("normalizer.safetensors", *(f"keys/{name}" for name in files_in(old / "keys", writer.path))):
            link(old / name, directory / name, writer.path)
    changes = {"positions": len(left), "removed": int((moved == gone).sum())}
    return dataclasses.replace(
        segment,
        directory=directory.relative_to(writer.path).as_posix(),
        tokens=len(left) - int(kept.sum()),
        parameters=segment.parameters | changes,
    )


def _joined(parts: Sequence[Keys], work: Path, below: Path) -> NDArray[np.float32]:
    if len(parts) == 1:
        return parts[0].keys
    total = sum(len(part.keys) for part in parts)
    keys = working_array(work, (total, parts[0].keys.shape[1]), below)
    start = 0
    for part in parts:
        for row in range(0, len(part.keys), _CHUNK):
            chunk = part.keys[row : row + _CHUNK]
            keys[start : start + len(chunk)] = chunk
            start += len(chunk)
    return keys


def _damaged(root: Path, segment: Segment, error: Exception) -> CorruptStore:
    return CorruptStore(
        f"{root / segment.directory} is not the dense index that the manifest describes: {error!r}",
        "run `specds rebuild`",
    )


def _measure(searcher: ann.Searcher, keys: NDArray[np.float32], progress: Progress) -> dict[str, Any]:
    """recall@10 against exact search, and self-retrieval MRR (DReSD Eq. 4), over keys drawn evenly at random."""
    probes = np.sort(np.random.default_rng(1).choice(len(keys), min(_PROBES, len(keys)), replace=False))
    queries = np.ascontiguousarray(keys[probes])
    k = min(10, len(keys))
    best = np.empty((len(probes), 0), np.float32)
    for start in range(0, len(keys), _CHUNK):
        joined = np.concatenate([best, queries @ keys[start : start + _CHUNK].T], axis=1)
        best = np.sort(np.partition(joined, -min(k, joined.shape[1]), axis=1)[:, -k:], axis=1)[:, ::-1]
        progress("measure", min(start + _CHUNK, len(keys)), len(keys))
    hits, ranks = 0, []
    for query, row, exact in zip(queries, probes, best, strict=True):
        similarity, rows = searcher.search(query, 100)
        # A neighbour counts as right when it is as near as the k-th exact one: equal keys are interchangeable.
        hits += int((similarity[:k] >= exact[-1] - 1e-5).sum())
        where = np.flatnonzero(rows == row)
        ranks.append(1.0 / (1 + int(where[0])) if len(where) else 0.0)
    return {
        "recall_at_10": round(hits / (k * len(probes)), 4),
        "self_retrieval_mrr": round(float(np.mean(ranks)), 4),
        "probes": len(probes),
    }
