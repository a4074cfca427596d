"""The commands around drafter auto: calibrate-drafts, inspect, decode --trace and explain."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from specds.calibration.explanation import explain
from specds.calibration.trace import trace_schema
from specds.errors import InputError

Run = Callable[..., Any]


@pytest.fixture
def tiny_options(tiny_directory: Path) -> list[object]:
    return ["--model", tiny_directory, "--max-new-tokens", 24, "--device", "cpu"]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    texts = [" ".join(f"w{(7 * n + k * k) % 30}" for k in range(20 + n % 5)) for n in range(12)]
    path.write_text("".join(json.dumps({"id": str(n), "prompt": text}) + "\n" for n, text in enumerate(texts)))
    return path


def test_calibrated_drafts_lie_beside_the_store_and_are_used(
    run_cli: Run, prompts: Path, tmp_path: Path, tiny_options: list[object], tiny_directory: Path
) -> None:
    store = tmp_path / "own.ds"
    assert run_cli("generate", prompts, "-s", store, *tiny_options).code == 0
    assert run_cli("build-suffix", store).code == 0
    made = run_cli("calibrate-drafts", "-p", prompts, "-s", store, *tiny_options)
    assert made.code == 0, made.err
    assert "expected calibration error" in made.err
    beside = tmp_path / "own.ds.drafts.json"
    assert json.loads(beside.read_text())["about"]["prompts"] == 12
    shown = run_cli("inspect", store)
    assert "own.ds.drafts.json" in shown.out
    assert "expected calibration error" in shown.out
    record = json.loads(run_cli("inspect", store, "--json").out)
    assert 0 <= record["drafts"]["reliability"]["error"] <= 1
    assert "candidates of 12 prompts" in run_cli("inspect", beside).out
    plain = run_cli("decode", "-p", prompts, "-d", "none", "-q", *tiny_options)
    for extra in ([], ["--set", f"calibration={beside}"], ["--budget", 6]):
        drafted = run_cli("decode", "-p", prompts, "-s", store, "-q", *extra, *tiny_options)
        assert drafted.code == 0, drafted.err
        assert [one["tokens"] for one in drafted.records] == [one["tokens"] for one in plain.records]
    beside.write_text("{}")
    broken = run_cli("decode", "-p", prompts, "-s", store, *tiny_options)
    assert (broken.code, broken.out) == (1, "")
    assert "is not a calibration of drafts" in broken.err
    assert "is not a calibration of drafts" in run_cli("inspect", store).err


def test_the_shipped_drafts_are_shown_where_a_store_has_none(run_cli: Run, stocked: dict[str, Path]) -> None:
    assert "shipped with specds" not in run_cli("inspect", stocked["faiss"]).out
    assert "shipped with specds" in run_cli("inspect", stocked["faiss"], "--drafts").out


def test_calibrating_needs_somewhere_to_write(run_cli: Run, prompts: Path, tiny_options: list[object]) -> None:
    result = run_cli("calibrate-drafts", "-p", prompts, *tiny_options)
    assert (result.code, result.out) == (2, "")
    assert "neither --store nor --output" in result.err


def test_a_trace_is_explained_by_source(
    run_cli: Run, prompts: Path, tmp_path: Path, tiny_options: list[object], stocked: dict[str, Path]
) -> None:
    trace = tmp_path / "t.parquet"
    store = stocked["faiss"]
    decoded = run_cli("decode", "-p", prompts, "-s", store, "--budget", 6, "--trace", trace, "-q", *tiny_options)
    assert decoded.code == 0, decoded.err
    counters = [one["counters"] for one in decoded.records]
    result = run_cli("explain", trace, "--json")
    found = json.loads(result.out)
    assert found["drafter"] == "auto"
    for name in ("tokens", "steps", "drafted", "accepted"):
        assert found[name] == sum(one[name] for one in counters)
    sources = {one["name"]: one for one in found["sources"]}
    assert {"context", "suffix", "dense"} <= set(sources)
    assert sources["dense"]["seconds"] > 0
    assert all(one["alone"] <= one["accepted"] <= one["drafted"] for one in found["sources"])
    assert "only it" in run_cli("explain", trace).out
    rest = [*tiny_options[:2], *tiny_options[4:]]
    replayed = run_cli("explain", trace, "-p", prompts, "-s", store, "--json", *rest)
    assert replayed.code == 0, replayed.err
    methods = json.loads(replayed.out)["replayed"]
    assert [one["method"] for one in methods] == [f"auto:{store}"] + [
        f"auto:{store}?without={name}" for name in sources
    ]
    assert len({one["tokens"] for one in methods}) == 1


def row(step: int, sources: list[str], path: list[int], seconds: float) -> dict[str, Any]:
    empty: dict[str, Any] = {field.name: [] for field in trace_schema() if pa.types.is_list(field.type)}
    numbers = {"turn": 0, "position": 5, "drafted": len(sources), "verify_seconds": 0.0, "commit_seconds": 0.0}
    numbers |= {"forward_pass": step, "pass_tokens": len(sources) + 1}
    return {
        **empty,
        **numbers,
        "prompt": "a",
        "drafter": "auto",
        "step": step,
        "accepted": len(path),
        "committed": len(path) + 1,
        "draft_sources": sources,
        "path": path,
        "asked": ["tree", "dense"] if step else [],
        "asked_seconds": [0.001, 0.002] if step else [],
        "draft_seconds": 0.005 if step else 0.0,
        "forward_seconds": seconds,
    }


def test_what_a_source_was_worth_is_counted_by_hand(tmp_path: Path) -> None:
    # A pass takes 10 ms and 1 ms a row.
    rows = [
        row(0, [], [], 0.050),
        row(1, ["context", "context+dense", "dense"], [0, 1], 0.013),
        row(2, ["dense"], [], 0.011),
        row(3, ["dense", "dense"], [0, 1], 0.012),
    ]
    pq.write_table(pa.Table.from_pylist(rows, trace_schema()), tmp_path / "t.parquet")
    found = explain(str(tmp_path / "t.parquet"))
    assert (found.steps, found.tokens, found.drafted, found.accepted) == (4, 8, 6, 4)
    assert found.row == pytest.approx(0.001)
    assert found.seconds == pytest.approx(0.086 + 0.015)
    assert found.plain == pytest.approx(0.050 + 7 * 0.010)
    dense, context = found.sources
    assert (dense.name, dense.drafted, dense.accepted, dense.alone) == ("dense", 5, 3, 2)
    assert (context.name, context.drafted, context.accepted, context.alone) == ("context", 2, 2, 1)
    assert dense.seconds == pytest.approx(0.006)
    assert dense.without == pytest.approx(found.seconds - 0.006 + 2 * 0.010 - 4 * 0.001)
    assert context.without == pytest.approx(found.seconds + 0.010 - 0.001)


@pytest.mark.parametrize("content", [b"", b"PAR1", b"{}"])
def test_other_files_are_no_traces(content: bytes, tmp_path: Path, run_cli: Run) -> None:
    path = tmp_path / "t.parquet"
    path.write_bytes(content)
    with pytest.raises(InputError, match="is not a trace"):
        explain(str(path))
    result = run_cli("explain", path)
    assert (result.code, result.out) == (1, "")
    pq.write_table(pa.table({"prompt": ["a"]}), path)
    with pytest.raises(InputError, match="is not a trace"):
        explain(str(path))
    pq.write_table(trace_schema().empty_table(), path)
    with pytest.raises(InputError, match="holds no steps"):
        explain(str(path))
