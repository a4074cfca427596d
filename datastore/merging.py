"""Putting stores of one tokenizer together into a new one, with their indexes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specds.datastore.compaction import Progress
from specds.datastore.corpus import Document
from specds.datastore.creation import make_store
from specds.datastore.manifest import Manifest, Segment, Shard
from specds.datastore.rewriting import Plan, digest_of
from specds.datastore.segments import renamed
from specds.datastore.store import Store, require_tokenizer
from specds.datastore.writer import Writer, writing
from specds.digests import sha256
from specds.errors import CorruptStore, UsageError
from specds.files import copy, make_directory

_MERGED = "merged "


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
        last = next((change for change in reversed(writer.manifest.history) if change.what.startswith(_MERGED)), None)
        if last is not None and last.what == what:
            return Merger(writer.store, 0, last.provenance.date)
        if writer.manifest.corpus or writer.manifest.tokenizer != first.tokenizer:
            raise UsageError(f"{out} is not empty", "merge into a new store")
        corpus: list[Shard] = []
        indexes: dict[str, list[Segment]] = {"suffix": [], "dense": []}
        model = next((segment.model for store in stores for segment in store.manifest.dense), None)
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

        twice = Plan.of(writer, put_together, once, None).carry_out(what)
    return Merger(Store(out, writer.manifest), twice.documents)


def _merged(stores: Sequence[Store]) -> str:
    """What the history says of a merge; stores that were changed since are others."""
    files = [[record.sha256 for _, record in sorted(store.manifest.files.items())] for store in stores]
    return f"{_MERGED}{', '.join(store.path.name for store in stores)} ({digest_of(files)})"


def _copy(store: Store, name: str, new: Path, below: Path) -> None:
    """Copy a file of a store, and make sure that it is what the store's manifest says."""
    with writing(new):
        make_directory(new.parent, below)
        copy(store.path / name, new, old_below=store.path, below=below)
    if sha256(new, below) != store.manifest.files[name].sha256:
        raise CorruptStore(f"{store.path}: {name} changed since it was written", "see `specds verify`")
