"""The datastore: one directory, opened through one function that checks everything first."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from specds.datastore.integrity import check_entries, first_problem, read_manifest, rebuild_hint
from specds.datastore.locks import Hold
from specds.datastore.manifest import Identity, Manifest, Segment
from specds.digests import sha256
from specds.errors import CorruptStore, ForeignModel, ForeignTokenizer, MissingIndex, UsageError
from specds.tokenizer import Tokenizer

if TYPE_CHECKING:
    from specds.datastore.dense import DenseIndex
    from specds.datastore.suffix import SuffixIndex
    from specds.datastore.writer import Writer


@dataclass(frozen=True, slots=True)
class Store:
    """A datastore as it was when it was opened; later writers do not change what this object says, or its files.

    Attributes:
        path: its directory.
        manifest: what it holds.
        hold: while it is held, files that later writers have replaced stay where they are.
    """

    path: Path
    manifest: Manifest
    hold: Hold | None = field(default=None, compare=False, repr=False)

    def suffix_index(self) -> SuffixIndex:
        """The static suffix index over all its segments, memory-mapped.

        Raises:
            MissingIndex: none was built. CorruptStore: its files are not what the manifest says.
        """
        from specds.datastore.suffix import SuffixIndex

        return SuffixIndex.open(self.path, self._segments("suffix"))

    def dense_index(self, model: str) -> DenseIndex:
        """The dense index, for queries by the model of this fingerprint.

        Raises:
            MissingIndex: none was built. ForeignModel: it holds another model's hidden states.
            CorruptStore: its files are not what the manifest says.
        """
        from specds.datastore.dense import DenseIndex
        from specds.datastore.trial import require_sound

        segments = self._segments("dense")
        for segment in segments:
            if segment.model is None or segment.model.fingerprint != model:
                owner = segment.model.fingerprint[:16] if segment.model else "unknown"
                named = segment.model.name if segment.model else "?"
                raise ForeignModel(
                    f"{self.path}: the dense index holds hidden states of {named} ({owner}), not of this model "
                    f"({model[:16]})",
                    "use the model it was built with, or run `specds build-dense` with this one",
                )
        # The ANN libraries read these files whole and trust them, so they are read and checked whole first.
        for segment in segments:
            self.check_whole(segment)
            require_sound(self, segment)
        return DenseIndex.open(self.path, segments)

    def size(self) -> int:
        """Bytes on disk, by the manifest."""
        return sum(record.size for record in self.manifest.files.values())

    def writer(self) -> Writer:
        """The right to change the store; a context manager. This object no longer holds what it replaces.

        Raises (on entering):
            StoreLocked: another process has it.
        """
        from specds.datastore.writer import Writer

        if self.hold is not None:
            self.hold.release()
        return Writer(self.path)

    def _segments(self, kind: str) -> list[Segment]:
        segments = self.manifest.indexes[kind]
        if not segments:
            raise MissingIndex(f"{self.path} has no {kind} index", f"run `specds build-{kind} {self.path}`")
        return segments

    def check_whole(self, segment: Segment) -> None:
        """Read all files of a segment.

        Raises:
            CorruptStore: one is not what it was.
        """
        for name in self.manifest.files_of(segment):
            if sha256(self.path / name, self.path) != self.manifest.files[name].sha256:
                raise CorruptStore(f"{self.path}: {name} changed since it was written", rebuild_hint(self.path))


def open_store(
    path: Path | str, tokenizer: Tokenizer | None = None, *, thorough: bool = False, corpus_only: bool = False
) -> Store:
    """Open a datastore for reading.

    Checks that nothing in its directory leads out of it, the manifest (every field, every path), each file's presence
    and size, the checksum of each file's first and last 64 KiB, and, when a tokenizer is given, that the store's tokens
    are its tokens.

    Args:
        thorough: read every byte and check it.
        corpus_only: indexes may be damaged, and are not looked at: they can be built again.

    Raises:
        NotAStore, StoreVersionError, UnsafeStore, CorruptStore, ForeignTokenizer: see their docstrings.
    """
    path = Path(path)
    check_entries(path)
    hold = Hold(path)
    manifest = read_manifest(path)
    while problem := first_problem(path, manifest, thorough, corpus_only):
        # Where there are no locks, a writer may have replaced the files after their manifest was read.
        newer = read_manifest(path)
        if newer == manifest:
            raise CorruptStore(f"{path}: {problem}", rebuild_hint(path))
        manifest = newer
    store = Store(path, manifest, hold)
    if tokenizer is not None:
        require_tokenizer(store, tokenizer)
    return store


def require_tokenizer(store: Store, tokenizer: Tokenizer | Identity) -> None:
    """Refuse to mix two tokenizers' ids.

    Raises:
        ForeignTokenizer: the store holds tokens of another one.
        CorruptStore: it says so of this one's, and counts them otherwise.
    """
    mine = store.manifest.tokenizer
    if mine.fingerprint != tokenizer.fingerprint:
        raise ForeignTokenizer(
            f"{store.path} holds tokens of {mine.name} (tokenizer {mine.fingerprint[:16]}), "
            f"not of {tokenizer.name} (tokenizer {tokenizer.fingerprint[:16]})",
            "use the store with the model it was made for, or make a store with this one",
        )
    if isinstance(tokenizer, Tokenizer) and store.manifest.vocab_size != tokenizer.vocab_size:
        raise CorruptStore(
            f"{store.path}: its manifest speaks of {store.manifest.vocab_size:,} tokens, and their tokenizer, "
            f"{tokenizer.name}, has {tokenizer.vocab_size:,}",
            "restore the store from a copy, or build it again",
        )


def require_tokens(store: Store) -> None:
    """Refuse to index an empty corpus.

    Raises:
        UsageError: the store has no tokens.
    """
    if store.manifest.tokens == 0:
        raise UsageError(f"{store.path} has no documents to index", "fill it with `specds generate` or `specds ingest`")
