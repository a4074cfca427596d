"""Runs that end early, by a kill or a signal: the same command once more ends as if nothing had happened."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from specds.calibration.trace import lacking

from ..tools import Mortal, Run

TIMES = ("draft_seconds", "forward_seconds", "verify_seconds", "commit_seconds", "asked_seconds")
# Which requests shared a pass depends on where a run began.
PASSES = ("forward_pass", "pass_tokens")


def rows_of(trace: Path) -> list[dict[str, Any]]:
    """A trace but for what the clock said, and how passes were shared."""
    return [
        {name: value for name, value in row.items() if name not in (*TIMES, *PASSES)}
        for row in pq.read_table(trace).to_pylist()
    ]


@pytest.fixture
def job(tmp_path: Path, tiny_directory: Path) -> Callable[[str], list[object]]:
    """`specds decode` of three prompts, two of one id, into a folder of its own."""
    prompts = tmp_path / "prompts.jsonl"
    asked = [("a", "w1 w2 w1 w2"), ("b", "w9 w1 w9 w1"), ("a", "w5")]
    prompts.write_text("".join(json.dumps({"id": name, "prompt": text}) + "\n" for name, text in asked))

    def command(folder: str) -> list[object]:
        (tmp_path / folder).mkdir(exist_ok=True)
        files = ["--output", tmp_path / folder / "a.jsonl", "--trace", tmp_path / folder / "t.parquet"]
        options = ["--model", tiny_directory, "--device", "cpu", "--threads", 1, "--max-new-tokens", 6]
        return ["decode", "-p", prompts, *files, *options, "-d", "pld", "--budget", 4, "-q"]

    return command


@pytest.mark.slow
def test_a_trace_is_whole_wherever_its_run_was_killed(
    tmp_path: Path, job: Callable[[str], list[object]], killable: Mortal
) -> None:
    assert killable.run(job("whole")) == 0, killable.said
    whole = rows_of(tmp_path / "whole" / "t.parquet")
    answers = (tmp_path / "whole" / "a.jsonl").read_text().splitlines()
    folder = tmp_path / "killed"
    step = 0
    while True:
        step += 1
        shutil.rmtree(folder, ignore_errors=True)
        if killable.run(job("killed"), at=step, root=folder) != 9:
            break
        assert killable.run(job("killed")) == 0, f"after a kill before change {step}: {killable.said}"
        assert "lack" not in killable.said, f"killed before change {step}"
        assert rows_of(folder / "t.parquet") == whole, f"killed before change {step}"
        assert len((folder / "a.jsonl").read_text().splitlines()) == len(answers)
        assert sorted(one.name for one in folder.iterdir()) == ["a.jsonl", "t.parquet"], f"killed before change {step}"
    assert step > 10


def test_a_trace_says_what_it_lacks(tmp_path: Path, job: Callable[[str], list[object]], run_cli: Run) -> None:
    argv = job("part")
    trace = tmp_path / "part" / "t.parquet"
    place = argv.index("--trace")
    assert run_cli(*argv[:place], *argv[place + 2 :], "--limit", 2).code == 0
    done = run_cli(*argv)
    assert done.code == 0
    assert "lack the steps of 2 answers" in done.err
    assert {row["prompt"] for row in rows_of(trace)} == {"a"}
    assert lacking(str(trace)) == 2
    assert "lacks the steps of 2 answers" in run_cli("explain", trace).err


def test_a_journal_that_somebody_planted_is_refused(
    tmp_path: Path, job: Callable[[str], list[object]], run_cli: Run
) -> None:
    argv = job("planted")
    journal = tmp_path / "planted" / ".t.parquet.journal"
    victim = tmp_path / "victim"
    victim.write_text("precious")
    journal.symlink_to(victim)
    run_cli(*argv).refused("symbolic link")
    journal.unlink()
    os.mkfifo(journal)
    run_cli(*argv).refused("pipe")
    journal.unlink()
    assert victim.read_text() == "precious"
    assert run_cli(*argv, "--limit", 1).code == 0
    (tmp_path / "planted" / "t.parquet").unlink()
    journal.write_text('[{"prompt": "a", "turn": 0, "step": 0, "tokens": "x"}]\n')
    run_cli(*argv).refused("not the journal of a trace")


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.slow)])
def test_a_signal_ends_a_job_in_order(
    number: signal.Signals, tmp_path: Path, job: Callable[[str], list[object]], run_cli: Run
) -> None:
    argv = [str(one) for one in job("ended")]
    prompts = Path(argv[2])
    folder = tmp_path / "ended"
    code = (
        "import signal; signal.signal(signal.SIGTERM, signal.SIG_DFL); signal.signal(signal.SIGHUP, signal.SIG_DFL); "
        "from specds.cli.main import run; run()"
    )
    command = [sys.executable, "-c", code, *argv[:2], "-", *argv[3:]]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stderr is not None
        process.stdin.write("".join(prompts.read_text().splitlines(keepends=True)[:2]))
        process.stdin.flush()
        while not ((folder / "a.jsonl").exists() and (folder / "a.jsonl").read_text().count("\n") == 2):
            assert process.poll() is None, process.stderr.read()
        process.send_signal(number)
        process.send_signal(number)  # as `timeout` does
        said = process.stderr.read()
    assert process.returncode == 128 + number
    assert said.startswith(f"error: ended by {number.name}")
    assert said.count("\n") == 1
    assert sorted(one.name for one in folder.iterdir()) == ["a.jsonl", "t.parquet"]
    ended = rows_of(folder / "t.parquet")
    assert {row["prompt"] for row in ended} == {"a", "b"}
    assert run_cli(*argv).code == 0
    assert rows_of(folder / "t.parquet")[: len(ended)] == ended
