"""The datastore: one directory, opened through one function that checks everything first."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import errno
import fcntl
import os
import re
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Self

from specds.datastore import manifest as manifests
from specds.datastore.manifest import Change, FileRecord, Identity, Manifest, Provenance, Segment, Shard
from specds.errors import (
    CorruptStore,
    ForeignModel,
    ForeignTokenizer,
    MissingIndex,
    NotAStore,
    OutputError,
    SpecdsError,
    StoreLocked,
    UnsafeFile,
    UnsafeStore,
    UsageError,
)
from specds.files import (
    directory,
    edge_digest,
    files_in,
    make_directory,
    open_lock,
    open_regular,
    remove_tree,
    sha256,
    sync_file,
    write_atomically,
)
from specds.limits import MAX_MANIFEST
from specds.tokenizer import Tokenizer
from specds.version import __version__

if TYPE_CHECKING:
    from specds.datastore.dense import DenseIndex
    from specds.datastore.suffix import SuffixIndex

_LOCK = ".lock"
_READERS = ".readers"
_OURS = ("corpus", "suffix", "dense")
_PATIENCE = 2.0
_MOST_HISTORY = 1_000
# What the command line takes options from, beside its words.
_OPTION = "SPECDS_"


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
                raise CorruptStore(f"{self.path}: {name} changed since it was written", _rebuild_hint(self.path))


class Hold:
    """A shared lock on a store's files: while anyone has one, replaced files are kept. It goes with its owner."""

    def __init__(self, path: Path) -> None:
        self._handle: int | None = None
        try:
            handle = open_lock(path / _READERS, path, os.O_RDONLY)
        except OSError:
            return  # a store that was copied without it: nobody can be asked to wait
        deadline = time.monotonic() + _PATIENCE
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
                self._handle = handle
                return
            except OSError:
                # A writer is removing files, which is short; or the file system knows no locks.
                if time.monotonic() > deadline:
                    os.close(handle)
                    return
                time.sleep(0.01)

    def release(self) -> None:
        """Let replaced files go."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def __del__(self) -> None:
        self.release()


class Writer:
    """Changes a store: new files first, then the manifest, atomically. A writer that dies changes nothing.

    Only one process at a time; the lock goes when its process does.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: int | None = None
        self._manifest: Manifest | None = None

    @property
    def manifest(self) -> Manifest:
        """The manifest as this writer last read or wrote it."""
        assert self._manifest is not None, "the writer is not entered"
        return self._manifest

    def __enter__(self) -> Self:
        check_entries(self.path)
        self._lock = _lock(self.path)
        try:
            self._manifest = _read_manifest(self.path)
            self._remove_leftovers()
        except BaseException:
            self._release()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        if any(exception):
            with contextlib.suppress(OSError):
                self._remove_leftovers()
        self._release()

    def _release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    @property
    def store(self) -> Store:
        """The store as this writer last read or wrote it."""
        return Store(self.path, self.manifest)

    def shard_path(self) -> Path:
        """A new corpus file's path; write it, then make it part of the store with `change`."""
        return self._fresh("corpus", "part-{:05d}.parquet")

    def segment_path(self, kind: str) -> Path:
        """A new, empty directory for a segment of a kind; fill it, then make it part of the store with `change`."""
        path = self._fresh(kind, "{:06d}")
        with writing(path):
            make_directory(path, self.path, new=True)
        return path

    def work_path(self, kind: str) -> Path:
        """An empty directory for what is only needed on the way; nothing in it becomes part of the store."""
        path = self.path / kind / "work"
        with writing(path):
            make_directory(path.parent, self.path)
            remove_tree(path, self.path)
            make_directory(path, self.path, new=True)
        return path

    def change(
        self,
        corpus: Sequence[Shard] | None = None,
        suffix: Sequence[Segment] | None = None,
        dense: Sequence[Segment] | None = None,
        history: Sequence[Change] | None = None,
    ) -> None:
        """Make these the store's parts, in one step: new ones come in, those that are not named leave.

        Args:
            corpus, suffix, dense: all parts of each kind; None: as they are.
            history: what was done that no part speaks of, see `made`.

        Raises:
            OutputError: it cannot be written; the store is as it was before.
        """
        now = self.manifest
        corpus = now.corpus if corpus is None else corpus
        suffix = now.suffix if suffix is None else suffix
        dense = now.dense if dense is None else dense
        paths = [self.path / shard.file for shard in corpus]
        for segment in (*suffix, *dense):
            at = self.path / segment.directory
            with writing(at):
                paths += [at / name for name in files_in(at, self.path)]
        names = {path.relative_to(self.path).as_posix(): path for path in paths}
        # Files never change, so what is known of a name stays true.
        files = {name: now.files[name] for name in names if name in now.files}
        files |= self._records([path for name, path in names.items() if name not in files])
        history = now.history if history is None else history
        self._commit(
            dataclasses.replace(
                now,
                corpus=list(corpus),
                suffix=list(suffix),
                dense=list(dense),
                history=list(history)[-_MOST_HISTORY:],
                files=files,
            )
        )
        self._remove_leftovers()

    def _records(self, paths: list[Path]) -> dict[str, FileRecord]:
        records = {}
        with writing(self.path):
            for path in paths:
                sync_file(path, self.path)
                with open_regular(path, self.path) as file:
                    size = os.fstat(file.fileno()).st_size
                name = path.relative_to(self.path).as_posix()
                records[name] = FileRecord(size, sha256(path, self.path), edge_digest(path, self.path))
            for parent in {one for path in paths for one in (path.parent, path.parent.parent)}:
                with directory(parent, self.path) as handle:
                    os.fsync(handle)
        return records

    def _commit(self, manifest: Manifest) -> None:
        with writing(self.path):
            write_atomically(self.path / manifests.NAME, manifests.dump(manifest), self.path)
        self._manifest = manifest

    def _fresh(self, folder: str, pattern: str) -> Path:
        with writing(self.path):
            make_directory(self.path / folder, self.path)
            taken = set(self._names(folder))
        taken |= {name.split("/")[1] for name in self.manifest.files if name.startswith(folder + "/")}
        # Past the largest, not the first gap: a reader of the last manifest must not find new bytes under an old name.
        numbers = [int(digits[0]) for name in taken if (digits := re.findall(r"\d+", name))]
        return self.path / folder / pattern.format(max(numbers, default=0) + 1)

    def _remove_leftovers(self) -> None:
        """Files in the store's own folders that the manifest does not name, unless someone reads an older manifest."""
        with contextlib.ExitStack() as stack:
            if not self._alone(stack):
                return
            self._sweep()

    def _alone(self, stack: contextlib.ExitStack) -> bool:
        try:
            handle = open_lock(self.path / _READERS, self.path, os.O_RDONLY | os.O_CREAT)
        except (OSError, UnsafeFile):
            return False
        stack.callback(os.close, handle)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            # Where locks are not known at all, readers have none either.
            return error.errno not in (errno.EWOULDBLOCK, errno.EACCES)
        return True

    def _sweep(self) -> None:
        known = set(self.manifest.files)
        for folder in _OURS:
            # What became a link since the store was opened is left alone; opening it again is refused.
            with contextlib.suppress(OSError, UnsafeFile):
                for name in self._names(folder):
                    if not any(one == f"{folder}/{name}" or one.startswith(f"{folder}/{name}/") for one in known):
                        self._drop(self.path / folder / name)
        # Whoever wrote these had the lock that is held now.
        for name in self._names("."):
            if _is_temporary(name):
                self._drop(self.path / name)

    def _drop(self, path: Path) -> None:
        with contextlib.suppress(OSError, UnsafeFile):
            remove_tree(path, self.path)

    def _names(self, folder: str) -> list[str]:
        with directory(self.path / folder, self.path) as handle, os.scandir(handle) as entries:
            return [one.name for one in entries]


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
    manifest = _read_manifest(path)
    while problem := _first_problem(path, manifest, thorough, corpus_only):
        # Where there are no locks, a writer may have replaced the files after their manifest was read.
        newer = _read_manifest(path)
        if newer == manifest:
            raise CorruptStore(f"{path}: {problem}", _rebuild_hint(path))
        manifest = newer
    store = Store(path, manifest, hold)
    if tokenizer is not None:
        require_tokenizer(store, tokenizer)
    return store


