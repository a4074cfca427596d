"""The corpus: documents as token ids in Parquet, the source of truth for every index."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specds.datastore.manifest import Identity, Provenance, Shard, SourceCount
from specds.datastore.store import Store, Writer, provenance, writing
from specds.errors import CorruptStore

_BATCH = 1024
_FORGED = "restore the store from a copy, or build it again"


@dataclass(frozen=True, slots=True)
class Document:
    """One prompt and what followed it, as the model sees them: chat template applied, special tokens included.

    Attributes:
        doc_id: unique within the store.
        source: where it came from, for counting and removing.
        prompt: int32 token ids; empty for raw text.
        response: int32 token ids.
    """

    doc_id: str
    source: str
    prompt: NDArray[np.int32]
    response: NDArray[np.int32]


def write_shard(
    writer: Writer,
    documents: Sequence[Document],
    *,
    origin: str,
    model: Identity | None = None,
    sampling: dict[str, Any] | None = None,
    replaces: Sequence[str] = (),
    made_by: Provenance | None = None,
) -> None:
    """Write documents as one new corpus file and make it part of the store, in one atomic step.

    Args:
        replaces: corpus files whose documents these are; they leave the store in the same step.
        made_by: how the documents came to be; None: by the running command.

    Raises:
        OutputError: it cannot be written; the store is as it was before.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = writer.shard_path()
    sources: dict[str, SourceCount] = {}
    for document in documents:
        count = sources.get(document.source, SourceCount(0, 0))
        tokens = len(document.prompt) + len(document.response)
        sources[document.source] = SourceCount(count.documents + 1, count.tokens + tokens)
    shard = Shard(
        file=path.relative_to(writer.path).as_posix(),
        documents=len(documents),
        prompt_tokens=sum(len(document.prompt) for document in documents),
        response_tokens=sum(len(document.response) for document in documents),
        origin=origin,
        model=model,
        sampling=sampling or {},
        sources=sources,
        provenance=made_by or provenance(),
    )
    about = {
        "model": {"name": model.name, "fingerprint": model.fingerprint} if model else None,
        "sampling": shard.sampling,
        "tokenizer": writer.manifest.tokenizer.fingerprint,
        "version": shard.provenance.version,
    }
    table = pa.table(
        {
            "doc_id": [document.doc_id for document in documents],
            "source": [document.source for document in documents],
            "prompt_tokens": [document.prompt for document in documents],
            "response_tokens": [document.response for document in documents],
        },
        _schema(),
    ).replace_schema_metadata({"specds": json.dumps(about)})
    with writing(writer.path):
        pq.write_table(table, path, compression="zstd", row_group_size=_BATCH, write_page_checksum=True)
    if replaces:
        writer.replace_shards(list(replaces), shard)
    else:
        writer.add_shard(shard)


def read_documents(store: Store, shards: Sequence[str] | None = None) -> Iterator[Document]:
    """The documents of some or all corpus files, in order, a batch in memory at a time.

    Raises:
        CorruptStore: a file is not the Parquet it should be, or holds ids outside the vocabulary.
    """
    for shard in store.manifest.corpus:
        if shards is None or shard.file in shards:
            yield from _read_shard(store.path / shard.file, store.manifest.vocab_size)


def document_ids(store: Store) -> set[str]:
    """The ids of all documents; token columns are not read."""
    import pyarrow.parquet as pq

    found: set[str] = set()
    for shard in store.manifest.corpus:
        with _reading(store.path / shard.file):
            found.update(pq.read_table(store.path / shard.file, columns=["doc_id"]).column("doc_id").to_pylist())
    return found


@dataclass(frozen=True, slots=True)
class TokenStream:
    """The corpus as one array, for indexing.

    Attributes:
        tokens: uint16[n] or uint32[n]: each document's prompt and response, then a separator.
        starts: int64[documents + 1]: where each document starts; the last entry is n.
        separator: the largest value of the dtype; no token has it.
    """

    tokens: NDArray[np.uint16 | np.uint32]
    starts: NDArray[np.int64]
    separator: int


def token_dtype(vocab_size: int) -> type[np.uint16] | type[np.uint32]:
    """The narrowest dtype that holds every token id and a separator besides."""
    return np.uint16 if vocab_size <= np.iinfo(np.uint16).max else np.uint32


def token_stream(store: Store) -> TokenStream:
    """All documents as one token array with separators.

    Raises:
        CorruptStore: as `read_documents`.
    """
    dtype = token_dtype(store.manifest.vocab_size)
    separator = int(np.iinfo(dtype).max)
    room = store.manifest.tokens + store.manifest.documents
    try:
        tokens: NDArray[np.uint16 | np.uint32] = np.empty(room, dtype)
    except (MemoryError, ValueError) as error:
        raise CorruptStore(
            f"{store.path}: the manifest speaks of {room:,} tokens, more than memory holds", _FORGED
        ) from error
    starts = [0]
    for document in read_documents(store):
        at = starts[-1]
        end = at + len(document.prompt) + len(document.response)
        if end >= room:
            raise CorruptStore(f"{store.path}: the corpus holds more tokens than the manifest says", _FORGED)
        tokens[at : at + len(document.prompt)] = document.prompt
        tokens[at + len(document.prompt) : end] = document.response
        tokens[end] = separator
        starts.append(end + 1)
    if starts[-1] != room:
        raise CorruptStore(f"{store.path}: the corpus holds fewer tokens than the manifest says", _FORGED)
    return TokenStream(tokens, np.array(starts, np.int64), separator)


def _read_shard(path: Path, vocab_size: int) -> Iterator[Document]:
    import pyarrow.parquet as pq

    with _reading(path), pq.ParquetFile(path, page_checksum_verification=True) as file:
        columns = _schema()
        if any(file.schema_arrow.field(one.name).type != one.type for one in columns):
            raise ValueError("a column is of another type")
        for batch in file.iter_batches(_BATCH, columns=columns.names):
            if any(column.null_count for column in batch.columns):
                raise ValueError("a field is null")
            ids, sources = batch.column(0).to_pylist(), batch.column(1).to_pylist()
            prompts, responses = (_lists(batch.column(column), vocab_size) for column in (2, 3))
            for fields in zip(ids, sources, prompts, responses, strict=True):
                yield Document(*fields)


def _schema() -> Any:
    import pyarrow as pa

    tokens = pa.list_(pa.int32())
    return pa.schema(
        [("doc_id", pa.string()), ("source", pa.string()), ("prompt_tokens", tokens), ("response_tokens", tokens)]
    )


def _lists(column: Any, vocab_size: int) -> list[NDArray[np.int32]]:
    """Rows of a list<int32> column as arrays; views of one buffer, not Python integers."""
    flat = column.flatten().to_numpy(zero_copy_only=False)
    if len(flat) and (flat.dtype != np.int32 or flat.min() < 0 or flat.max() >= vocab_size):
        raise ValueError("token ids outside the vocabulary")
    ends = np.cumsum(column.value_lengths().to_numpy(zero_copy_only=False).astype(np.int64))
    return [np.asarray(part) for part in np.split(flat.astype(np.int32, copy=False), ends[:-1])] if len(ends) else []


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Whatever pyarrow raises on a damaged file becomes a CorruptStore that names it."""
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise CorruptStore(f"{path} cannot be read: {reason}", "restore the store from a copy") from error
