"""What a user is told before, during and after a long job."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from specds.cli.render import LINE_SECONDS, working

from ..conftest import make_model
from ..tools import Run


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    rows = [{"id": f"p{number}", "prompt": f"w{number} w{number + 1} w{number}"} for number in range(6)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def tiny_options(tiny_directory: Path) -> list[object]:
    return ["--model", tiny_directory, "--device", "cpu", "--max-new-tokens", 12]


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("decode -p P -s FILE", ["is a file", "a store is a directory"]),
        ("decode -p P -d rest", ["datastore", "--store"]),
        ("decode -p P --verifier csd --table FILE", ["correction table"]),
        ("decode -p P --verifier csd --table NONE", ["no correction table"]),
        ("bench -p P -o NONE --methods rest", ["rest:S", "suffix"]),
        ("bench -p P -o NONE --methods pld,dresd:FILE", ["is a file"]),
        ("bench -p P -o NONE --methods pld!csd?table=FILE", ["correction table"]),
        ("replay -p P --answers P --methods rest", ["rest:S"]),
        ("tune -p P --answers P --cost COST --methods rest:FILE", ["is a file"]),
        ("evaluate FILE -p P", ["is a file"]),
        ("calibrate-csd -p P -o FILE", ["correction table"]),
        ("calibrate-csd -p P -o NONE -d rest -s FILE", ["is a file"]),
        ("calibrate-drafts -p P -s FILE", ["is a file"]),
        ("build-dense FILE", ["is a file"]),
        ("generate P -s FILE", ["not a datastore"]),
        ("ingest P --text-field prompt -s FILE", ["not a datastore"]),
    ],
)
def test_what_is_no_store_or_table_is_refused_before_any_model_is_looked_for(
    command: str, words: list[str], run_cli: Run, prompts: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("neither a store nor a table")
    (tmp_path / "cost").write_text(
        json.dumps({"format": "specds cost curve 1", "rows": [1, 2], "contexts": [8], "seconds": [[0.1, 0.2]]})
    )
    names = {"P": prompts, "FILE": tmp_path / "file", "NONE": tmp_path / "none", "COST": tmp_path / "cost"}
    given = [re.sub(r"\b(P|FILE|NONE|COST)\b", lambda found: str(names[found[0]]), word) for word in command.split()]
    result = run_cli(*given, "--model", tmp_path / "no-such-model")
    result.refused(*words, code=result.code)
    assert result.code in (1, 2)
    assert "no-such-model" not in result.err
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("command", ["decode -p P", "bench -p P -o OUT", "profile"])
def test_the_gpu_runtime_is_refused_where_the_model_is_on_no_gpu(
    command: str, run_cli: Run, prompts: Path, tiny_directory: Path, tmp_path: Path
) -> None:
    shutil.copytree(tiny_directory, tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"what cannot be loaded")
    given = command.replace("P", str(prompts)).replace("OUT", str(tmp_path / "out")).split()
    run_cli(*given, "--model", tmp_path / "model", "--device", "cpu", "--runtime", "cuda").refused("GPU", code=2)
    run_cli(*given, "--model", tmp_path / "model", "--device", "cpu", "--runtime", "gpu").refused("cuda", code=2)


def test_decode_ends_with_the_runtime_the_speed_and_the_first_failure(
    run_cli: Run, prompts: Path, tmp_path: Path, tiny_options: list[object]
) -> None:
    output = tmp_path / "answers.jsonl"
    prompts.write_text(prompts.read_text() + '{"id": "blank", "prompt": ""}\n{"id": "number", "prompt": 3}\n')
    for arguments in ([], ["--budget", 4, "--parallel", 1], ["-o", output, "--runtime", "generic"]):
        result = run_cli("decode", "-p", prompts, "-d", "pld", *tiny_options, *arguments)
        assert result.code == 1
        assert ("generic" if "generic" in arguments else "cpu") + " runtime" in result.err
        (speed,) = re.findall(r"about (\d+\.\d\d) × plain decoding", result.err)
        assert float(speed) > 0
        (line,) = (line for line in result.err.splitlines() if "failed; the first" in line)
        assert "2 of 8" in line
        assert "blank" in line
        assert " — " in line
    many = run_cli("decode", "-p", prompts, "-d", "pld", *tiny_options, "--parallel", 3)
    assert "3 requests at once" in many.err
    assert "× plain decoding of as many requests at once" in " ".join(many.err.split())
    # What a pass of one request takes is not known where several shared all of them, and nothing is made up.
    for arguments in (["-d", "none"], ["-d", "pld", "--budget", 4, "--parallel", 3]):
        assert "× plain" not in run_cli("decode", "-p", prompts, *tiny_options, *arguments).err


def test_auto_says_that_another_models_dense_index_is_not_used(
    run_cli: Run, prompts: Path, tmp_path: Path, stocked: dict[str, Path], tiny_options: list[object]
) -> None:
    other = make_model(seed=1)
    other.network.save_pretrained(tmp_path / "other")
    other.tokenizer.hf.save_pretrained(tmp_path / "other")
    told = run_cli("decode", "-p", prompts, "-s", stocked["scann"], *tiny_options, "--model", tmp_path / "other")
    (line,) = (line for line in told.err.splitlines() if "is not used" in line)
    assert str(stocked["scann"]) in line
    assert "build-dense" in line
    own = run_cli("decode", "-p", prompts, "-s", stocked["scann"], *tiny_options)
    assert (told.code, own.code) == (0, 0)
    assert "is not used" not in own.err


def test_progress_is_told_in_lines_where_stderr_is_no_terminal(
    run_cli: Run, prompts: Path, tmp_path: Path, tiny_options: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specds.cli.render.LINE_SECONDS", 0.001)
    commands = {
        "decoding": ["decode", "-p", prompts, *tiny_options],
        "generating": ["generate", prompts, "-s", tmp_path / "own.ds", *tiny_options],
        "ingesting": ["ingest", prompts, "--text-field", "prompt", "-s", tmp_path / "in.ds", *tiny_options[:2]],
    }
    for what, command in commands.items():
        result = run_cli(*command)
        assert result.code == 0, result
        lines = [line for line in result.err.splitlines() if line.startswith(f"{what}: ")]
        assert any(" of 6, " in line and "%" in line and " so far" in line for line in lines), result.err
        # All six stand in one batch: what is said of it in the midst of it is a part of it.
        if what == "generating":
            shares = {int(found) for line in lines for found in re.findall(r"(\d+)%", line)}
            assert shares - {0, 100}, lines
    quiet = run_cli("decode", "-p", prompts, "-q", *tiny_options)
    assert (quiet.code, quiet.err) == (0, "")


def test_no_two_lines_of_progress_tell_the_same_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    through = threading.Event()
    times = itertools.count(0.0, LINE_SECONDS)

    def clock() -> float:
        now = next(times)
        if now > 3 * 3600:
            through.set()
        return now

    monkeypatch.setattr("specds.cli.render.time", SimpleNamespace(monotonic=clock))
    monkeypatch.setattr("specds.cli.render.LINE_SECONDS", 1e-5)
    with working("waiting"):
        assert through.wait(60)
    lines = capsys.readouterr().err.splitlines()
    assert len(set(lines)) == len(lines) > 300
    for line in ("60 s", "2 min", "2 min 30 s", "1 h 30 min", "2 h 0 min 30 s"):
        assert f"waiting: {line} so far" in lines


def test_a_stream_has_no_total_and_a_file_with_a_limit_has_the_smaller_one(
    run_cli: Run, prompts: Path, tiny_options: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specds.cli.render.LINE_SECONDS", 0.001)
    streamed = run_cli("decode", "-p", "-", *tiny_options, stdin=prompts.read_text())
    assert "decoding: " in streamed.err
    assert "decoding: 2 of" not in streamed.err
    limited = run_cli("decode", "-p", prompts, "--limit", 4, *tiny_options)
    assert " of 4" in limited.err
