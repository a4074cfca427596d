"""Threads that work side by side, wait in between, and go when they are no longer needed."""

from __future__ import annotations

import gc
import os
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


def test_an_error_in_any_thread_reaches_the_caller_and_the_team_goes_on() -> None:
    team = Team(3)
    for guilty in (0, 2):

        def work(number: int, guilty: int = guilty) -> None:
            if number == guilty:
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            team.run(work)
        seen: list[int] = []
        team.run(seen.append)
        assert sorted(seen) == [0, 1, 2]


def test_a_fork_has_threads_of_its_own() -> None:
    team = Team(2)
    team.run(lambda number: None)
    child = os.fork()
    if child == 0:
        seen: list[int] = []
        team.run(seen.append)
        os._exit(0 if sorted(seen) == [0, 1] else 1)
    assert os.waitpid(child, 0)[1] == 0
