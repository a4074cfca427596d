"""Threads that work side by side, wait in between, and go when they are no longer needed."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time

import pytest

from specds.decode.targets.team import Team


@pytest.mark.parametrize("size", [1, 2, 5])
def test_every_thread_works_once_a_run(size: int) -> None:
    team = Team(size)
    for _ in range(50):
        seen: list[int] = []
        team.run(seen.append)
        assert sorted(seen) == list(range(size))


def test_the_threads_go_with_the_team() -> None:
    before = threading.active_count()
    team = Team(4)
    team.run(lambda number, held=team: None)  # type: ignore[misc]  # the work itself holds the team
    assert threading.active_count() == before + 3
    del team
    gc.collect()
    for _ in range(100):
        if threading.active_count() == before:
            break
        time.sleep(0.01)
    assert threading.active_count() == before


def test_python_ends_while_threads_wait() -> None:
    code = "from specds.decode.targets.team import Team\nteam = Team(4)\nteam.run(lambda number: None)\nprint('end')"
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")
