"""A store's documents for other programs: JSON records, Parquet, and the lookup cache of llama.cpp."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from specds.datastore.corpus import Document, read_documents
from specds.datastore.store import Store, require_tokenizer
from specds.datastore.writer import writing
from specds.errors import OutputError, UsageError
from specds.files import replacing, target_of
from specds.tokenizer import Tokenizer

_ROW_GROUP = 1024
_COUNTED_AT_ONCE = 1 << 22
# llama.cpp, common/ngram-cache.h: LLAMA_NGRAM_MAX tokens are stored, of which a static cache uses LLAMA_NGRAM_STATIC.
_STORED = 4
_CONTEXT = 2
_NO_TOKEN = -1


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written.

    Attributes:
        documents, tokens: prompts and responses that went in.
        contexts: for a lookup cache, the pairs of tokens in it; else 0.
    """

    documents: int
    tokens: int
    contexts: int = 0


def export_records(
    store: Store, sources: Collection[str] = (), tokenizer: Tokenizer | None = None
) -> Iterator[dict[str, Any]]:
    """The documents as JSON would have them, in the order of the corpus, a batch in memory at a time.

    Args:
        sources: only documents of these; empty: all.
        tokenizer: the store's, to add the texts `prompt` and `response`; special tokens are left out of them.

    Returns:
        records of `doc_id`, `source`, `prompt_tokens` and `response_tokens`.

    Raises:
        UsageError: the store has no such source. ForeignTokenizer: the tokenizer is not the store's.
        CorruptStore: the corpus cannot be read.
    """
    if tokenizer is not None:
        require_tokenizer(store, tokenizer)
    documents = _selected(store, sources)

    def records() -> Iterator[dict[str, Any]]:
        for document in documents:
            record: dict[str, Any] = {
                "doc_id": document.doc_id,
                "source": document.source,
                "prompt_tokens": document.prompt.tolist(),
                "response_tokens": document.response.tolist(),
            }
            if tokenizer is not None:
                record["prompt"] = tokenizer.decode(record["prompt_tokens"])
                record["response"] = tokenizer.decode(record["response_tokens"])
            yield record

    return records()


def export_jsonl(
    path: Path, store: Store, sources: Collection[str] = (), tokenizer: Tokenizer | None = None
) -> Exported:
    """The same as a file of JSON lines. It is there whole, or not at all.

    Raises:
        OutputError: the file cannot be written. And what `export_records` raises.
    """
    documents = tokens = 0
    records = export_records(store, sources, tokenizer)
    with _replacing(path, store) as file:
        for record in records:
            file.write(json.dumps(record, ensure_ascii=True).encode("ascii") + b"\n")
            documents += 1
            tokens += _length(record)
    return Exported(documents, tokens)


