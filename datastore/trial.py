"""Trying out an ANN index that comes from elsewhere: in a process of its own, because a forged one can end it.

ScaNN and faiss trust their files. What this machine has built, or has tried out before, it knows by digest; the digests
are kept with the user's other caches, never in the store, whose maker could write them.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import signal
import stat
import subprocess
import sys
import warnings
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from specds.caches import SUGGESTION, cache_directory
from specds.errors import CorruptStore, Notice, OutputError, StoreError, first_line

if TYPE_CHECKING:
    from specds.datastore.manifest import Segment
    from specds.datastore.store import Store

_MODULE = "specds.datastore.trial"
_SECONDS = 120
_BYTES_A_SECOND = 10 << 20
_NEIGHBOURS = 100
_REFUSED = 3
_PACKAGES = {"scann": "scann", "faiss": "faiss-cpu"}
_SHOWN = 300
_HINT = "do not trust this store if it is not yours; `specds build-dense --replace` builds the index again"


def require_sound(store: Store, segment: Segment) -> None:
    """Refuse the index of a dense segment that its library cannot open, or does not survive.

    The segment's files must have been compared with their digests before, see `Store.check_whole`: what was tried out
    is remembered by these.

    Raises:
        CorruptStore: the index is not what the manifest describes, or ends the process that opens it.
        StoreError: it must be tried out, and no process can be started here.
        UsageError: its package is not installed.
    """
    from specds.datastore import ann

    directory = store.path / segment.directory / "keys"
    ann.checked(directory, segment.parameters)
    ann.require_package(segment.parameters["ann"])
    digest = _digest(store, segment)
    if _is_known(digest):
        return
    size = sum(store.manifest.files[name].size for name in _names(store, segment))
    _try(directory, segment, _SECONDS + size // _BYTES_A_SECOND)
    _remember(digest)


def remember(store: Store, segment: Segment) -> None:
    """Take the index of a dense segment as sound: this process has built it."""
    _remember(_digest(store, segment))


def known_directory() -> Path:
    """Where digests of known indexes are kept, a file of no bytes for each; nobody else can write there.

    Raises:
        OutputError: there is no such place.
    """
    return cache_directory("indexes")


def _names(store: Store, segment: Segment) -> list[str]:
    return sorted(name for name in store.manifest.files if name.startswith(f"{segment.directory}/keys/"))


def _digest(store: Store, segment: Segment) -> str:
    """Of all that a library gets to see, and its version: another may read the same bytes in another way."""
    from specds.datastore.ann_files import asset_names
    from specds.datastore.ann_shape import IndexShape

    shape = IndexShape.of(segment.parameters)
    prefix = f"{segment.directory}/keys/"
    try:
        files = {name: store.manifest.files[prefix + name].sha256 for name in sorted(asset_names(shape))}
    except KeyError as error:
        raise CorruptStore(f"{store.path}: the manifest has no checksum of {error.args[0]}", _HINT) from error
    package = _PACKAGES[shape.kind]
    try:
        version = metadata.version(package)
    except metadata.PackageNotFoundError:  # faiss comes under other names, too
        version = ""
    about = [package, version, repr(shape), files]
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


def _is_known(digest: str) -> bool:
    try:
        return stat.S_ISREG((known_directory() / digest).lstat().st_mode)
    except (OSError, OutputError):
        return False


def _remember(digest: str) -> None:
    try:
        os.close(os.open(known_directory() / digest, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600))
    except (OSError, OutputError) as error:
        warnings.warn(
            "which dense indexes were tried out cannot be kept, so they are tried out in each run: "
            f"{error} — {SUGGESTION}",
            Notice,
            stacklevel=2,
        )


def _try(directory: Path, segment: Segment, seconds: int) -> None:
    job = {"directory": str(directory.resolve()), "parameters": segment.parameters, "seconds": seconds}
    # As this process finds its modules, and nothing that happens to lie in the working directory.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    try:
        child = subprocess.run(
            [sys.executable, "-P", "-m", _MODULE],
            input=json.dumps(job).encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise CorruptStore(f"{directory} does not open within {seconds} seconds", _HINT) from error
    except OSError as error:
        raise StoreError(
            f"{directory} comes from elsewhere and cannot be tried out: no process can be started ({error.strerror})",
            "allow one more process, or build the index here with `specds build-dense --replace`",
        ) from error
    if child.returncode == -signal.SIGALRM:
        raise CorruptStore(f"{directory} does not open within {seconds} seconds", _HINT)
    if child.returncode < 0:
        name = signal.Signals(-child.returncode).name
        raise CorruptStore(f"{directory} ends the process that opens it ({name})", _HINT)
    said = child.stdout.decode("utf-8", "replace").strip()[-_SHOWN:]
    if child.returncode == _REFUSED:
        raise CorruptStore(f"{directory} does not open as an index: {said}", _HINT)
    if child.returncode:
        raise CorruptStore(f"{directory} ends the process that opens it (exit code {child.returncode})", _HINT)


def _main() -> int:
    """The child: look at every byte of an index that leads anywhere, open it and ask it."""
    import numpy as np

    from specds.datastore import ann
    from specds.datastore.ann_files import check_contents

    job = json.load(sys.stdin)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.alarm(job["seconds"])  # its parent may be gone by then
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    directory, parameters = Path(job["directory"]), job["parameters"]
    try:
        shape = ann.checked(directory, parameters)
        check_contents(directory, shape)
        searcher = ann.load(directory, parameters, shape.dims)
        query = np.random.default_rng(0).normal(size=shape.dims).astype(np.float32)
        query /= np.linalg.norm(query)
        _, rows = searcher.search(query, min(_NEIGHBOURS, shape.keys))
        if len(rows) and not 0 <= rows.min() <= rows.max() < shape.keys:
            raise ValueError("it answers with keys that there are not")
    except Exception as error:  # whatever a library makes of it
        answer.write(first_line(error))
        answer.close()
        return _REFUSED
    return 0


if __name__ == "__main__":
    code = _main()
    sys.stdout.flush()
    # Nothing that a library does on the way out counts.
    os._exit(code)
