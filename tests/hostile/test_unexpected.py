"""What once ended in "unexpected …", in an escape sequence on a screen, or in the wrong advice."""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file, save_file

from specds.calibration.trace import trace_schema
from specds.datastore.corrections import Pair, Table, key_of, write_table
from specds.datastore.manifest import Identity, Provenance
from specds.errors import CorruptStore, InputError, shortage

from ..tools import Run, damage, manifest_of, reseal

ESCAPE = "\x1b[2J\x9b31m\u202e"
RUN = [sys.executable, "-c", "from specds.cli.main import run; run()"]


@pytest.fixture
def options(tiny_directory: Path) -> list[object]:
    return ["--model", tiny_directory, "--device", "cpu"]


@pytest.fixture
def table(tmp_path: Path) -> Path:
    pair = Pair(Identity(f"t{ESCAPE}", "1" * 64), Identity("d", "2" * 64), Identity("k", "3" * 64), 128)
    path = tmp_path / "table.parquet"
    history = [Provenance(f"specds {ESCAPE}", "0", "2026-01-01")]
    write_table(path, Table.empty(pair).plus({key_of(5, 7): 3, key_of(6, 9): 1}, history=history))
    return path


def change_description(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    table = pq.read_table(path)
    record = json.loads(table.schema.metadata[b"specds"])
    change(record)
    pq.write_table(table.replace_schema_metadata({b"specds": json.dumps(record)}), path)


@pytest.mark.parametrize(
    "change",
    [
        {"pair": "x"},
        {"pair": {"target": "x"}},
        {"pair": None},
        {"history": None},
        {"history": [1]},
        {"history": [{"command": 1, "version": "", "date": ""}]},
        {"vocabulary": True},
        {"tokens": 1 << 70},
        {"done": "x"},
        {"version": "x" * 10_000},
    ],
    ids=str,
)
def test_a_table_that_describes_itself_otherwise(change: dict[str, Any], table: Path, run_cli: Run) -> None:
    change_description(table, lambda record: record.update(change))
    run_cli("table", "inspect", table).refused(str(table), "calibrate-csd")


def test_names_in_a_table_do_not_reach_the_terminal_as_they_are(table: Path, run_cli: Run) -> None:
    result = run_cli("table", "inspect", table)
    assert result.code == 0, result
    assert "\\x1b[2J" in result.out
    assert not {"\x1b", "\x9b", "\u202e"} & set(result.out + result.err)


def rename_column(path: Path, name: str) -> None:
    """Its first letter becomes a byte that begins no letter, wherever the name stands."""
    data = path.read_bytes()
    assert name.encode() in data
    path.write_bytes(data.replace(name.encode(), b"\xff" + name.encode()[1:]))


def test_a_column_name_that_is_not_utf8(
    table: Path, tmp_path: Path, stocked: dict[str, Path], run_cli: Run, options: list[object]
) -> None:
    rename_column(table, "draft_token")
    run_cli("table", "inspect", table).refused(str(table), "not UTF-8")

    prompts = tmp_path / "p.parquet"
    pq.write_table(pa.table({"prompt": ["w1"], "whatever": [1]}), prompts)
    rename_column(prompts, "whatever")
    run_cli("decode", "-p", prompts, *options).refused(str(prompts), "not UTF-8")

    trace = tmp_path / "t.parquet"
    pq.write_table(trace_schema().empty_table(), trace)
    rename_column(trace, "committed")
    run_cli("explain", trace).refused(str(trace), "not UTF-8")
    good = tmp_path / "good.txt"
    good.write_text("w1\n")
    argv = ["decode", "-p", good, "--max-new-tokens", 2, "--output", tmp_path / "a.jsonl", "-d", "none", *options]
    assert run_cli(*argv).code == 0
    run_cli(*argv, "--trace", trace).refused(str(trace), "not UTF-8")

    store = Path(shutil.copytree(stocked["scann"], tmp_path / "s.ds"))
    part = manifest_of(store).corpus[0].file
    rename_column(store / part, "source")
    reseal(store)
    run_cli("rebuild", store, "--suffix-only").refused(part)


def test_a_date_beyond_all_calendars_spoils_its_row_only(run_cli: Run, tmp_path: Path, options: list[object]) -> None:
    prompts = tmp_path / "p.parquet"
    dates = pa.array([1 << 62, 0], pa.int64()).cast(pa.timestamp("us"))
    pq.write_table(pa.table({"prompt": ["w1", "w2"], "id": dates}), prompts)
    bad, good = run_cli("decode", "-p", prompts, "-q", "--max-new-tokens", 2, *options).records
    assert bad["error"]["type"] == "PromptError"
    assert good["tokens"]


@pytest.fixture
def result(run_cli: Run, tmp_path: Path, options: list[object]) -> tuple[Path, list[object]]:
    """A small bench over prompts whose ids would clear a screen, and its command."""
    prompts = tmp_path / "p.jsonl"
    prompts.write_text("".join(json.dumps({"id": f"{ESCAPE}{n}", "prompt": f"w{n} w5"}) + "\n" for n in range(2)))
    argv = ["bench", "-p", prompts, "--methods", "none,pld", "--max-new-tokens", 4, "--output", tmp_path / "bench"]
    found = run_cli(*argv, *options)
    assert found.code in (0, 1), found
    assert "\x1b" not in found.out + found.err
    return tmp_path / "bench", [*argv, *options]


def test_what_stands_in_a_result_does_not_reach_pages_and_screens(
    result: tuple[Path, list[object]], run_cli: Run
) -> None:
    path, again = result
    run = json.loads((path / "run.json").read_text())
    run["sessions"][0]["command"] = f"specds bench {ESCAPE} \ud800"
    (path / "run.json").write_text(json.dumps(run))
    found = run_cli(*again)
    assert found.code in (0, 1), found
    page = (path / "report.html").read_text()
    assert "\\x1b[2J" in page
    assert all(one.isprintable() or one == "\n" for one in page)
    assert "\x1b" not in found.out + found.err + run_cli("compare", path, path).out


@pytest.mark.parametrize(
    ("file", "change", "word"),
    [
        ("run.json", lambda run: run.update(sessions=7), "run.json"),
        ("run.json", lambda run: run.update(options=None), "run.json"),
        ("run.json", lambda run: run["sessions"][0].update(machine={"threads": [1]}), "run.json"),
        ("run.json", lambda run: run["sessions"][0]["machine"].update(threads="2"), "run.json"),
        ("run.json", lambda run: run["sessions"][0]["machine"].update(memory_gb=float("nan")), "run.json"),
        ("run.json", lambda run: run["sessions"][0].update(git={"commit": 7}), "run.json"),
    ],
)
def test_a_run_whose_account_is_none(
    file: str, change: Callable[[Any], object], word: str, result: tuple[Path, list[object]], run_cli: Run
) -> None:
    path, again = result
    body = json.loads((path / file).read_text())
    change(body)
    (path / file).write_text(json.dumps(body))
    run_cli(*again).refused(word)


def change_column(path: Path, name: str, change: Callable[[Any], Any]) -> None:
    table = pq.read_table(path)
    place = table.schema.get_field_index(name)
    field = table.schema.field(place)
    values = [change(value) for value in table.column(place).to_pylist()]
    pq.write_table(table.set_column(place, field, pa.array(values, field.type)), path)


def test_results_that_cannot_be(result: tuple[Path, list[object]], run_cli: Run, tmp_path: Path) -> None:
    path, again = result
    for file, column, change, word in (
        ("results.parquet", "seconds", lambda value: 0.0, "results.parquet"),
        ("results.parquet", "tokens", lambda value: [[128] * len(value[0])], "not this model's"),
        ("results.parquet", "prompt_tokens", lambda value: None, "results.parquet"),
        ("results.parquet", "texts", lambda value: [], "results.parquet"),
        ("steps.parquet", "draft_parents", lambda value: [7], "steps.parquet"),
        ("steps.parquet", "path", lambda value: [10**6], "steps.parquet"),
        ("steps.parquet", "forward_seconds", lambda value: float("nan"), "steps.parquet"),
    ):
        before = (path / file).read_bytes()
        change_column(path / file, column, change)
        run_cli(*again).refused(word)
        (path / file).write_bytes(before)
    rename_column(path / "results.parquet", "rouge_l_plain")
    run_cli("compare", path, path).refused("results.parquet")
    damage(path / "summary.json", "emptied")
    run_cli("compare", path, path).refused("summary.json")


@pytest.mark.parametrize(
    "change",
    [
        lambda row: row.pop("lossless"),
        lambda row: row.update(seconds=(1 << 53) + 1),
        lambda row: row.update(rouge_l_plain=1 << 61),
        lambda row: row.update(tokens=[["x"]]),
        lambda row: row.update(prompt="\ud800"),
        lambda row: row.update(new_tokens=0),
    ],
)
def test_a_journal_of_what_was_not_measured(
    change: Callable[[Any], object], result: tuple[Path, list[object]], run_cli: Run
) -> None:
    path, again = result
    row = pq.read_table(path / "results.parquet").to_pylist()[0]
    change(row)
    (path / "journal.jsonl").write_text(json.dumps({"row": row, "steps": []}) + "\n")
    run_cli(*again).refused("journal.jsonl")


def test_a_figure_that_is_none_in_a_summary(result: tuple[Path, list[object]], run_cli: Run) -> None:
    path, _ = result
    summary = json.loads((path / "summary.json").read_text())
    for value in ("x", {"value": "x", "low": None, "high": None}, {"value": 10**400, "low": 0, "high": 1}):
        summary["groups"][0]["methods"]["none"]["mat"] = value
        (path / "summary.json").write_text(json.dumps(summary))
        run_cli("compare", path, path).refused(str(path))


def test_an_answer_of_half_a_surrogate_pair(run_cli: Run, tmp_path: Path, options: list[object]) -> None:
    prompts, answers = tmp_path / "p.jsonl", tmp_path / "a.jsonl"
    prompts.write_text(json.dumps({"id": "x", "turns": ["w1", "w2"]}) + "\n")
    assert run_cli("decode", "-p", prompts, "-d", "none", "--max-new-tokens", 4, "-o", answers, *options).code == 0
    record = json.loads(answers.read_text())
    record["turns"][0]["text"] = "\ud800"
    answers.write_text(json.dumps(record) + "\n")
    run_cli("replay", "--answers", answers, "-p", prompts, "--methods", "pld", *options).refused("surrogate")


@pytest.mark.parametrize("array", ["mean", "scale", "components"])
@pytest.mark.parametrize("kind", ["scann", "faiss"])
def test_a_normalizer_of_huge_numbers_is_none(
    array: str, kind: str, stocked: dict[str, Path], tmp_path: Path, run_cli: Run, options: list[object]
) -> None:
    store = Path(shutil.copytree(stocked[kind], tmp_path / "s.ds"))
    file = next(store.glob("dense/*/normalizer.safetensors"))
    arrays = load_file(file)
    arrays[array] = np.full_like(arrays[array], 3e38)
    save_file(arrays, file)
    reseal(store)
    result = run_cli("decode", "-p", "-", "-s", store, "-d", "dresd", *options, stdin="w1 w2\n")
    result.refused("normalizer.safetensors")


@pytest.mark.parametrize(
    ("file", "dtype"), [("suffix/000001/tokens.bin", np.uint16), ("dense/000001/tokens.bin", np.uint16)]
)
def test_verify_finds_the_tokens_for_which_a_draft_was_refused(
    file: str, dtype: Any, stocked: dict[str, Path], tmp_path: Path, run_cli: Run, options: list[object]
) -> None:
    store = Path(shutil.copytree(stocked["scann"], tmp_path / "s.ds"))
    values = np.fromfile(store / file, dtype)
    np.where(values == np.iinfo(dtype).max, values, values + 500).astype(dtype).tofile(store / file)
    reseal(store)
    found = run_cli("verify", store)
    assert found.code == 1
    assert found.out.startswith(f"{file}: holds token "), found
    shutil.rmtree(store)
    shutil.copytree(stocked["scann"], store)
    positions = store / "dense/000001/positions.bin"
    np.full_like(np.fromfile(positions, np.uint32), 10**6).tofile(positions)
    reseal(store)
    assert run_cli("verify", store).out.startswith("dense/000001/positions.bin: points to 1,000,000 ")


def test_a_refused_draft_says_what_helps(
    stocked: dict[str, Path], tmp_path: Path, run_cli: Run, options: list[object]
) -> None:
    store = Path(shutil.copytree(stocked["scann"], tmp_path / "s.ds"))
    file = store / "suffix/000001/tokens.bin"
    values = np.fromfile(file, np.uint16)
    # The text stands there as it is, and what follows it everywhere is not a token.
    values[1::3] = np.where(values[1::3] == 65535, 65535, 60_000)
    values.tofile(file)
    reseal(store)
    text = " ".join(f"w{n}" for n in range(123)) + "\n"
    argv = ["decode", "-p", "-", "-s", store, "-d", "rest", "--set", "min_match=1", "--budget", 8]
    argv += ["--max-new-tokens", 40, *options]
    run_cli(*argv, stdin=text).refused(str(store), "specds verify", "specds rebuild")
    assert run_cli("verify", store).code == 1
    assert run_cli("rebuild", store, "--suffix-only").code == 0
    assert run_cli("verify", store).code == 0
    assert run_cli(*argv, stdin=text).code == 0


def test_wrong_usage_shows_no_escape_sequence(run_cli: Run) -> None:
    result = run_cli("decode", f"--{ESCAPE}")
    assert result.code == 2
    assert not {"\x1b", "\x9b"} & set(result.err)


def limited(kind: int, limit: int, *argv: object) -> str:
    command = [*RUN, *map(str, argv)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(kind, (limit, limit)),
    )
    assert done.returncode == 1, done
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr


def test_too_little_memory_and_too_few_files_are_called_so(stocked: dict[str, Path], options: list[object]) -> None:
    store = stocked["scann"]
    assert limited(resource.RLIMIT_AS, 300_000 << 10, "inspect", store).startswith("error: not enough memory")
    said = limited(resource.RLIMIT_NOFILE, 8, "decode", "-p", Path(__file__), "-s", store, *options)
    assert said.startswith("error: too many open files")
    assert "ulimit -n" in said


def chained(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


def test_a_shortage_is_found_among_the_causes_of_an_error() -> None:
    many = OSError(24, "Too many open files", "s.ds/keys")
    cases: list[tuple[Exception, str]] = [
        (MemoryError(), "not enough memory"),
        (chained(InputError("a.parquet is damaged"), pa.ArrowMemoryError("malloc of size 9 failed")), "enough memory"),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: can't allocate memory"), "enough memory"),
        (RuntimeError("std::bad_alloc"), "not enough memory"),
        (ImportError("libx.so: failed to map segment from shared object"), "not enough memory"),
        (chained(CorruptStore("s.ds is damaged"), many), "too many open files"),
        (RuntimeError("can't start new thread"), "threads"),
    ]
    for error, word in cases:
        found = shortage(error)
        assert found is not None, error
        assert word in found.message
        assert found.hint
    assert shortage(InputError("out of memory, says the prompt")) is None
    assert shortage(chained(CorruptStore("damaged"), OSError(5, "Input/output error"))) is None
    assert shortage(ValueError("malloc of size")) is None
