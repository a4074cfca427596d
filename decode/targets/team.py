"""Threads that run the same compiled function side by side."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable


class Team:
    """Some threads that wait for work; the caller is the first of them. They end with the team."""

    def __init__(self, size: int) -> None:
        self.size = max(1, size)
        self._work: list[Callable[[int], None] | None] = [None]
        self._starts = [threading.Semaphore(0) for _ in range(self.size - 1)]
        self._ends = threading.Semaphore(0)
        threads = [
            threading.Thread(target=_serve, args=(number, start, self._ends, self._work), daemon=True)
            for number, start in enumerate(self._starts, 1)
        ]
        for thread in threads:
            thread.start()
        weakref.finalize(self, _dismiss, self._work, self._starts, threads)

    def run(self, work: Callable[[int], None]) -> None:
        """`work(number)` in every thread, number from 0; returns when all have returned. It must not raise."""
        self._work[0] = work
        for start in self._starts:
            start.release()
        try:
            work(0)
        finally:
            for _ in self._starts:
                self._ends.acquire()
            self._work[0] = None  # it may hold the team itself


def _serve(
    number: int, start: threading.Semaphore, end: threading.Semaphore, work: list[Callable[[int], None] | None]
) -> None:
    while True:
        start.acquire()
        if (job := work[0]) is None:
            return
        try:
            job(number)
        finally:
            del job
            end.release()


def _dismiss(
    work: list[Callable[[int], None] | None], starts: list[threading.Semaphore], threads: list[threading.Thread]
) -> None:
    work[0] = None
    for start in starts:
        start.release()
    # Also when Python exits: a thread that wakes up later than that brings the process down.
    for thread in threads:
        thread.join()
