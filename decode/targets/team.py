"""Threads that run the same compiled function side by side."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable

_Job = Callable[[int], None]


class Team:
    """Some threads that wait for work; the caller is the first of them. They end with the team."""

    def __init__(self, size: int) -> None:
        self.size = max(1, size)
        self._start()

    def _start(self) -> None:
        self._process = os.getpid()
        self._work: list[_Job | None] = [None]
        self._errors: list[BaseException] = []
        self._starts = [threading.Semaphore(0) for _ in range(self.size - 1)]
        self._ends = threading.Semaphore(0)
        threads = [
            threading.Thread(target=_serve, args=(number, start, self._ends, self._work, self._errors), daemon=True)
            for number, start in enumerate(self._starts, 1)
        ]
        for thread in threads:
            thread.start()
        weakref.finalize(self, _dismiss, self._process, self._work, self._starts, threads)

    def run(self, work: _Job) -> None:
        """`work(number)` in every thread, number from 0. When all are done it returns, or raises what one raised."""
        if self._process != os.getpid():
            self._start()  # threads do not come along when a process forks
        self._work[0] = work
        for start in self._starts:
            start.release()
        try:
            work(0)
        finally:
            self._wait()
            self._work[0] = None  # it may hold the team itself
        if self._errors:
            error = self._errors[0]
            self._errors.clear()
            raise error

    def _wait(self) -> None:
        """All others are done: nothing may begin before, not even after an interrupt."""
        interrupt: KeyboardInterrupt | None = None
        left = len(self._starts)
        while left:
            try:
                if self._ends.acquire(timeout=1.0):
                    left -= 1
            except KeyboardInterrupt as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt


def _serve(
    number: int,
    start: threading.Semaphore,
    end: threading.Semaphore,
    work: list[_Job | None],
    errors: list[BaseException],
) -> None:
    while True:
        start.acquire()
        if (job := work[0]) is None:
            return
        try:
            job(number)
        except BaseException as error:
            errors.append(error)
        finally:
            del job
            end.release()


def _dismiss(
    process: int, work: list[_Job | None], starts: list[threading.Semaphore], threads: list[threading.Thread]
) -> None:
    if process != os.getpid():
        return
    work[0] = None
    for start in starts:
        start.release()
    # Also when Python exits: a thread that wakes up later than that brings the process down.
    for thread in threads:
        thread.join()
