"""Broken prompts, models, options and outputs: refused on one line, with nothing half written."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ..tools import Run, snapshot

LONG = " ".join(["w1"] * 400)


@pytest.fixture
def options(tiny_directory: Path) -> list[object]:
    return ["--model", tiny_directory, "--device", "cpu", "--max-new-tokens", 4]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "good.txt"
    path.write_text("w1 w2\nw3\n")
    return path


def write(data: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(data)


PROMPT_FILES: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "missing": ("p.jsonl", lambda path: None, "no such file"),
    "a directory": ("p.jsonl", lambda path: path.mkdir(), "is a directory"),
    "empty": ("p.jsonl", write(b""), "no prompts"),
    "blank": ("p.txt", write(b"\n\n  \n"), "no prompts"),
    "UTF-16": ("p.txt", write("w1 w2".encode("utf-16")), "UTF-16"),
    "a broken gzip": ("p.jsonl.gz", write(gzip.compress(b'{"prompt": "w1"}\n' * 99)[:-12]), "cannot be read"),
    "no gzip": ("p.txt.gz", write(b"w1\n"), "cannot be read"),
    "no Parquet": ("p.parquet", write(b"PAR1 but not really"), "not a Parquet file"),
    "an empty Parquet": ("p.parquet", write(b""), "not a Parquet file"),
    "under a file": ("good.txt/p.jsonl", lambda path: None, "p.jsonl"),
    "an endless link": ("p.jsonl", lambda path: path.symlink_to(path.name), "p.jsonl"),
}


@pytest.mark.parametrize("case", PROMPT_FILES)
def test_a_prompt_file_that_cannot_be_used(
    case: str, run_cli: Run, tmp_path: Path, prompts: Path, options: list[object]
) -> None:
    name, make, said = PROMPT_FILES[case]
    path = tmp_path / name
    make(path)
    before = snapshot(tmp_path)
    for argv in (["decode", "-p", path, "-o", tmp_path / "out"], ["generate", path, "-s", tmp_path / "new.ds"]):
        if case == "a broken gzip" and argv[0] == "decode":
            continue  # what stands before the damage is answered
        result = run_cli(*argv, *options)
        result.refused(said)
        assert result.out == ""
        assert snapshot(tmp_path) == before


BAD_ROWS: dict[str, bytes] = {
    "bad JSON": b"{bad",
    "an array": b"[1, 2]",
    "a number": b"17",
    "nothing to ask": b'{"id": "x"}',
    "wrong type": b'{"prompt": 7}',
    "null": b'{"prompt": null}',
    "invalid UTF-8": b'{"prompt": "\xff\xfe"}',
    "half a surrogate pair": b'{"prompt": "\\ud800"}',
    "NUL": b'{"prompt": "a\0b"}',
    "deeply nested": b"[" * 100_000,
    "endless number": b'{"prompt": ' + b"9" * 5_000 + b"}",
    "twice the same key": b'{"prompt": "w1", "prompt": "w2"}',
    "empty prompt": b'{"prompt": ""}',
    "blank prompt": b'{"prompt": "   "}',
    "too long a prompt": json.dumps({"prompt": LONG}).encode(),
    "no turns": b'{"turns": []}',
    "an empty turn": b'{"turns": ["w1", ""]}',
    "an unknown role": b'{"messages": [{"role": "wizard", "content": "w1"}]}',
    "the model's turn last": b'{"messages": [{"role": "assistant", "content": "w1"}]}',
    "messages of text": b'{"messages": "w1"}',
    "content of a list": b'{"messages": [{"role": "user", "content": ["w1"]}]}',
}


@pytest.mark.parametrize("case", BAD_ROWS)
def test_a_bad_row_is_reported_and_stops_no_other(
    case: str, run_cli: Run, tmp_path: Path, options: list[object]
) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'{"prompt": "w1"}\n' + BAD_ROWS[case] + b'\n{"prompt": "w2"}\n')
    result = run_cli("decode", "-p", path, "-q", *options)
    assert (result.code, result.err) == (1, "")
    good, bad, last = result.records
    assert good["tokens"]
    assert last["tokens"]
    assert bad["error"]["type"] == "PromptError"
    assert bad["error"]["message"]
    assert bad["error"]["hint"]
    assert bad["error"]["message"].isprintable()

    strict = run_cli("decode", "-p", path, "-q", "--strict", *options)
    strict.refused()
    assert [record["id"] for record in strict.records] == [good["id"], bad["id"]]


def test_a_prompt_of_the_wrong_turn_keeps_the_batch_of_generate(
    run_cli: Run, tmp_path: Path, options: list[object]
) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'{"prompt": "w1"}\n{bad\n{"prompt": "w2"}\n')
    result = run_cli("generate", path, "-s", tmp_path / "new.ds", *options)
    assert result.code == 1
    assert "skipped prompt 1" in result.err
    assert "2 new documents" in result.err
    before = snapshot(tmp_path)
    run_cli("generate", path, "-s", tmp_path / "other.ds", "--strict", *options).refused("row 2")
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("e.jsonl", b"", "nothing to ingest"),
        ("e.parquet", b"PAR1", "not a Parquet file"),
        ("e.jsonl", None, "no such file"),
    ],
)
def test_a_file_that_cannot_be_ingested(
    name: str, data: bytes | None, said: str, run_cli: Run, tmp_path: Path, tiny_directory: Path
) -> None:
    if data is not None:
        (tmp_path / name).write_bytes(data)
    before = snapshot(tmp_path)
    run_cli("ingest", tmp_path / name, "-s", tmp_path / "new.ds", "--model", tiny_directory).refused(said)
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-d", "psychic"], ["psychic", "none", "pld"]),
        (["--verifier", "trust"], ["trust", "greedy"]),
        (["--verifier", "greedy", "--temperature", "1"], ["greedy"]),
        (["--set", "crystal=1"], ["crystal", "auto"]),
        (["--set", "crystal"], ["--set"]),
        (["--set", "=1"], ["--set"]),
        (["-d", "rest", "--set", "length=ten"], ["length", "ten"]),
        (["-d", "rest", "--set", "length=0"], ["length", "at least 1"]),
        (["-d", "rest", "--set", "length=1", "--set", "length=2"], ["twice"]),
        (["-d", "rest"], ["--store"]),
        (["--top-p", "0"], ["--top-p"]),
        (["--top-p", "1.5"], ["--top-p"]),
        (["--temperature", "inf"], ["--temperature"]),
        (["--dtype", "int4"], ["int4", "float32"]),
        (["--format", "docx"], ["docx", "jsonl"]),
    ],
)
def test_options_that_make_no_sense(
    arguments: list[str], words: list[str], run_cli: Run, prompts: Path, options: list[object]
) -> None:
    result = run_cli("decode", "-p", prompts, *options, *arguments)
    result.refused(*words, code=2)
    assert result.out == ""


def test_a_device_that_is_not_there(run_cli: Run, prompts: Path, tiny_directory: Path) -> None:
    run_cli("decode", "-p", prompts, "--model", tiny_directory, "--device", "quantum").refused("quantum", code=2)


def model_directory(tiny: Path, path: Path, change: str) -> None:
    import shutil

    shutil.copytree(tiny, path)
    config, weights = path / "config.json", path / "model.safetensors"
    if change == "no config":
        config.unlink()
    elif change == "no weights":
        weights.unlink()
    elif change == "pickled weights":
        weights.rename(path / "pytorch_model.bin")
    elif change == "no tokenizer":
        for file in path.glob("tokenizer*"):
            file.unlink()
    elif change == "config not JSON":
        config.write_text("{")
    elif change == "unknown architecture":
        config.write_text(json.dumps({**json.loads(config.read_text()), "model_type": "oracle"}))
    elif change == "weights truncated":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif change == "weights no safetensors":
        weights.write_bytes(b"\xff" * 1000)
    elif change == "weights empty":
        weights.write_bytes(b"")
    elif change == "weights of another shape":
        config.write_text(json.dumps({**json.loads(config.read_text()), "hidden_size": 64}))
    elif change == "tokenizer not JSON":
        (path / "tokenizer.json").write_text("{")


@pytest.mark.parametrize(
    "change",
    [
        "no config",
        "no weights",
        "pickled weights",
        "no tokenizer",
        "config not JSON",
        "unknown architecture",
        "weights truncated",
        "weights no safetensors",
        "weights empty",
        "weights of another shape",
        "tokenizer not JSON",
    ],
)
def test_a_broken_model_directory(
    change: str, run_cli: Run, prompts: Path, tmp_path: Path, tiny_directory: Path
) -> None:
    path = tmp_path / "model"
    model_directory(tiny_directory, path, change)
    before = snapshot(tmp_path)
    result = run_cli("decode", "-p", prompts, "--model", path, "--device", "cpu", "-o", tmp_path / "out")
    result.refused(str(path))
    run_cli("generate", prompts, "-s", tmp_path / "new.ds", "--model", path, "--device", "cpu").refused(str(path))
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("data", [b"", b"GGUF", b"GGUF\x03\0\0\0" + b"\xff" * 200, b"not a model at all\n" * 50])
def test_a_gguf_file_that_is_none(
    data: bytes, run_cli: Run, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "model.gguf").write_bytes(data)
    run_cli("decode", "-p", prompts, "--model", tmp_path / "model.gguf", "--device", "cpu").refused("model.gguf")
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file() and path.suffix != ".lock"]


@pytest.mark.parametrize("name", ["gpt5", "no/such/model/anywhere", "../nowhere", "/nowhere/at/all", "", " ", "a b/c"])
def test_a_model_that_is_not_there(name: str, run_cli: Run, prompts: Path) -> None:
    run_cli("decode", "-p", prompts, "--model", name).refused(repr(name), "smollm2-135m")


@pytest.mark.parametrize(
    "path", ["/proc/answers", "/dev/full", "/dev/null", "good.txt/answers", ".", "no/such/answers"]
)
@pytest.mark.parametrize("option", ["--output", "--trace"])
def test_a_place_where_no_output_can_be(
    path: str, option: str, run_cli: Run, tmp_path: Path, prompts: Path, options: list[object]
) -> None:
    devices = [Path("/dev/full").stat().st_rdev, Path("/dev/null").stat().st_rdev]
    before = snapshot(tmp_path)
    result = run_cli("decode", "-p", prompts, option, tmp_path / path, *options)
    result.refused("cannot write", path.rpartition("/")[2].replace(".", ""))
    assert snapshot(tmp_path) == before
    assert [Path("/dev/full").stat().st_rdev, Path("/dev/null").stat().st_rdev] == devices


def test_output_and_trace_that_cannot_both_be_leave_neither(
    run_cli: Run, tmp_path: Path, prompts: Path, options: list[object]
) -> None:
    before = snapshot(tmp_path)
    good, bad = tmp_path / "good.out", prompts / "bad.out"
    run_cli("decode", "-p", prompts, "--output", good, "--trace", bad, *options).refused("bad.out")
    run_cli("decode", "-p", prompts, "--output", bad, "--trace", good, *options).refused("bad.out")
    assert snapshot(tmp_path) == before


def test_a_full_disk_keeps_the_answers_that_fit(tmp_path: Path, killable: Any, tiny_directory: Path) -> None:
    (tmp_path / "p.txt").write_text("".join(f"w{number}\n" for number in range(100)))
    options = ["--model", tiny_directory, "--device", "cpu", "--max-new-tokens", 4, "-q"]
    argv = ["decode", "-p", tmp_path / "p.txt", "-o", tmp_path / "out", *options]
    assert killable.run(argv, room=6_000) == 1
    assert len(killable.said.splitlines()) == 1, killable.said
    assert killable.said.startswith("error: cannot write ")
    held = (tmp_path / "out").read_bytes()
    assert killable.run(argv) == 0, killable.said
    whole = (tmp_path / "out").read_bytes()
    assert whole.startswith(held[: held.rindex(b"\n") + 1])
    assert [json.loads(line)["id"] for line in whole.splitlines()] == [str(number) for number in range(100)]

    trace = ["decode", "-p", tmp_path / "p.txt", "--trace", tmp_path / "trace", *options]
    assert killable.run(trace, room=2_000) == 1
    assert "error: cannot write" in killable.said.splitlines()[-1]
    assert not (tmp_path / "trace").exists()
    assert not list(tmp_path.glob(".trace*"))


RUN = [sys.executable, "-c", "from specds.cli.main import run; run()"]


def test_a_reader_that_stops_early(tmp_path: Path, tiny_directory: Path) -> None:
    """`specds decode … | head -1`: silence, and what a shell reports of any program that a closed pipe ends."""
    (tmp_path / "p.txt").write_text("w1 w2\n" * 300)
    argv = [
        "decode",
        "-p",
        str(tmp_path / "p.txt"),
        "--max-new-tokens",
        "8",
        "--model",
        str(tiny_directory),
        "--device",
        "cpu",
        "-q",
    ]
    with subprocess.Popen([*RUN, *argv], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert json.loads(process.stdout.readline())["id"] == "0"
        process.stdout.close()
        said = process.stderr.read().decode()
    assert (process.returncode, said) == (141, "")


@pytest.mark.parametrize("command", ["inspect", "inspect --json", "--help"])
def test_a_full_disk_under_stdout(command: str, stocked: dict[str, Path]) -> None:
    argv = [*command.split(), str(stocked["faiss"])] if "inspect" in command else command.split()
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run([*RUN, *argv], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("error: ")
    assert "No space left" in done.stderr


def test_closed_streams(stocked: dict[str, Path]) -> None:
    """As cron and some supervisors start programs."""
    store = str(stocked["faiss"])
    code = "import os, sys; os.close({}); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    for number in (0, 1):
        argv = [sys.executable, "-c", code.format(number), *RUN[1:], "verify", store]
        done = subprocess.run(argv, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, check=False)
        assert "Traceback" not in done.stderr
        assert (done.returncode, done.stderr.count("\n")) == (0, 1), done.stderr


def test_interrupted_by_the_user(tmp_path: Path, tiny_directory: Path) -> None:
    import signal

    fifo = tmp_path / "never"
    os.mkfifo(fifo)
    argv = ["generate", str(fifo), "-s", str(tmp_path / "new.ds"), "--model", str(tiny_directory)]
    # Who runs the tests in the background may have told them to ignore it.
    heed = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); " + RUN[2]
    with subprocess.Popen([*RUN[:2], heed, *argv], stderr=subprocess.PIPE, text=True) as process:
        writer = fifo.open("w")  # waits until the command reads
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        said = process.stderr.read()
        writer.close()
    assert process.returncode == 130
    assert said.startswith("error: interrupted")
    assert said.count("\n") == 1
