"""Rows of a stream, read ahead by a thread: whoever works on them is never kept waiting for the next one."""

from __future__ import annotations

import contextlib
import queue
import threading
import weakref
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

Row = TypeVar("Row")
# Rows read before anybody asks for them.
_MOST = 256
# Seconds between two looks whether anybody is still there.
_LOOKED = 0.2


class Ahead(Generic[Row]):
    """An iterable that can be asked for what is there already.

    Args:
        rows: read in a thread of its own. What it raises is raised where the row would have been.
    """

    def __init__(self, rows: Iterable[Row]) -> None:
        self._queue: queue.Queue[tuple[Row | None, BaseException | None]] = queue.Queue(_MOST)
        self._ended = False
        done = threading.Event()
        weakref.finalize(self, done.set)
        # The thread does not hold this object: who gives it up ends the thread.
        threading.Thread(target=_read, args=(rows, self._queue, done), daemon=True).start()

    def take(self, wait: bool) -> Row | None:
        """The next row; None: there is none now, or, if waited for, none any more."""
        if self._ended:
            return None
        while True:
            try:
                # With a timeout an interrupt gets through.
                row, error = self._queue.get(block=wait, timeout=1.0 if wait else None)
                break
            except queue.Empty:
                if not wait:
                    return None
        if error is not None:
            self._ended = True
            raise error
        if row is None:
            self._ended = True
        return row

    def __iter__(self) -> Iterator[Row]:
        while (row := self.take(wait=True)) is not None:
            yield row


def _read(
    rows: Iterable[Row], read: queue.Queue[tuple[Row | None, BaseException | None]], done: threading.Event
) -> None:
    """Read until the end, or until nobody is there any more who could ask."""

    def put(row: Row | None, error: BaseException | None = None) -> bool:
        while not done.is_set():
            with contextlib.suppress(queue.Full):
                read.put((row, error), timeout=_LOOKED)
                return True
        return False

    try:
        for row in rows:
            if not put(row):
                return
    except BaseException as error:  # raised again where it is of use
        put(None, error)
        return
    put(None)
