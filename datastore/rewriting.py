"""Changing the documents of a store, or taking some out.

Every change is one step: new files beside the old ones, then the manifest. Indexes never speak of what is gone: a
suffix segment over changed files is sorted again, a dense one forgets the documents.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specds.datastore.build_suffix import write_segments
from specds.datastore.corpus import Document, check_claims, read_documents, write_like
from specds.datastore.dense_segment import without_documents
from specds.datastore.manifest import Manifest, Segment, Shard
from specds.datastore.provenance import history_line
from specds.datastore.segments import require_memory
from specds.datastore.store import Store
from specds.datastore.writer import Writer
from specds.errors import UsageError

# Hexadecimal digits of the digests in the history, which tell a request from others.
_DIGITS = 16

# Bytes a token of a corpus file that is rewritten: itself, and once more in the new file.
_BYTES = 8
Rewrite = Callable[[Document], Sequence[Document]]


@dataclass(frozen=True, slots=True)
class Removal:
    """What was taken out of a store.

    Attributes:
        documents, tokens: of the corpus.
        shards: corpus files that were written anew, or went.
        segments: index segments that were written anew, or went.
        added: documents that took the place of others.
        done: when the same was done before, if nothing was left of it to do.
    """

    documents: int
    tokens: int
    shards: int
    segments: int
    added: int = 0
    done: str | None = None


def remove(store: Store, *, sources: Sequence[str] = (), ids: Sequence[str] = ()) -> Removal:
    """Take documents out of a store and its indexes, by source or by id.

    What the same request has removed before need not be there: a run that was killed after it was done can be repeated.

    Raises:
        UsageError: the store has no such source or document, and never removed it; nothing is removed then.
        StoreLocked, OutputError, CorruptStore: see their docstrings.
    """
    wanted = set(ids)
    with store.writer() as writer:
        known = {name for shard in writer.manifest.corpus for name in shard.sources}
        what = _removed(sources, wanted)
        before = _done(writer.manifest, what)
        for source in sources:
            if source not in known and before is None:
                named = ", ".join(sorted(known)[:10]) or "none"
                raise UsageError(f"{store.path} has no source {source!r}", f"its sources are: {named}")
        seen: set[str] = set()

        def gone(document: Document) -> Sequence[Document]:
            if document.doc_id in wanted:
                seen.add(document.doc_id)
                return ()
            return () if document.source in sources else (document,)

        touched = (
            None if wanted else {shard.file for shard in writer.manifest.corpus if shard.sources.keys() & {*sources}}
        )
        plan = Plan.of(writer, writer.manifest, gone, touched)
        if (missing := wanted - seen) and before is None:
            raise UsageError(f"{store.path} has no document {min(missing)!r}", "see `specds export` for the ids")
        if before is not None and not plan.names:
            return Removal(0, 0, 0, 0, done=before)
        return plan.carry_out(what)


def _removed(sources: Sequence[str], ids: set[str]) -> str:
    """What the history says of a removal. Ids may be many, and may say what is gone: a digest stands for them."""
    what = [f"source {name}" for name in sorted(set(sources))]
    if ids:
        what.append(f"{len(ids)} documents by id ({digest_of(sorted(ids))})")
    return f"removed {', '.join(what)}"


def _done(manifest: Manifest, what: str) -> str | None:
    """When the same was done before; None: it was not."""
    return next((change.provenance.date for change in reversed(manifest.history) if change.what == what), None)


def digest_of(parts: Sequence[object]) -> str:
    """What tells a request in the history from others."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:_DIGITS]


def rewrite(store: Store, change: Rewrite, what: str) -> Removal:
    """Put other documents, or none, in the place of each one that `change` does not give back as it is.

    What takes a document's place goes into new corpus files, which no index covers until it is built.
    """
    with store.writer() as writer:
        return Plan.of(writer, writer.manifest, change, None).carry_out(what)


@dataclass(frozen=True, slots=True)
class Plan:
    """A rewritten corpus, written but not yet part of the store.

    Attributes:
        manifest: what was rewritten; it need not be the store's yet.
        corpus: the files that stay or are new, in order.
        names: for each file that changed what it is called now; None: it is gone.
        kept: bool[documents] of each file that changed.
        extra: files of documents that took the place of others.
    """

    writer: Writer
    manifest: Manifest
    corpus: list[Shard]
    names: dict[str, str | None]
    kept: dict[str, NDArray[np.bool_]]
    extra: list[Shard]
    removal: Removal

    @classmethod
    def of(cls, writer: Writer, manifest: Manifest, change: Rewrite, touched: set[str] | None) -> Plan:
        """Apply a change to the documents of some corpus files; None: of all."""
        store = Store(writer.path, manifest)
        corpus: list[Shard] = []
        names: dict[str, str | None] = {}
        kept: dict[str, NDArray[np.bool_]] = {}
        extra: list[Shard] = []
        documents = tokens = added = 0
        for shard in store.manifest.corpus:
            if touched is not None and shard.file not in touched:
                corpus.append(shard)
                continue
            left: list[Document] = []
            other: list[Document] = []
            same: list[bool] = []
            check_claims(store, shard)
            require_memory(f"rewriting {shard.file}", shard.tokens * _BYTES, None)
            for document in read_documents(store, [shard.file]):
                result = change(document)
                same.append(len(result) == 1 and result[0] is document)
                (left if same[-1] else other).extend(result)
                if not same[-1]:
                    documents += 1
                    tokens += len(document.prompt) + len(document.response)
            if all(same):
                corpus.append(shard)
                continue
            kept[shard.file] = np.array(same, np.bool_)
            names[shard.file] = None
            if left:
                corpus.append(write_like(writer, left, shard))
                names[shard.file] = corpus[-1].file
            if other:
                extra.append(write_like(writer, other, shard))
                added += len(other)
        return cls(writer, manifest, corpus, names, kept, extra, Removal(documents, tokens, len(names), 0, added))

    def carry_out(self, what: str) -> Removal:
        """Bring the indexes after, and make it all the store's."""
        writer, manifest = self.writer, self.manifest
        if not self.names and manifest is writer.manifest:
            return self.removal
        store = Store(writer.path, dataclasses.replace(manifest, corpus=[*self.corpus, *self.extra]))
        by_name = {shard.file: shard for shard in store.manifest.corpus}
        suffix: list[Segment] = []
        dense: list[Segment] = []
        changed = 0
        for kind, parts in (("suffix", suffix), ("dense", dense)):
            for segment in manifest.indexes[kind]:
                if not self.names.keys() & set(segment.shards):
                    parts.append(segment)
                    continue
                changed += 1
                now = [self.names.get(name, name) for name in segment.shards]
                shards = [by_name[name] for name in now if name is not None]
                if not shards:
                    continue
                if kind == "suffix":
                    parts += write_segments(writer, store, [shards])
                else:
                    if manifest is writer.manifest:
                        store.check_whole(segment)
                    masked = without_documents(writer, segment, self._kept(segment))
                    parts.append(dataclasses.replace(masked, shards=[shard.file for shard in shards]))
        writer.change(store.manifest.corpus, suffix, dense, history=[*manifest.history, history_line(what)])
        return dataclasses.replace(self.removal, segments=changed)

    def _kept(self, segment: Segment) -> NDArray[np.bool_]:
        documents = {shard.file: shard.documents for shard in self.manifest.corpus}
        for shard in self.manifest.corpus:
            if shard.file in segment.shards and shard.file not in self.kept:
                check_claims(Store(self.writer.path, self.manifest), shard)
        return np.concatenate([self.kept.get(name, np.ones(documents[name], np.bool_)) for name in segment.shards])
