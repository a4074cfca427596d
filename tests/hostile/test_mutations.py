"""Files of every kind, broken at random: reading each ends in a value or in an error with a name.

`SPECDS_MUTATIONS=100000 pytest -m slow tests/hostile/test_mutations.py` hunts longer, `SPECDS_SEED=7` elsewhere.
`python -m tests.hostile.fuzz --seed S --first N --count 1` repeats one mutation.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# A few thousand in as much time as the quick tests have for it; a machine that is busy does fewer.
_QUICK, _QUICK_SECONDS, _LONG = 3_000, 60, 20_000
_LEAST = 3


def hunt(*options: object) -> dict[str, dict[str, object]]:
    """The report of a hunt in a process of its own, with one thread, so that it can fork."""
    single = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "-m", "tests.hostile.fuzz", *map(str, options)]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, env=single, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-5_000:]
    report: dict[str, dict[str, object]] = json.loads(done.stdout)
    return report


def check(report: dict[str, dict[str, object]], least: int) -> None:
    """No finding, and every reader had its share."""
    found = [finding for tally in report.values() for finding in tally["findings"]]  # type: ignore[attr-defined]
    assert not found, json.dumps(found[:5], indent=1)
    few = {name: tally["mutations"] for name, tally in report.items() if int(str(tally["mutations"])) < least}
    assert not few


def test_broken_files_of_every_kind_end_in_a_value_or_a_named_error() -> None:
    check(hunt("--count", _QUICK, "--seconds", _QUICK_SECONDS), _LEAST)


@pytest.mark.slow
def test_many_more_broken_files() -> None:
    count = int(os.environ.get("SPECDS_MUTATIONS", _LONG))
    check(hunt("--count", count, "--seed", os.environ.get("SPECDS_SEED", 1)), min(_LEAST, count // 100))
