"""What two stores hold differently: documents, sources, tokenizers, models, indexes."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from specds.datastore.corpus import Document, read_documents
from specds.datastore.manifest import Identity, Segment, SourceCount
from specds.datastore.store import Store

_NOTHING = SourceCount(0, 0)
_KINDS = ("suffix", "dense")


@dataclass(frozen=True, slots=True)
class SourceDifference:
    """Documents and tokens of one source.

    Attributes:
        first, second: in only one of the two stores.
        both: in both, with the same tokens; by the first store's source.
    """

    first: SourceCount = _NOTHING
    second: SourceCount = _NOTHING
    both: SourceCount = _NOTHING


@dataclass(frozen=True, slots=True)
class IndexDifference:
    """What is there of one kind of index in each store.

    Attributes:
        kind: suffix or dense.
        segments, tokens: how many, and the tokens that they cover.
        parameters: those that differ: name → the values in the segments of the first store, and of the second.
        models: whose hidden states are in it; empty for a suffix index.
    """

    kind: str
    segments: tuple[int, int]
    tokens: tuple[int, int]
    parameters: dict[str, tuple[list[Any], list[Any]]]
    models: tuple[list[Identity], list[Identity]]

    @property
    def differs(self) -> bool:
        """Whether a drafter could tell."""
        return (
            self.tokens[0] != self.tokens[1]
            or bool(self.parameters)
            or _names(self.models[0]) != _names(self.models[1])
        )


@dataclass(frozen=True, slots=True)
class Difference:
    """What two stores hold differently.

    Attributes:
        tokenizers: of the first store and of the second.
        models: that wrote documents, in each store.
        first, second: ids of the documents that only one store has; an id under which the other holds other tokens
            is in both lists.
        changed: those ids.
        renamed: pairs of ids of documents with the same tokens; the stores have them under different ids.
        relabelled: ids of documents with the same tokens and another source.
        sources: by source.
        indexes: by kind, those that at least one store has.
    """

    tokenizers: tuple[Identity, Identity]
    models: tuple[list[Identity], list[Identity]]
    first: list[str] = field(default_factory=list)
    second: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    renamed: list[tuple[str, str]] = field(default_factory=list)
    relabelled: list[str] = field(default_factory=list)
    sources: dict[str, SourceDifference] = field(default_factory=dict)
    indexes: list[IndexDifference] = field(default_factory=list)

    @property
    def same_tokenizer(self) -> bool:
        """Whether equal ids are equal tokens."""
        return self.tokenizers[0].fingerprint == self.tokenizers[1].fingerprint

    @property
    def same_contents(self) -> bool:
        """Whether both hold the same documents: tokens and sources; ids, order, models and indexes do not count."""
        return self.same_tokenizer and not (self.first or self.second or self.relabelled)

    def record(self, top: int) -> dict[str, Any]:
        """As JSON.

        Args:
            top: ids listed of each kind of document.
        """
        listed: dict[str, list[Any]] = {
            "first": self.first,
            "second": self.second,
            "changed": self.changed,
            "renamed": [list(pair) for pair in self.renamed],
            "relabelled": self.relabelled,
        }
        return {
            "same_contents": self.same_contents,
            "tokenizers": [dataclasses.asdict(identity) for identity in self.tokenizers],
            "models": [[dataclasses.asdict(model) for model in models] for models in self.models],
            "documents": {name: len(ids) for name, ids in listed.items()},
            "ids": {name: ids[:top] for name, ids in listed.items()},
            "sources": {name: dataclasses.asdict(source) for name, source in self.sources.items()},
            "indexes": [{**dataclasses.asdict(index), "differs": index.differs} for index in self.indexes],
        }


def difference(first: Store, second: Store) -> Difference:
    """Compare two stores: documents by their ids, and those whose id the other store lacks by their tokens.

    Of documents with equal tokens as many are in both as the store with fewer has. Documents of two tokenizers are
    never the same. In memory is an entry a document, no tokens.

    Raises:
        CorruptStore: a corpus cannot be read.
    """
    result = Difference(
        (first.manifest.tokenizer, second.manifest.tokenizer), (_writers(first), _writers(second)), indexes=[]
    )
    comparable = result.same_tokenizer
    left: dict[str, _Entry] = {document.doc_id: _entry(document) for document in read_documents(first)}
    # What the second store has under an id of its own, or with other tokens.
    right: list[tuple[str, _Entry]] = []
    met: list[tuple[str, _Entry, str, _Entry]] = []
    for document in read_documents(second):
        mine, other = left.get(document.doc_id), _entry(document)
        if mine is not None and comparable and mine.digest == other.digest:
            met.append((document.doc_id, mine, document.doc_id, other))
            del left[document.doc_id]
        else:
            right.append((document.doc_id, other))
    waiting: dict[bytes, list[str]] = defaultdict(list)
    if comparable:
        for doc_id, mine in reversed(left.items()):
            waiting[mine.digest].append(doc_id)
    unmet: list[tuple[str, _Entry]] = []
    for doc_id, other in right:
        twins = waiting.get(other.digest)
        if twins:
            twin = twins.pop()
            met.append((twin, left.pop(twin), doc_id, other))
            result.renamed.append((twin, doc_id))
        else:
            unmet.append((doc_id, other))
    sources: dict[str, SourceDifference] = {}
    for doc_id, mine, _, other in met:
        _count(sources, mine, "both")
        if mine.source != other.source:
            result.relabelled.append(doc_id)
    for doc_id, mine in left.items():
        _count(sources, mine, "first")
        result.first.append(doc_id)
    for doc_id, other in unmet:
        _count(sources, other, "second")
        result.second.append(doc_id)
        if doc_id in left:
            result.changed.append(doc_id)
    result.sources.update(sorted(sources.items()))
    for kind in _KINDS:
        pair: tuple[list[Segment], list[Segment]] = (getattr(first.manifest, kind), getattr(second.manifest, kind))
        if pair[0] or pair[1]:
            result.indexes.append(_compare_indexes(kind, *pair))
    return result


@dataclass(frozen=True, slots=True)
class _Entry:
    digest: bytes
    source: str
    tokens: int


def _entry(document: Document) -> _Entry:
    prompt, response = document.prompt.tobytes(), document.response.tobytes()
    digest = hashlib.sha256(len(prompt).to_bytes(8, "little") + prompt + response).digest()
    return _Entry(digest, document.source, len(document.prompt) + len(document.response))


def _count(sources: dict[str, SourceDifference], entry: _Entry, where: str) -> None:
    old = sources.get(entry.source, SourceDifference())
    counts = {name: getattr(old, name) for name in ("first", "second", "both")}
    counts[where] = SourceCount(counts[where].documents + 1, counts[where].tokens + entry.tokens)
    sources[entry.source] = SourceDifference(**counts)


def _writers(store: Store) -> list[Identity]:
    return _distinct([shard.model for shard in store.manifest.corpus])


def _distinct(models: Sequence[Identity | None]) -> list[Identity]:
    """Models without repetition, in the order of their names."""
    by_fingerprint = {model.fingerprint: model for model in models if model is not None}
    return sorted(by_fingerprint.values(), key=lambda model: (model.name, model.fingerprint))


def _names(models: Sequence[Identity]) -> list[str]:
    return sorted(model.fingerprint for model in models)


def _compare_indexes(kind: str, first: list[Segment], second: list[Segment]) -> IndexDifference:
    both = (first, second)
    parameters = {}
    if first and second:
        names = sorted({name for segments in both for segment in segments for name in segment.parameters})
        for name in names:
            values = tuple(_values(segments, name) for segments in both)
            if values[0] != values[1]:
                parameters[name] = (values[0], values[1])
    return IndexDifference(
        kind,
        (len(first), len(second)),
        (sum(segment.tokens for segment in first), sum(segment.tokens for segment in second)),
        parameters,
        (_distinct([segment.model for segment in first]), _distinct([segment.model for segment in second])),
    )


def _values(segments: Sequence[Segment], name: str) -> list[Any]:
    """The values that a parameter has in segments, each once; None where a segment lacks it."""
    values = {
        json.dumps(segment.parameters.get(name), sort_keys=True): segment.parameters.get(name) for segment in segments
    }
    return [values[key] for key in sorted(values)]
