"""Making a store where there is none."""

from __future__ import annotations

import os
from pathlib import Path

from specds.datastore import manifest as manifests
from specds.datastore.integrity import is_temporary, read_manifest
from specds.datastore.locks import READERS, WRITER, lock_writer
from specds.datastore.manifest import Identity, Manifest
from specds.datastore.store import Store, open_store
from specds.datastore.writer import writing
from specds.errors import NotAStore
from specds.files import open_lock, write_atomically
from specds.tokenizer import Tokenizer


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
        lock = lock_writer(path)
        try:
            # Another process may have made the store, and filled it, since it was looked for.
            if not (path / manifests.NAME).exists():
                os.close(open_lock(path / READERS, path))
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
        read_manifest(path)
    elif path.is_file() or (path.is_dir() and not all(_is_unfinished(entry.name) for entry in path.iterdir())):
        raise NotAStore(f"{path} exists and is not a datastore", "choose another path for the store")


def _is_unfinished(name: str) -> bool:
    """Whether this is all that a process leaves that is killed while it makes a store."""
    return name in (WRITER, READERS) or is_temporary(name)
