"""The writer of a store: new files first, then the manifest, by atomic rename."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Self

from specds.datastore import manifest as manifests
from specds.datastore.integrity import check_entries, is_temporary, read_manifest
from specds.datastore.locks import READERS, lock_writer
from specds.datastore.manifest import Change, FileRecord, Manifest, Segment, Shard
from specds.datastore.store import Store
from specds.digests import edge_digest, sha256
from specds.errors import OutputError, SpecdsError, UnsafeFile
from specds.files import (
    directory,
    files_in,
    make_directory,
    open_lock,
    open_regular,
    remove_tree,
    sync_file,
    write_atomically,
)

_OURS = ("corpus", "suffix", "dense")
_MOST_HISTORY = 1_000


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
        with writing(self.path):
            self._lock = lock_writer(self.path)
        try:
            self._manifest = read_manifest(self.path)
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
            history: what was done that no part speaks of, see `provenance.history_line`.

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
            for parent in {folder for path in paths for folder in (path.parent, path.parent.parent)}:
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
            handle = open_lock(self.path / READERS, self.path, os.O_RDONLY | os.O_CREAT)
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
                    if not any(file == f"{folder}/{name}" or file.startswith(f"{folder}/{name}/") for file in known):
                        self._drop(self.path / folder / name)
        # Whoever wrote these had the lock that is held now.
        for name in self._names("."):
            if is_temporary(name):
                self._drop(self.path / name)

    def _drop(self, path: Path) -> None:
        with contextlib.suppress(OSError, UnsafeFile):
            remove_tree(path, self.path)

    def _names(self, folder: str) -> list[str]:
        with directory(self.path / folder, self.path) as handle, os.scandir(handle) as entries:
            return [entry.name for entry in entries]


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