def find_problems(path: Path | str) -> tuple[list[str], int, int]:
    """Read every byte of a store, whatever state it is in.

    Returns:
        what is missing, of another size, or of another checksum (empty: the store is whole); files; bytes.

    Raises:
        NotAStore, StoreVersionError, CorruptStore: there is no valid manifest.
        UnsafeStore: something in its directory leads out of it; nothing was read.
    """
    path = Path(path)
    check_entries(path)
    hold = Hold(path)
    manifest = _read_manifest(path)
    found = [
        problem
        for name, record in sorted(manifest.files.items())
        if (problem := _problem(path, name, record, thorough=True))
    ]
    hold.release()
    return found, len(manifest.files), sum(record.size for record in manifest.files.values())


def create_store(path: Path | str, tokenizer: Tokenizer) -> Store:
    """Open a datastore, or make an empty one where there is none.

    Raises:
        NotAStore: the path is a file, or a directory that holds something else.
        OutputError: the directory cannot be written.
        StoreLocked: another process is making it.
        and what `open_store` raises.
    """
    path = Path(path)
    if not (path / manifests.NAME).exists() and not path.is_symlink():
        make_store(path, Manifest(Identity(tokenizer.name, tokenizer.fingerprint), tokenizer.vocab_size))
    return open_store(path, tokenizer)


def make_store(path: Path, empty: Manifest) -> None:
    """Make a datastore of an empty manifest; one that is there by now stays as it is.

    Raises: as `create_store`.
    """
    require_place(path)
    with writing(path):
        path.mkdir(parents=True, exist_ok=True)
        lock = _lock(path)
        try:
            # Another process may have made the store, and filled it, since it was looked for.
            if not (path / manifests.NAME).exists():
                os.close(open_lock(path / _READERS, path))
                write_atomically(path / manifests.NAME, manifests.dump(empty), path)
        finally:
            os.close(lock)


