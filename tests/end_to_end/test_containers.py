"""The command line as it is run in containers: by a user without a home, where hardly anything can be written."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from .test_wheel import ROOT

# A user that no system lists, as container platforms make them up.
STRANGER = 54321
AS_STRANGER = ("setpriv", "--reuid", str(STRANGER), "--regid", str(STRANGER), "--clear-groups")
pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("setpriv") is None, reason="only root can run a command as another user"
)

_RUN = """
import json, sys
from specds.cli.main import run
print("started", flush=True)
for words in json.loads(sys.argv[1]):
    sys.argv = ["specds", *words]
    try:
        run()
    except SystemExit as ended:
        print("code", ended.code, flush=True)
"""

# Everything is read-only, but for one directory.
_READ_ONLY = """
set -e
mount --make-rprivate /
mount -o remount,bind,ro /
mount -t tmpfs -o ro none /dev/shm
mount --bind "$OUT" "$OUT"
mount -o remount,bind,rw "$OUT"
cd "$HERE"
! touch "$HERE/x" 2> /dev/null
! touch /tmp/x 2> /dev/null
exec "$@"
"""


@pytest.fixture
def place(tmp_path: Path, tiny_directory: Path, stocked: dict[str, Path]) -> Iterator[Path]:
    """A directory that others can read, with a model, a store and prompts; in `out` they can write."""
    here = Path(tempfile.mkdtemp(prefix="specds-container-"))
    try:
        shutil.copytree(tiny_directory, here / "model")
        shutil.copytree(stocked["scann"], here / "given.ds")
        rows = [{"id": f"p{number}", "prompt": f"w{number} w{number + 1} w{number}"} for number in range(4)]
        (here / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        subprocess.run(["chmod", "-R", "a+rX,go-w", str(here)], check=True)
        (here / "out").mkdir()
        os.chown(here / "out", STRANGER, STRANGER)
        yield here
    finally:
        shutil.rmtree(here)


def environment(**changes: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("XDG_", "HF_", "PYTHON"))}
    return {**kept, "HOME": "/nonexistent", "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", **changes}


def codes(done: subprocess.CompletedProcess[str], commands: Sequence[object]) -> list[str]:
    if "started" not in done.stdout:
        pytest.skip(f"another user cannot run this Python: {done.stderr.splitlines()[-1:]}")
    found = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("code ")]
    assert len(found) == len(commands), done.stderr
    return found


def test_another_user_without_a_home_generates_builds_and_decodes(place: Path) -> None:
    out = place / "out"
    model = ["--model", str(place / "model"), "--device", "cpu"]
    decoding = ["decode", "-p", str(place / "prompts.jsonl"), *model, "--max-new-tokens", "6", "-d", "rest"]
    commands = [
        ["generate", str(place / "prompts.jsonl"), "--store", str(out / "own.ds"), *model, "--max-new-tokens", "6"],
        ["build-suffix", str(out / "own.ds")],
        [*decoding, "--runtime", "generic", "-s", str(out / "own.ds"), "-o", str(out / "own.jsonl")],
        [*decoding, "--runtime", "generic", "-s", str(place / "given.ds"), "-o", str(out / "given.jsonl")],
    ]
    (out / "tmp").mkdir()
    os.chown(out / "tmp", STRANGER, STRANGER)
    done = subprocess.run(
        [*AS_STRANGER, sys.executable, "-c", _RUN, json.dumps(commands)],
        cwd=place,
        env=environment(TMPDIR=str(out / "tmp")),
        capture_output=True,
        text=True,
        check=False,
    )
    assert codes(done, commands) == ["0"] * len(commands), done.stderr
    for name in ("own.jsonl", "given.jsonl"):
        assert [json.loads(line)["id"] for line in (out / name).read_text().splitlines()] == ["p0", "p1", "p2", "p3"]
    # Nobody but its user can put anything where compiled code is loaded from.
    caches = out / "tmp" / f"specds-{STRANGER}"
    assert all(path.stat().st_mode & 0o777 == 0o700 for path in (caches, *caches.glob("*")))


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """specds as pip installs it, where other users can read it."""
    here = Path(tempfile.mkdtemp(prefix="specds-installed-"))
    try:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(here), str(ROOT)]
        subprocess.run(pip, check=True)
        subprocess.run(["chmod", "-R", "a+rX", str(here)], check=True)
        yield here
    finally:
        shutil.rmtree(here)


@pytest.mark.slow
@pytest.mark.parametrize("warm", [False, True], ids=["never run", "run once by its owner"])
def test_an_installed_wheel_runs_where_only_the_output_can_be_written(
    warm: bool, installed: Path, place: Path, stocked: dict[str, Path]
) -> None:
    out = place / "out"
    model = ["--model", str(place / "model"), "--device", "cpu"]
    decoding = ["decode", "-p", str(place / "prompts.jsonl"), *model, "--max-new-tokens", "6"]
    commands = [
        ["generate", str(place / "prompts.jsonl"), "--store", str(out / "own.ds"), *model, "--max-new-tokens", "6"],
        ["build-suffix", str(out / "own.ds")],
        ["build-dense", str(out / "own.ds"), *model, "--dims", "4"],
        [*decoding, "-s", str(out / "own.ds"), "-o", str(out / "own.jsonl")],
        [*decoding, "-s", str(place / "given.ds"), "-o", str(out / "given.jsonl")],
    ]
    command = [sys.executable, "-c", _RUN, json.dumps(commands)]
    own = environment(PYTHONPATH=str(installed), OUT=str(out), HERE=str(place))
    if warm:
        home = {"HOME": str(place / "home")}  # which root would make
        done = subprocess.run(command, cwd=place, env={**own, **home}, capture_output=True, text=True, check=False)
        assert codes(done, commands) == ["0"] * len(commands), done.stderr
        for path in out.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    shelled = ["unshare", "--mount", "bash", "-c", _READ_ONLY, "bash", *AS_STRANGER, *command]
    done = subprocess.run(shelled, cwd=place, env=own, capture_output=True, text=True, check=False)
    if "mount:" in done.stderr or "unshare:" in done.stderr:
        pytest.skip("this machine lets nobody mount anything")
    assert codes(done, commands) == ["0"] * len(commands), done.stderr
    # All commands run in one process here, which says so once.
    assert done.stderr.count("compiled code can be kept nowhere") == (0 if warm else 1)
    for name in ("own.jsonl", "given.jsonl"):
        assert [json.loads(line)["id"] for line in (out / name).read_text().splitlines()] == ["p0", "p1", "p2", "p3"]
