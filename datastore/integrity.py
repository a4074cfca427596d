"""Whether a directory is a store, and its files are what its manifest says."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from specds.datastore import manifest as manifests
from specds.datastore.locks import Hold
from specds.datastore.manifest import FileRecord, Manifest
from specds.digests import edge_digest, sha256
from specds.errors import NotAStore, UnsafeFile, UnsafeStore
from specds.files import files_in, open_regular
from specds.limits import MAX_MANIFEST


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
    manifest = read_manifest(path)
    problems = [
        problem
        for name, record in sorted(manifest.files.items())
        if (problem := _problem(path, name, record, thorough=True))
    ]
    hold.release()
    return problems, len(manifest.files), sum(record.size for record in manifest.files.values())


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


def read_manifest(path: Path) -> Manifest:
    """The manifest of a store's directory, every field of it checked.

    Raises:
        NotAStore: there is none. CorruptStore, StoreVersionError: it is not a valid one.
    """
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


def is_temporary(name: str) -> bool:
    """Whether a file of this name is a manifest that was being written."""
    return name.startswith(f".{manifests.NAME}.") and name.endswith(".tmp")


def first_problem(root: Path, manifest: Manifest, thorough: bool, corpus_only: bool) -> str | None:
    """What is wrong with the first file that is not as the manifest says; None: all are.

    Args:
        thorough, corpus_only: as for `open_store`.
    """
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


def rebuild_hint(path: Path) -> str:
    """What to do about a store whose files are not what they were."""
    return f"`specds verify {path}` lists what is wrong; restore it from a copy, or build it again"
