"""The two locks of a store: one writer at a time, and readers for whom replaced files are kept."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from specds.errors import StoreLocked
from specds.files import open_lock

WRITER = ".lock"
READERS = ".readers"
_PATIENCE = 2.0


class Hold:
    """A shared lock on a store's files: while anyone has one, replaced files are kept. It goes with its owner."""

    def __init__(self, path: Path) -> None:
        self._handle: int | None = None
        try:
            handle = open_lock(path / READERS, path, os.O_RDONLY)
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


def lock_writer(path: Path) -> int:
    """The lock of a store's directory; closing the descriptor gives it back, and so does dying.

    Raises:
        StoreLocked: another process has it. OSError: it cannot be made.
    """
    handle = open_lock(path / WRITER, path)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(handle)
        raise StoreLocked(f"{path} is being written by another process", "wait until it is done") from error
    return handle
