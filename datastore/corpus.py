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
from specds.datastore.provenance import provenance
from specds.datastore.store import Store
from specds.datastore.writer import Writer, writing
from specds.errors import CorruptStore, StoreError
from specds.files import create
from specds.limits import MAX_ROW
from specds.parquet import TooLarge, require_columns
from specds.parquet_bounds import BoundedFile, batch_rows

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
    licence: str = "",
    made_by: Provenance | None = None,
) -> Shard:
    """Write documents as one new corpus file, which `Writer.change` then makes part of the store.

    Args:
        made_by: how the documents came to be; None: by the running command.

    Raises:
        OutputError: it cannot be written; the store is as it was before. StoreError: a document is too long.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = writer.shard_path()
    sources: dict[str, SourceCount] = {}
    for document in documents:
        if max(len(document.prompt), len(document.response)) > MAX_ROW.bytes:
            raise StoreError(
                f"document {document.doc_id} has more than {MAX_ROW.bytes:,} tokens, which nobody would read",
                f"shorten it, or {MAX_ROW.hint}",
            )
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
        licence=licence,
        provenance=made_by or provenance(),
    )
    about = {
        "model": {"name": model.name, "fingerprint": model.fingerprint} if model else None,
        "sampling": shard.sampling,
        "licence": licence,
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
    with writing(writer.path), create(path, writer.path) as file:
        pq_writer = pq.ParquetWriter(file, table.schema, compression="zstd", write_page_checksum=True)
        with pq_writer:
            for first, last in _row_groups(documents):
                pq_writer.write_table(table.slice(first, last - first), row_group_size=last - first)
    return shard


def _row_groups(documents: Sequence[Document]) -> Iterator[tuple[int, int]]:
    """Where row groups start and end, none larger than what is read at once."""
    first = tokens = 0
    for number, document in enumerate(documents):
        size = len(document.prompt) + len(document.response)
        if number - first == _BATCH or (tokens + size > MAX_ROW.default and number > first):
            yield first, number
            first, tokens = number, 0
        tokens += size
    if documents:
        yield first, len(documents)


def write_like(writer: Writer, documents: Sequence[Document], shard: Shard) -> Shard:
    """Write documents of a shard, or of several alike, as a new corpus file that says of itself what it said."""
    return write_shard(
        writer,
        documents,
        origin=shard.origin,
        model=shard.model,
        sampling=shard.sampling,
        licence=shard.licence,
        made_by=shard.provenance,
    )


def add_documents(writer: Writer, documents: Sequence[Document], **about: Any) -> None:
    """Write documents as `write_shard` does, and make them part of the store."""
    writer.change(corpus=[*writer.manifest.corpus, write_shard(writer, documents, **about)])


def read_documents(store: Store, shards: Sequence[str] | None = None) -> Iterator[Document]:
    """The documents of some or all corpus files, in order, a batch in memory at a time.

    Raises:
        CorruptStore: a file is not the Parquet it should be, or holds ids outside the vocabulary.
    """
    for shard in store.manifest.corpus:
        if shards is None or shard.file in shards:
            yield from _read_shard(store.path / shard.file, store.manifest.vocab_size)


def document_ids(store: Store) -> set[str]:
    """The ids of all documents; token columns are not read.

    Raises:
        CorruptStore: as `read_documents`.
    """
    found: set[str] = set()
    for shard in store.manifest.corpus:
        path = store.path / shard.file
        with _reading(path), path.open("rb") as stream, BoundedFile(stream) as file:
            require_columns(file.schema, [_schema().field("doc_id")])
            for batch in file.batches(["doc_id"], _BATCH):
                found.update(batch.column(0).to_pylist())
    return found


def check_claims(store: Store, shard: Shard) -> None:
    """Compare what the manifest says of a corpus file with the file's own headers; no document is read.

    Raises:
        CorruptStore: it says more documents or tokens, or fewer, than the file's pages do; or too many to read.
    """
    path = store.path / shard.file
    with _reading(path), path.open("rb") as stream, BoundedFile(stream) as file:
        values = dict.fromkeys(("prompt_tokens", "response_tokens"), 0)
        for group, rows in enumerate(file.groups):
            chunks = file.chunks(group, list(values))
            batch_rows(chunks, rows, _BATCH)
            for chunk in chunks:
                values[chunk.path.partition(".")[0]] += chunk.values
        documents = file.rows
    # An empty list counts as one value.
    for name, said in (("prompt_tokens", shard.prompt_tokens), ("response_tokens", shard.response_tokens)):
        if documents != shard.documents or not values[name] - documents <= said <= values[name]:
            raise CorruptStore(
                f"{path}: the manifest says {shard.documents:,} documents with {said:,} {name}, and the file "
                f"{documents:,} with at most {values[name]:,}",
                _FORGED,
            )


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


def token_stream(store: Store, shards: Sequence[Shard] | None = None) -> TokenStream:
    """The documents of some corpus files (None: of all) as one token array with separators, in the corpus's order.

    Raises:
        CorruptStore: as `read_documents`.
    """
    shards = store.manifest.corpus if shards is None else shards
    dtype = token_dtype(store.manifest.vocab_size)
    separator = int(np.iinfo(dtype).max)
    for shard in shards:
        check_claims(store, shard)
    documents = sum(shard.documents for shard in shards)
    room = sum(shard.tokens for shard in shards) + documents
    try:
        # Nothing is written beyond what is read, so that a false claim takes no memory.
        tokens: NDArray[np.uint16 | np.uint32] = np.empty(room, dtype)
        starts = np.zeros(documents + 1, np.int64)
    except (MemoryError, ValueError) as error:
        raise CorruptStore(
            f"{store.path}: the manifest speaks of {room:,} tokens, more than memory holds", _FORGED
        ) from error
    row = 0
    for shard in shards:
        for batch in _batches(store.path / shard.file, store.manifest.vocab_size):
            prompts, responses = batch.prompts, batch.responses
            ends = starts[row] + np.cumsum(prompts.lengths + responses.lengths + 1)
            if row + len(ends) > documents or (len(ends) and ends[-1] > room):
                raise CorruptStore(f"{store.path}: the corpus holds more tokens than the manifest says", _FORGED)
            starts[row + 1 : row + 1 + len(ends)] = ends
            begins = starts[row : row + len(ends)]
            tokens[prompts.places(begins)] = prompts.flat
            tokens[responses.places(begins + prompts.lengths)] = responses.flat
            tokens[ends - 1] = separator
            row += len(ends)
    if row != documents or starts[-1] != room:
        raise CorruptStore(f"{store.path}: the corpus holds fewer tokens than the manifest says", _FORGED)
    return TokenStream(tokens, starts, separator)


@dataclass(frozen=True, slots=True)
class _Lists:
    """A batch of token lists: int32[n] concatenated, and int64[rows] lengths."""

    flat: NDArray[np.int32]
    lengths: NDArray[np.int64]

    def places(self, starts: NDArray[np.int64]) -> NDArray[np.int64]:
        """int64[n]: where each token goes if the lists start at these places."""
        begins = np.cumsum(self.lengths) - self.lengths
        places: NDArray[np.int64] = np.arange(len(self.flat)) + np.repeat(starts - begins, self.lengths)
        return places

    def rows(self) -> list[NDArray[np.int32]]:
        """Each list by itself, a view."""
        return np.split(self.flat, np.cumsum(self.lengths)[:-1]) if len(self.lengths) else []


@dataclass(frozen=True, slots=True)
class _Batch:
    ids: list[str]
    sources: list[str]
    prompts: _Lists
    responses: _Lists


def _read_shard(path: Path, vocab_size: int) -> Iterator[Document]:
    for batch in _batches(path, vocab_size):
        for fields in zip(batch.ids, batch.sources, batch.prompts.rows(), batch.responses.rows(), strict=True):
            yield Document(*fields)


def _batches(path: Path, vocab_size: int) -> Iterator[_Batch]:
    with (
        _reading(path),
        path.open("rb") as stream,
        BoundedFile(stream, page_checksum_verification=True) as file,
    ):
        columns = _schema()
        if any(file.schema.field(one.name).type != one.type for one in columns):
            raise ValueError("a column is of another type")
        for batch in file.batches(columns.names, _BATCH):
            if any(column.null_count for column in batch.columns):
                raise ValueError("a field is null")
            ids, sources = batch.column(0).to_pylist(), batch.column(1).to_pylist()
            yield _Batch(ids, sources, *(_lists(batch.column(column), vocab_size) for column in (2, 3)))


def _schema() -> Any:
    import pyarrow as pa

    tokens = pa.list_(pa.int32())
    return pa.schema(
        [("doc_id", pa.string()), ("source", pa.string()), ("prompt_tokens", tokens), ("response_tokens", tokens)]
    )


def _lists(column: Any, vocab_size: int) -> _Lists:
    """Rows of a list<int32> column: views of one buffer, not Python integers."""
    lengths = _integers(column.value_lengths()).astype(np.int64)
    if len(lengths) and lengths.max() > MAX_ROW.bytes:
        raise TooLarge(f"a document has {lengths.max():,} tokens")
    flat = _integers(column.flatten())
    if len(flat) and (flat.min() < 0 or flat.max() >= vocab_size):
        raise ValueError("token ids outside the vocabulary")
    return _Lists(flat, lengths)


def _integers(array: Any) -> NDArray[np.int32]:
    """A view of an int32 array. (Its `to_numpy` imports pandas where there is one, which takes half a second.)"""
    if array.null_count:
        raise ValueError("a token is null")
    return np.frombuffer(array.buffers()[1] or b"", np.int32, len(array), 4 * array.offset)


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Whatever pyarrow raises on a damaged file becomes a CorruptStore that names it."""
    import pyarrow as pa

    try:
        yield
    except TooLarge as error:
        raise CorruptStore(f"{path} takes too much memory to read: {error}", MAX_ROW.hint) from error
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise CorruptStore(f"{path} cannot be read: {reason}", "restore the store from a copy") from error
