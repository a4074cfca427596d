"""Changing what a store holds: documents taken out, stores put together, indexes put together or built anew.

Every change is one step: new files beside the old ones, then the manifest. Indexes never speak of what is gone: a
suffix segment over changed files is sorted again, a dense one forgets the documents.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from specds.datastore.build_dense import DenseOptions, most_keys
from specds.datastore.build_suffix import most_tokens, write_segments
from specds.datastore.corpus import Document, check_claims, read_documents, write_like
from specds.datastore.creation import make_store
from specds.datastore.dense_segment import load_normalizer, read_keys, without_documents, write_segment
from specds.datastore.manifest import Manifest, Segment, Shard
from specds.datastore.provenance import history_line
from specds.datastore.segments import consolidate, portions, renamed, require_memory
from specds.datastore.store import Store, require_tokenizer
from specds.datastore.trial import remember, require_sound
from specds.datastore.writer import Writer, writing
from specds.errors import CorruptStore, UsageError
from specds.files import copy, make_directory, sha256

# Documents of one corpus file after compaction.
_SHARD_DOCUMENTS = 65_536
# Hexadecimal digits of the digests in the history, which tell a request from others.
_DIGITS = 16
_MERGED = "merged "

# Bytes a token of a corpus file that is rewritten: itself, and once more in the new file.
_BYTES = 8

Progress = Callable[[str], None]
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
        found: set[str] = set()

        def gone(document: Document) -> Sequence[Document]:
            if document.doc_id in wanted:
                found.add(document.doc_id)
                return ()
            return () if document.source in sources else (document,)

        touched = None if wanted else {one.file for one in writer.manifest.corpus if one.sources.keys() & {*sources}}
        plan = _Plan.of(writer, writer.manifest, gone, touched)
        if (missing := wanted - found) and before is None:
            raise UsageError(f"{store.path} has no document {min(missing)!r}", "see `specds export` for the ids")
        if before is not None and not plan.names:
            return Removal(0, 0, 0, 0, done=before)
        return plan.carry_out(what)


def _removed(sources: Sequence[str], ids: set[str]) -> str:
    """What the history says of a removal. Ids may be many, and may say what is gone: a digest stands for them."""
    what = [f"source {name}" for name in sorted(set(sources))]
    if ids:
        what.append(f"{len(ids)} documents by id ({_digest(sorted(ids))})")
    return f"removed {', '.join(what)}"


def _done(manifest: Manifest, what: str) -> str | None:
    """When the same was done before; None: it was not."""
    return next((change.provenance.date for change in reversed(manifest.history) if change.what == what), None)


def _digest(parts: Sequence[object]) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:_DIGITS]


def rewrite(store: Store, change: Rewrite, what: str) -> Removal:
    """Put other documents, or none, in the place of each one that `change` does not give back as it is.

    What takes a document's place goes into new corpus files, which no index covers until it is built.
    """
    with store.writer() as writer:
        return _Plan.of(writer, writer.manifest, change, None).carry_out(what)


@dataclass(frozen=True, slots=True)
class _Plan:
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
    def of(cls, writer: Writer, manifest: Manifest, change: Rewrite, touched: set[str] | None) -> _Plan:
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


@dataclass(frozen=True, slots=True)
class Compaction:
    """Corpus files, suffix segments and dense segments before and after."""

    before: tuple[int, int, int]
    after: tuple[int, int, int]


def compact(store: Store, *, memory: int | None = None, progress: Progress = lambda stage: None) -> Compaction:
    """Put the segments of each index together, as far as memory reaches, and small corpus files that are alike.

    Documents that no index covers are not taken in: that is what building is for. Dense segments are put together by
    their keys where these are kept and comparable; keys of removed documents go.

    Raises:
        StoreLocked, OutputError, CorruptStore: see their docstrings.
    """
    with store.writer() as writer:
        before = _sizes(writer.manifest)
        progress("suffix")
        suffix = _compacted_suffix(writer, memory)
        progress("dense")
        dense = _compacted_dense(writer, memory)
        if (suffix, dense) != (writer.manifest.suffix, writer.manifest.dense):
            new = [segment for segment in dense if segment not in writer.manifest.dense]
            writer.change(suffix=suffix, dense=dense, history=[*writer.manifest.history, history_line("compacted")])
            for segment in new:
                remember(writer.store, segment)
        progress("corpus")
        consolidate(writer, _SHARD_DOCUMENTS)
        return Compaction(before, _sizes(writer.manifest))


def _sizes(manifest: Manifest) -> tuple[int, int, int]:
    return len(manifest.corpus), len(manifest.suffix), len(manifest.dense)


def _compacted_suffix(writer: Writer, memory: int | None) -> list[Segment]:
    manifest = writer.manifest
    covered = {name for segment in manifest.suffix for name in segment.shards}
    shards = [shard for shard in manifest.corpus if shard.file in covered]
    groups = portions(shards, most_tokens(manifest.vocab_size, memory))
    there = {tuple(segment.shards): segment for segment in manifest.suffix}
    segments: list[Segment] = []
    for group in groups:
        same = there.get(tuple(shard.file for shard in group))
        segments += [same] if same else write_segments(writer, writer.store, [group], memory=memory)
    return segments


def _compacted_dense(writer: Writer, memory: int | None) -> list[Segment]:
    """Neighbouring segments of equal normalizers together; a segment with removed documents without their keys."""
    segments: list[Segment] = []
    group: list[Segment] = []
    order = {shard.file: place for place, shard in enumerate(writer.manifest.corpus)}
    for segment in writer.manifest.dense:
        if group and not _fits(writer, group, segment, order, memory):
            segments += _one_dense(writer, group)
            group = []
        group.append(segment)
    return [*segments, *_one_dense(writer, group)]


def _fits(
    writer: Writer, group: Sequence[Segment], segment: Segment, order: dict[str, int], memory: int | None
) -> bool:
    first = group[0]
    keys = sum(one.parameters.get("keys", 0) for one in (*group, segment))
    return (
        keys <= most_keys(DenseOptions(dims=first.parameters.get("dims")), memory)
        and all(one.parameters.get("kept") in ("float32", "half") for one in (first, segment))
        and order[group[-1].shards[-1]] < order[segment.shards[0]]
        and load_normalizer(writer.path, first).same(load_normalizer(writer.path, segment))
    )


def _one_dense(writer: Writer, group: Sequence[Segment]) -> list[Segment]:
    if not group or (len(group) == 1 and not group[0].parameters.get("removed")):
        return list(group)
    for segment in group:
        writer.store.check_whole(segment)
        require_sound(writer.store, segment)
    parts = [keys for segment in group if (keys := read_keys(writer.path, segment)) is not None]
    first = group[0]
    if len(parts) < len(group) or first.model is None or not any(len(part.keys) for part in parts):
        return list(group)
    parameters = first.parameters
    about = {name: parameters.get(name) for name in ("max_length", "dtype", "kept", "search")}
    about |= {"index": parameters.get("ann"), "leaves": None}
    normalizer = load_normalizer(writer.path, first)
    return [write_segment(writer, parts, normalizer, first.model, about, lambda stage, done, total: None)]


@dataclass(frozen=True, slots=True)
class Merger:
    """What came of a merge.

    Attributes:
        store: the new store.
        twice: documents that were in more than one.
        done: when the same stores were merged into it before, if that was so and nothing was done now.
    """

    store: Store
    twice: int
    done: str | None = None


def merge(stores: Sequence[Store], out: Path, *, progress: Progress = lambda stage: None) -> Merger:
    """Put stores of one tokenizer together into a new one, with their indexes; stores are read, not changed.

    A document whose id an earlier store holds is taken once. Indexes come along as they are, as segments; of dense ones
    those of the first store's model. Where the same was done before, nothing is: a run that was killed after it was
    done can be repeated.

    Raises:
        UsageError: the new store has documents already, of something else. ForeignTokenizer: two tokenizers.
        NotAStore, StoreLocked, OutputError, CorruptStore: see their docstrings.
    """
    first = stores[0].manifest
    for store in stores:
        require_tokenizer(store, first.tokenizer)
    if not (out / "manifest.json").exists():
        make_store(out, Manifest(first.tokenizer, first.vocab_size))
    what = _merged(stores)
    with Writer(out) as writer:
        # The histories of merged stores come along; what this one is made of stands last.
        last = next((one for one in reversed(writer.manifest.history) if one.what.startswith(_MERGED)), None)
        if last is not None and last.what == what:
            return Merger(writer.store, 0, last.provenance.date)
        if writer.manifest.corpus or writer.manifest.tokenizer != first.tokenizer:
            raise UsageError(f"{out} is not empty", "merge into a new store")
        corpus: list[Shard] = []
        indexes: dict[str, list[Segment]] = {"suffix": [], "dense": []}
        model = next((one.model for store in stores for one in store.manifest.dense), None)
        for store in stores:
            progress(str(store.path))
            names: dict[str, str] = {}
            for shard in store.manifest.corpus:
                path = writer.shard_path()
                _copy(store, shard.file, path, out)
                names[shard.file] = path.relative_to(out).as_posix()
                corpus.append(dataclasses.replace(shard, file=names[shard.file]))
            for kind, segments in store.manifest.indexes.items():
                for segment in renamed(segments, names):
                    if kind == "dense" and segment.model != model:
                        continue
                    directory = writer.segment_path(kind)
                    for name in store.manifest.files_of(segment):
                        _copy(store, name, directory / Path(name).relative_to(segment.directory), out)
                    moved = directory.relative_to(out).as_posix()
                    indexes[kind].append(dataclasses.replace(segment, directory=moved))
        history = [change for store in stores for change in store.manifest.history]
        put_together = dataclasses.replace(
            writer.manifest, corpus=corpus, history=history, suffix=indexes["suffix"], dense=indexes["dense"]
        )
        seen: set[str] = set()

        def once(document: Document) -> Sequence[Document]:
            if document.doc_id in seen:
                return ()
            seen.add(document.doc_id)
            return (document,)

        twice = _Plan.of(writer, put_together, once, None).carry_out(what)
    return Merger(Store(out, writer.manifest), twice.documents)


def _merged(stores: Sequence[Store]) -> str:
    """What the history says of a merge; stores that were changed since are others."""
    files = [[record.sha256 for _, record in sorted(store.manifest.files.items())] for store in stores]
    return f"{_MERGED}{', '.join(store.path.name for store in stores)} ({_digest(files)})"


def _copy(store: Store, name: str, new: Path, below: Path) -> None:
    """Copy a file of a store, and make sure that it is what the store's manifest says."""
    with writing(new):
        make_directory(new.parent, below)
        copy(store.path / name, new, old_below=store.path, below=below)
    if sha256(new, below) != store.manifest.files[name].sha256:
        raise CorruptStore(f"{store.path}: {name} changed since it was written", "see `specds verify`")


def rebuild_suffix(store: Store, memory: int | None = None) -> list[Segment]:
    """Sort every suffix segment again from the corpus, whatever state its files are in; equal bytes come of it.

    Args:
        memory: bytes that the process may take, about; None: as many as the machine has.

    Raises:
        UsageError: a segment takes more.
        CorruptStore: the corpus itself is damaged. StoreLocked, OutputError: see their docstrings.
    """
    with store.writer() as writer:
        by_name = {shard.file: shard for shard in writer.manifest.corpus}
        groups = [[by_name[name] for name in segment.shards] for segment in writer.manifest.suffix]
        segments = write_segments(writer, writer.store, groups, memory=memory)
        if segments:
            history = [*writer.manifest.history, history_line("rebuilt the suffix index")]
            writer.change(suffix=segments, history=history)
    return segments