def export_parquet(
    path: Path, store: Store, sources: Collection[str] = (), tokenizer: Tokenizer | None = None
) -> Exported:
    """The same as a Parquet file; its metadata `specds` names the tokenizer. It is there whole, or not at all.

    Raises:
        OutputError: the file cannot be written. And what `export_records` raises.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    documents = tokens = 0
    records = export_records(store, sources, tokenizer)
    lists = pa.list_(pa.int32())
    fields = [("doc_id", pa.string()), ("source", pa.string()), ("prompt_tokens", lists), ("response_tokens", lists)]
    if tokenizer is not None:
        fields += [("prompt", pa.string()), ("response", pa.string())]
    identity = store.manifest.tokenizer
    about = {"tokenizer": {"name": identity.name, "fingerprint": identity.fingerprint}}
    schema = pa.schema(fields, metadata={"specds": json.dumps(about)})
    with (
        _replacing(path, store) as sink,
        pq.ParquetWriter(sink, schema, compression="zstd", write_page_checksum=True) as file,
    ):
        for rows in _batches(records):
            for row in rows if tokenizer is not None else ():
                # Lone surrogates, which a byte fallback can give, are not valid UTF-8.
                row |= {name: row[name].encode("utf-8", "replace").decode() for name in ("prompt", "response")}
            file.write_batch(pa.RecordBatch.from_pylist(rows, schema))
            documents += len(rows)
            tokens += sum(map(_length, rows))
    return Exported(documents, tokens)


def export_lookup_cache(path: Path, store: Store, sources: Collection[str] = ()) -> Exported:
    """A static lookup cache for llama.cpp (`--lookup-cache-static`): what follows each two tokens, and how often.

    The file is what `llama-lookup-create` writes (llama.cpp, common/ngram-cache.cpp): for each context four int32,
    the last two of them -1; int32, how many tokens follow it; for each of those two int32, the token and its count.
    Little-endian, as on the machines that llama.cpp runs on; without header or end mark. Here contexts and tokens
    are in rising order, and none reaches over a document's end. Counts stop at 2^31 - 1. The cache fits a model
    whose GGUF file has the same token ids.

    Raises:
        UsageError: the store has no such source, or its vocabulary is larger than 2^21.
        OutputError: the file cannot be written. CorruptStore: the corpus cannot be read.
    """
    bits = max(1, (store.manifest.vocab_size - 1).bit_length())
    if 3 * bits > 63:
        raise UsageError(
            f"{store.path} has a vocabulary of {store.manifest.vocab_size:,} tokens",
            "a lookup cache is written for up to 2,097,152",
        )
    documents = _selected(store, sources)
    with _replacing(path, store) as file:
        count = _Count(bits)
        for document in documents:
            count.add(document)
        keys, counts = count.total()
        contexts = _write_lookups(file, keys, counts, bits)
    return Exported(count.documents, count.tokens, contexts)


class _Count:
    """How often each three tokens stand in a row; in memory are the different ones, 16 bytes each, a few times."""

    def __init__(self, bits: int) -> None:
        self.documents = 0
        self.tokens = 0
        self._bits = bits
        self._waiting: list[NDArray[np.int64]] = []
        self._held = 0
        # Sorted, of falling size, so that each key is merged a logarithmic number of times.
        self._runs: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []

    def add(self, document: Document) -> None:
        text = np.concatenate([document.prompt, document.response]).astype(np.int64)
        self.documents += 1
        self.tokens += len(text)
        self._waiting.append((text[:-2] << 2 * self._bits) | (text[1:-1] << self._bits) | text[2:])
        self._held += len(text)
        if self._held >= _COUNTED_AT_ONCE:
            self._settle()

    def total(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The keys in rising order, and their counts."""
        self._settle()
        while len(self._runs) > 1:
            self._merge()
        return self._runs[0]

    def _settle(self) -> None:
        keys = np.concatenate([*self._waiting, np.empty(0, np.int64)])
        self._waiting.clear()
        self._held = 0
        unique, counts = np.unique(keys, return_counts=True)
        self._runs.append((unique, counts.astype(np.int64)))
        while len(self._runs) > 1 and len(self._runs[-2][0]) < 2 * len(self._runs[-1][0]):
            self._merge()

    def _merge(self) -> None:
        pair = [self._runs.pop(), self._runs.pop()]
        keys, counts = (np.concatenate([run[column] for run in pair]) for column in (0, 1))
        order = np.argsort(keys, kind="stable")
        keys, counts = keys[order], counts[order]
        first = np.flatnonzero(np.append(True, keys[1:] != keys[:-1])[: len(keys)])
        self._runs.append((keys[first], np.add.reduceat(counts, first) if len(first) else counts))


def _write_lookups(file: IO[bytes], keys: NDArray[np.int64], counts: NDArray[np.int64], bits: int) -> int:
    """Sorted keys of three tokens as a lookup cache; returns the number of contexts."""
    mask = (1 << bits) - 1
    contexts = keys >> bits
    starts = np.flatnonzero(np.append(True, contexts[1:] != contexts[:-1])[: len(keys)])
    bounds = np.append(starts, len(keys))
    header = _STORED + 1
    first = 0
    while first < len(starts):
        last = max(first + 1, int(np.searchsorted(bounds, bounds[first] + _COUNTED_AT_ONCE, "right")) - 1)
        low, high = int(bounds[first]), int(bounds[last])
        heads = header * np.arange(last - first) + 2 * (starts[first:last] - low)
        sizes = np.diff(bounds[first : last + 1])
        words = np.empty(header * (last - first) + 2 * (high - low), "<i4")
        pair = contexts[starts[first:last]]
        words[heads], words[heads + 1] = pair >> bits, pair & mask
        for place in range(_CONTEXT, _STORED):
            words[heads + place] = _NO_TOKEN
        words[heads + _STORED] = sizes
        tokens = header * (np.repeat(np.arange(last - first), sizes) + 1) + 2 * np.arange(high - low)
        words[tokens] = keys[low:high] & mask
        words[tokens + 1] = np.minimum(counts[low:high], np.iinfo(np.int32).max)
        file.write(words.tobytes())
        first = last
    return len(starts)


def _selected(store: Store, sources: Collection[str]) -> Iterator[Document]:
    known = {name for shard in store.manifest.corpus for name in shard.sources}
    for name in sources:
        if name not in known:
            raise UsageError(f"{store.path} has no source {name!r}", "`specds inspect` lists the sources of a store")
    return (document for document in read_documents(store) if not sources or document.source in sources)


def _batches(records: Iterator[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    rows: list[dict[str, Any]] = []
    for record in records:
        rows.append(record)
        if len(rows) == _ROW_GROUP:
            yield rows
            rows = []
    if rows:
        yield rows


def _length(record: dict[str, Any]) -> int:
    return len(record["prompt_tokens"]) + len(record["response_tokens"])


@contextlib.contextmanager
def _replacing(path: Path, store: Store) -> Iterator[IO[bytes]]:
    """`replacing`, for a path that may be written: no device, no pipe, no file of the store."""
    path = target_of(path)
    if path.is_relative_to(store.path.resolve()):
        raise OutputError(f"{path} is inside the store", "choose a path outside of it")
    with writing(path), replacing(path) as file:
        yield file
