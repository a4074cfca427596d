"""Rows of a stream, read ahead by a thread: whoever works on them is never kept waiting for the next one."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

Row = TypeVar("Row")
# Rows read before anybody asks for them.
_MOST = 256


class Ahead(Generic[Row]):
    """An iterable that can be asked for what is there already.

    Args:
        rows: read in a thread of its own. What it raises is raised where the row would have been.
    """

    def __init__(self, rows: Iterable[Row]) -> None:
        self._rows = rows
        self._queue: queue.Queue[tuple[Row | None, BaseException | None]] = queue.Queue(_MOST)
        self._ended = False
        threading.Thread(target=self._read, daemon=True).start()

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

    def _read(self) -> None:
        try:
            for row in self._rows:
                self._queue.put((row, None))
        except BaseException as error:  # raised again where it is of use
            self._queue.put((None, error))
            return
        self._queue.put((None, None))