def require_place(path: Path) -> None:
    """Refuse a path where there is something else than a store, or nothing.

    Raises:
        NotAStore: a file, or a directory that holds something else.
        CorruptStore, StoreVersionError: a store that cannot be gone on with.
    """
    if (path / manifests.NAME).exists():
        _read_manifest(path)
    elif path.is_file() or (path.is_dir() and not all(_is_unfinished(entry.name) for entry in path.iterdir())):
        raise NotAStore(f"{path} exists and is not a datastore", "choose another path for the store")


def provenance() -> Provenance:
    """How the running command would be repeated: options from the environment, its line, the version, and the date."""
    options = [f"{name}={shlex.quote(value)}" for name, value in sorted(os.environ.items()) if name.startswith(_OPTION)]
    words = [*options, shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])]
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return Provenance(" ".join(words)[:2000].encode("utf-8", "replace").decode(), __version__, now)


def made(what: str) -> Change:
    """A line for a store's history: what the running command did."""
    return Change(what, provenance())


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn the operating system's refusals into an OutputError that names the store.

    Raises:
        OutputError: no space, no permission, a read-only file system.
    """
    try:
        yield
    except SpecdsError:
        raise
    except OSError as error:
        reason = error.strerror or str(error)
        raise OutputError(
            f"cannot write {path}: {reason}", "free some space or choose another path; the store is as it was before"
        ) from error


def check_entries(path: Path) -> None:
    """Look at every entry of a store's directory before anything in it is opened.

    Raises:
        UnsafeStore: one is neither a regular file nor a directory, so that it may lead out of the store.
        NotAStore: the directory cannot be read.
    """
    try:
        files_in(path)
    except UnsafeFile as error:
        everything = f"`find {shlex.quote(str(path))} -not -type f -not -type d`"
        raise UnsafeStore(error.message, f"do not trust this store; {everything} lists what else is such") from None
    except (FileNotFoundError, NotADirectoryError):
        raise _not_there(path) from None
    except OSError as error:
        raise NotAStore(f"{path} cannot be read: {error.strerror}", "check the path and its permissions") from error


def _not_there(path: Path) -> NotAStore:
    if path.is_file():
        hint = "a store is a directory: that of `specds generate --store` or `specds ingest --store`"
        return NotAStore(f"{path} is not a datastore: it is a file", hint)
    what = f"holds no {manifests.NAME}" if path.is_dir() else "is not a directory"
    return NotAStore(f"{path} is not a datastore: it {what}", "make a store with `specds generate` or `specds ingest`")


def _read_manifest(path: Path) -> Manifest:
    file = path / manifests.NAME
    try:
        with open_regular(file, path) as stream:
            data = stream.read(MAX_MANIFEST.bytes + 1)
    except UnsafeFile:
        raise NotAStore(f"{path} is not a datastore: its {manifests.NAME} is not a file", "check the path") from None
    except (FileNotFoundError, NotADirectoryError):
        raise _not_there(path) from None
    except OSError as error:
        raise NotAStore(f"{path} cannot be read: {error.strerror}", "check the path and its permissions") from error
    return manifests.parse(data, str(file))


def _lock(path: Path) -> int:
    """The lock of a store's directory; closing the descriptor gives it back, and so does dying."""
    with writing(path):
        handle = open_lock(path / _LOCK, path)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(handle)
        raise StoreLocked(f"{path} is being written by another process", "wait until it is done") from error
    return handle


def _is_unfinished(name: str) -> bool:
    """Whether this is all that a process leaves that is killed while it makes a store."""
    return name in (_LOCK, _READERS) or _is_temporary(name)


def _is_temporary(name: str) -> bool:
    return name.startswith(f".{manifests.NAME}.") and name.endswith(".tmp")


def _first_problem(root: Path, manifest: Manifest, thorough: bool, corpus_only: bool) -> str | None:
    looked_at = {shard.file for shard in manifest.corpus} if corpus_only else manifest.files.keys()
    problems = (_problem(root, name, manifest.files[name], thorough) for name in sorted(looked_at))
    return next(filter(None, problems), None)


def _problem(root: Path, name: str, record: FileRecord, thorough: bool) -> str | None:
    path = root / name
    try:
        with open_regular(path, root) as file:
            size = os.fstat(file.fileno()).st_size
        if size != record.size:
            return f"{name}: has {size:,} bytes, should have {record.size:,}"
        if edge_digest(path, root) != record.edges or (thorough and sha256(path, root) != record.sha256):
            return f"{name}: its content changed"
    except UnsafeFile:
        return f"{name}: is not a file of the store"
    except FileNotFoundError:
        return f"{name}: is missing"
    except (OSError, RuntimeError) as error:
        return f"{name}: cannot be read: {error}"
    return None


def _rebuild_hint(path: Path) -> str:
    return f"`specds verify {path}` lists what is wrong; restore it from a copy, or build it again"


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
