"""The command line as its users meet it."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from specds.decode.answers import answer_file
from specds.decode.drafters import DRAFTERS
from specds.decode.registry import describe_options, load
from specds.decode.verifiers import VERIFIERS
from specds.model import load_model
from specds.version import __version__

from ..tools import Run, corpus_of, damage, manifest_of

COMMANDS = (
    "generate",
    "ingest",
    "build-suffix",
    "build-dense",
    "calibrate-drafts",
    "calibrate-csd",
    "choose-skip",
    "table",
    "decode",
    "drafters",
    "profile",
    "replay",
    "tune",
    "evaluate",
    "explain",
    "bench",
    "compare",
    "inspect",
    "verify",
    "diff",
    "export",
    "compact",
    "merge",
    "remove",
    "dedupe",
    "rebuild",
    "demo",
)


@pytest.fixture
def tiny_options(tiny_directory: Path) -> list[object]:
    return ["--model", tiny_directory, "--device", "cpu", "--max-new-tokens", 12]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    rows = [{"id": f"p{number}", "prompt": f"w{number} w{number + 1} w{number} w{number + 1}"} for number in range(5)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str, run_cli: Run) -> None:
    result = run_cli(command, "--help")
    assert result.code == 0
    assert f"specds {command}" in result.out
    assert "OPTIONS" in result.out.upper()
    assert result.err == ""


def test_the_first_screen_names_every_command(run_cli: Run) -> None:
    for arguments in ([], ["--help"], ["-h"]):
        result = run_cli(*arguments)
        for command in COMMANDS:
            assert command in result.out + result.err
    result = run_cli("--version")
    assert (result.code, result.out) == (0, f"specds {__version__}\n")


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["decode"],
        ["decode", "-p", "x", "--no-such-option"],
        ["decode", "-p", "x", "--budget", "-1"],
        ["decode", "-p", "x", "--budget", "many"],
        ["decode", "-p", "x", "--limit", "0"],
        ["decode", "-p", "x", "--temperature", "-1"],
        ["generate", "x"],
        ["build-dense", "x", "--dims", "0"],
        ["inspect"],
    ],
)
def test_wrong_usage_exits_with_2(arguments: list[str], run_cli: Run) -> None:
    result = run_cli(*arguments)
    assert result.code == 2
    assert result.out == ""
    assert "Traceback" not in result.err


HEAVY = ("torch", "scann", "faiss", "transformers", "numba", "sklearn", "datasets", "pyarrow", "pandas")


@pytest.mark.parametrize("arguments", [["--help"], ["decode", "--help"], ["build-dense", "--help"], None])
def test_help_loads_nothing_heavy(arguments: list[str] | None) -> None:
    run = "" if arguments is None else f"sys.argv = ['specds', *{arguments!r}]; specds.cli.main.run()"
    code = (
        "import atexit, sys, specds.cli.main\n"
        f"atexit.register(lambda: print('loaded:', [name for name in {HEAVY!r} if name in sys.modules]))\n{run}"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "loaded: []"


def test_decode_writes_one_record_a_prompt_in_order(run_cli: Run, prompts: Path, tiny_options: list[object]) -> None:
    result = run_cli("decode", "-p", prompts, "-d", "pld", *tiny_options)
    assert result.code == 0
    records = result.records
    assert [record["id"] for record in records] == [f"p{number}" for number in range(5)]
    for record in records:
        assert set(record) == {
            "id",
            "text",
            "tokens",
            "finish_reason",
            "prompt_tokens",
            "drafter",
            "lossless",
            "counters",
            "key",
        }
        assert record["finish_reason"] in ("stop", "length")
        assert (record["finish_reason"] == "length") == (len(record["tokens"]) == 12 and record["tokens"][-1] != 1)
        assert (record["drafter"], record["lossless"]) == ("pld", True)
        counters = record["counters"]
        assert counters["tokens"] == len(record["tokens"])
        assert counters["accepted"] <= counters["drafted"]
        assert counters["seconds"] >= counters["forward_seconds"] > 0
    assert "MAT" in result.err
    assert "5" in result.err


def test_every_drafter_writes_the_models_own_text(
    run_cli: Run, prompts: Path, tiny_options: list[object], tiny_directory: Path, stocked: dict[str, Path]
) -> None:
    model = load_model(str(tiny_directory), device="cpu")
    expected = []
    for row in map(json.loads, prompts.read_text().splitlines()):
        tokens = model.tokenizer.chat([{"role": "user", "content": row["prompt"]}])
        out = model.network.generate(
            torch.tensor([tokens]), attention_mask=torch.ones(1, len(tokens)), max_new_tokens=12, do_sample=False
        )
        expected.append(out[0, len(tokens) :].tolist())
    for drafter in DRAFTERS:
        result = run_cli("decode", "-p", prompts, "-d", drafter, "-s", stocked["scann"], "-q", *tiny_options)
        assert (result.code, result.err) == (0, "")
        assert [record["tokens"] for record in result.records] == expected


def test_decode_reads_stdin(run_cli: Run, tiny_options: list[object]) -> None:
    plain = run_cli("decode", "-p", "-", *tiny_options, stdin="w1 w2\n\nw3\n")
    lines = run_cli("decode", "-p", "-", *tiny_options, stdin='{"id": "a", "prompt": "w1 w2"}\n{"prompt": "w3"}\n')
    assert (plain.code, lines.code) == (0, 0)
    assert [record["id"] for record in plain.records] == ["0", "1"]
    assert [record["id"] for record in lines.records] == ["a", "1"]
    assert [record["tokens"] for record in plain.records] == [record["tokens"] for record in lines.records]


def test_several_files_and_a_limit(run_cli: Run, prompts: Path, tmp_path: Path, tiny_options: list[object]) -> None:
    (tmp_path / "more.txt").write_text("w9\nw8\n")
    result = run_cli("decode", "-p", prompts, "-p", tmp_path / "more.txt", "--limit", 6, "-q", *tiny_options)
    assert [record["id"] for record in result.records] == ["p0", "p1", "p2", "p3", "p4", "5"]


def test_the_drafter_is_auto_with_any_stores(
    run_cli: Run, prompts: Path, stocked: dict[str, Path], tmp_path: Path, tiny_options: list[object]
) -> None:
    def drafter(*arguments: object) -> tuple[str, str]:
        result = run_cli("decode", "-p", prompts, "--limit", 1, *tiny_options, *arguments)
        assert result.code == 0, result
        return result.records[0]["drafter"], result.err

    sparse = tmp_path / "sparse.ds"
    assert run_cli("ingest", prompts, "--text-field", "prompt", "-s", sparse, *tiny_options[:2]).code == 0
    assert run_cli("build-suffix", sparse).code == 0
    for stores in ([], ["-s", stocked["faiss"]], ["-s", sparse], ["-s", sparse, "-s", stocked["faiss"]]):
        name, notes = drafter(*stores)
        assert name == "auto"
        assert "note" not in notes
    assert "--store is not used" in drafter("-s", sparse, "-d", "pld")[1]
    assert "are not in" not in drafter("-s", sparse)[1]
    (tmp_path / "more.txt").write_text("w5 w6 w7\n")
    assert run_cli("ingest", tmp_path / "more.txt", "-s", sparse, *tiny_options[:2]).code == 0
    assert "are not in its suffix index yet" in drafter("-s", sparse)[1]


def test_turns_are_answered_one_after_another(run_cli: Run, tmp_path: Path, tiny_options: list[object]) -> None:
    path = tmp_path / "turns.jsonl"
    path.write_text(json.dumps({"id": "t", "turns": ["w1 w2", "w3"]}) + "\n")
    (record,) = run_cli("decode", "-p", path, "-q", *tiny_options).records
    assert len(record["turns"]) == 2
    first, second = record["turns"]
    assert second["prompt_tokens"] > first["prompt_tokens"] + len(second["tokens"]) - 12
    assert (record["text"], record["tokens"]) == (second["text"], second["tokens"])
    assert record["counters"]["tokens"] == len(first["tokens"]) + len(second["tokens"])
    (alone,) = run_cli("decode", "-p", "-", "-q", *tiny_options, stdin="w1 w2\n").records
    assert alone["tokens"] == first["tokens"]
    assert "turns" not in alone


def test_sampling_is_repeatable_and_the_seed_matters(run_cli: Run, prompts: Path, tiny_options: list[object]) -> None:
    def texts(*options: object) -> list[object]:
        result = run_cli("decode", "-p", prompts, "-q", "--temperature", 1, *options, *tiny_options)
        return [record["tokens"] for record in result.records]

    assert texts("--seed", 1) == texts("--seed", 1, "-d", "none") == texts("--seed", 1, "--budget", 3)
    assert texts("--seed", 1) != texts("--seed", 2)


def test_output_goes_on_where_it_stopped(
    run_cli: Run, prompts: Path, tmp_path: Path, tiny_options: list[object]
) -> None:
    output = tmp_path / "answers.jsonl"
    argv = ["decode", "-p", prompts, "-o", output, *tiny_options]

    def answers() -> list[tuple[str, list[int]]]:
        return [(record["id"], record["tokens"]) for record in map(json.loads, output.read_text().splitlines())]

    first = run_cli(*argv)
    assert (first.code, first.out) == (0, "")
    expected = answers()
    assert [name for name, _ in expected] == ["p0", "p1", "p2", "p3", "p4"]
    whole = output.read_bytes().splitlines(keepends=True)

    output.write_bytes(b"".join(whole[:2]) + whole[2][: len(whole[2]) // 2])  # as a crash may leave it
    resumed = run_cli(*argv)
    assert resumed.code == 0
    assert answers() == expected
    assert output.read_bytes().splitlines(keepends=True)[:2] == whole[:2]
    assert "2 answers were there already" in resumed.err

    before = output.read_bytes()
    assert run_cli(*argv).code == 0
    assert output.read_bytes() == before


def test_output_of_other_prompts_is_not_continued(
    run_cli: Run, prompts: Path, tmp_path: Path, tiny_options: list[object]
) -> None:
    output = tmp_path / "answers.jsonl"
    assert run_cli("decode", "-p", prompts, "-o", output, "--limit", 2, "-q", *tiny_options).code == 0
    before = output.read_bytes()
    (tmp_path / "others.jsonl").write_text('{"id": "x", "prompt": "w1"}\n{"id": "y", "prompt": "w1"}\n')
    run_cli("decode", "-p", tmp_path / "others.jsonl", "-o", output, *tiny_options).refused("'p0'", "'x'")
    assert output.read_bytes() == before


@pytest.mark.parametrize(
    "change",
    [
        ["--max-new-tokens", 13],
        ["--temperature", 0.5],
        ["--dtype", "bfloat16"],
        ["-p", "reworded.jsonl"],
    ],
)
def test_output_of_another_command_is_not_continued(
    change: list[object], run_cli: Run, prompts: Path, tmp_path: Path, tiny_options: list[object]
) -> None:
    (tmp_path / "reworded.jsonl").write_text(prompts.read_text().replace("w0 w1", "w1 w0"))
    output = tmp_path / "answers.jsonl"
    assert run_cli("decode", "-p", prompts, "-o", output, "-q", *tiny_options).code == 0
    before = output.read_bytes()
    if change[0] == "-p":
        argv = ["decode", "-p", tmp_path / "reworded.jsonl", "-o", output, *tiny_options]
    else:
        argv = ["decode", "-p", prompts, "-o", output, *tiny_options, *change]
    run_cli(*argv).refused("line 1 answers 'p0' with another")
    assert output.read_bytes() == before
    # The text does not depend on a lossless drafter, so that one may change.
    assert run_cli("decode", "-p", prompts, "-o", output, "-d", "none", "-q", *tiny_options).code == 0
    assert output.read_bytes() == before


def test_output_that_another_process_writes_is_left_alone(
    run_cli: Run, prompts: Path, tmp_path: Path, tiny_options: list[object]
) -> None:
    output = tmp_path / "answers.jsonl"
    with answer_file(output):
        run_cli("decode", "-p", prompts, "-o", output, *tiny_options).refused("another process")
    assert output.read_bytes() == b""


def test_a_resumed_trace_keeps_the_rows_of_the_answers_that_were_there(
    run_cli: Run, prompts: Path, tmp_path: Path, tiny_options: list[object]
) -> None:
    output, trace = tmp_path / "answers.jsonl", tmp_path / "trace.parquet"
    argv = ["decode", "-p", prompts, "-o", output, "--trace", trace, "-q", *tiny_options]
    assert run_cli(*argv, "--limit", 2).code == 0
    assert run_cli(*argv).code == 0
    rows = pq.read_table(trace).to_pylist()
    for record in map(json.loads, output.read_text().splitlines()):
        mine = [row for row in rows if row["prompt"] == record["id"]]
        assert [token for row in mine for token in row["tokens"]] == record["tokens"]
    assert run_cli(*argv).code == 0  # nothing is left to do
    assert pq.read_table(trace).to_pylist() == rows


def test_a_file_that_holds_no_answers_is_not_written_over(
    run_cli: Run, prompts: Path, tmp_path: Path, tiny_options: list[object]
) -> None:
    for content in (
        "dear diary\n",
        "dear diary",
        "d",
        "[1]\n",
        '{"text": "no id"}\n',
        '{"id": 1, "prompt": "not an answer"}',
        '{"id": 1, "prompt": "not an answer"}\n',
        "[" * 100_000 + "\n",
    ):
        (tmp_path / "diary").write_text(content)
        run_cli("decode", "-p", prompts, "-o", tmp_path / "diary", *tiny_options).refused("line 1 is not an answer")
        assert (tmp_path / "diary").read_text() == content


def test_a_trace_has_a_row_for_each_forward_pass(
    run_cli: Run, prompts: Path, tmp_path: Path, tiny_options: list[object]
) -> None:
    trace = tmp_path / "trace.parquet"
    result = run_cli("decode", "-p", prompts, "--trace", trace, *tiny_options)
    assert result.code == 0
    rows = pq.read_table(trace).to_pylist()
    for record in result.records:
        mine = [row for row in rows if row["prompt"] == record["id"]]
        counters = record["counters"]
        assert [token for row in mine for token in row["tokens"]] == record["tokens"]
        assert [row["step"] for row in mine] == list(range(counters["steps"]))
        assert counters["mat"] * counters["steps"] == pytest.approx(len(record["tokens"]), abs=0.01)
        assert sum(row["drafted"] for row in mine) == counters["drafted"]
        assert sum(row["accepted"] for row in mine) == counters["accepted"]
    assert not list(tmp_path.glob(".trace*"))


def test_bad_rows_are_answered_by_an_error_in_their_place(
    run_cli: Run, tmp_path: Path, tiny_options: list[object]
) -> None:
    path = tmp_path / "mixed.jsonl"
    long = " ".join(["w1"] * 400)
    rows = ['{"id": "good", "prompt": "w1"}', "{bad", json.dumps({"id": "long", "prompt": long})]
    rows += ['{"id": "empty", "prompt": ""}', '{"id": "wrong", "prompt": 7}', '{"id": "last", "prompt": "w2"}']
    path.write_text("\n".join(rows) + "\n")
    result = run_cli("decode", "-p", path, "-q", *tiny_options)
    assert result.code == 1
    assert [record["id"] for record in result.records] == ["good", "1", "long", "empty", "wrong", "last"]
    assert ["error" in record for record in result.records] == [False, True, True, True, True, False]
    for record in result.records:
        if "error" in record:
            assert record["error"]["type"] == "PromptError"
            assert record["error"]["message"]
            assert record["error"]["hint"]
    strict = run_cli("decode", "-p", path, "-q", "--strict", *tiny_options)
    strict.refused("row 2")
    assert [record["id"] for record in strict.records] == ["good", "1"]


def test_inspect_says_what_is_there(run_cli: Run, stocked: dict[str, Path]) -> None:
    for kind, store in stocked.items():
        (record,) = run_cli("inspect", store, "--json").records
        manifest = manifest_of(store)
        assert (record["documents"], record["tokens"]) == (manifest.documents, manifest.tokens)
        assert record["sources"] == {"test": {"documents": 40, "tokens": manifest.tokens}}
        assert [index["kind"] for index in record["indexes"]] == ["suffix", "dense"]
        assert record["indexes"][1]["parameters"]["ann"] == kind
        assert record["indexes"][1]["quality"]["recall_at_10"] == 1.0
        assert record["bytes"] == sum((store / name).stat().st_size for name in manifest.files)
        shown = run_cli("inspect", store)
        assert shown.code == 0
        for word in ("40 documents", f"{manifest.tokens:,} tokens", "suffix", "dense", "recall_at_10"):
            assert word in shown.out


def test_verify_tells_whole_from_damaged(run_cli: Run, stocked: dict[str, Path], tmp_path: Path) -> None:
    import shutil

    store = tmp_path / "copy.ds"
    shutil.copytree(stocked["faiss"], store)
    result = run_cli("verify", store)
    assert (result.code, result.out) == (0, "")
    damage(store / "suffix/000001/sa.bin", "flipped")
    damage(store / "dense/000001/positions.bin", "missing")
    result = run_cli("verify", store)
    assert result.code == 1
    assert len(result.out.splitlines()) == 2
    assert "positions.bin: is missing" in result.out
    assert "sa.bin: its content changed" in result.out


def test_drafters_lists_every_name_and_option(run_cli: Run) -> None:
    result = run_cli("drafters")
    assert result.code == 0
    for name in DRAFTERS:
        found = load(DRAFTERS, name, "drafter")
        assert f"{name}: {found.summary}" in result.out.replace("\n", " ")
        for option, default, _ in describe_options(found.Options):
            assert f"{option}={default}" in result.out
    for name in VERIFIERS:
        assert f"--verifier {name}" in result.out


def test_options_of_a_drafter_are_taken(run_cli: Run, prompts: Path, tiny_options: list[object]) -> None:
    found = load(DRAFTERS, "pld", "drafter")
    option, default, _ = describe_options(found.Options)[0]
    assert run_cli("decode", "-p", prompts, "-d", "pld", "-q", "--set", f"{option}={default}", *tiny_options).code == 0
    dashed = option.replace("_", "-")
    assert run_cli("decode", "-p", prompts, "-d", "pld", "-q", "--set", f"{dashed}={default}", *tiny_options).code == 0


def test_from_prompts_to_answers(
    run_cli: Run, prompts: Path, tmp_path: Path, tiny_options: list[object], tiny_directory: Path
) -> None:
    store = tmp_path / "mine.ds"
    model = ["--model", tiny_directory]
    assert run_cli("generate", prompts, "-s", store, *tiny_options).code == 0
    again = run_cli("generate", prompts, "-s", store, *tiny_options)
    assert "5 were there already" in again.err
    assert run_cli("ingest", prompts, "-s", store, *model, "--text-field", "prompt").code == 0
    assert run_cli("build-suffix", store).code == 0
    assert run_cli("build-dense", store, *model, "--dims", 8, "--device", "cpu").code == 0
    assert run_cli("verify", store).code == 0
    plain = run_cli("decode", "-p", prompts, "-d", "none", *tiny_options)
    for drafter in ("rest", "dresd"):
        result = run_cli("decode", "-p", prompts, "-s", store, "-d", drafter, *tiny_options)
        assert [one["tokens"] for one in result.records] == [one["tokens"] for one in plain.records]
        # The store holds these very answers, so steps must be fewer than tokens.
        steps = sum(one["counters"]["steps"] for one in result.records)
        assert steps < sum(one["counters"]["steps"] for one in plain.records)


def test_a_profile_is_shown_kept_and_used(run_cli: Run, tiny_directory: Path, prompts: Path) -> None:
    model = ["--model", tiny_directory, "--device", "cpu"]
    result = run_cli("profile", *model, "--tokens", "1,4,16", "--contexts", "8,64", "--repeats", 2)
    assert result.code == 0, result
    assert "T(n)" in result.out
    assert "at 64" in result.out
    path = Path(result.err.split("kept in ")[1].strip())
    kept = json.loads(path.read_text())
    assert (kept["rows"], kept["contexts"]) == ([1, 4, 16], [8, 64])
    again = run_cli(
        "profile", *model, "--tokens", "16,1", "--contexts", "8", "--repeats", 1, "--json", "--runtime", "generic"
    )
    assert set(again.records[0]) == {"format", "rows", "contexts", "seconds"}
    assert Path(again.err.split("kept in ")[1].strip()) != path  # a runtime has a curve of its own
    for wrong in (
        ["--tokens", "2,4"],
        ["--tokens", "x"],
        ["--tokens", "0"],
        ["--tokens", "1,5000"],
        ["--contexts", "100000"],
        ["--runtime", "warp"],
    ):
        run_cli("profile", *model, *wrong).refused(code=2)
    # What costs next to nothing is drafted, what costs much is not.
    for seconds, drafts in (([[1.0, 1.0, 1.0]] * 2, True), ([[1.0, 9.0, 99.0]] * 2, False)):
        path.write_text(json.dumps({**kept, "seconds": seconds}))
        records = run_cli("decode", "-p", prompts, "-d", "pld", *model, "--max-new-tokens", 30).records
        assert (sum(record["counters"]["drafted"] for record in records) > 0) == drafts


def test_debug_shows_where(run_cli: Run, tmp_path: Path) -> None:
    result = run_cli("--debug", "inspect", tmp_path / "nothing.ds")
    assert result.code == 1
    assert "Traceback" in result.err
    assert result.err.splitlines()[-1].startswith("error: ")


def test_csd_from_calibration_to_a_table_that_learns(
    run_cli: Run, prompts: Path, tiny_options: list[object], tmp_path: Path
) -> None:
    table = tmp_path / "t.parquet"
    result = run_cli("calibrate-csd", "-p", prompts, "-o", table, "-d", "pld", "--temperature", 1.5, *tiny_options)
    assert result.code == 0, result.err
    assert "5 prompts" in result.err
    assert result.out == ""
    # So few prompts: nothing passes yet, and whoever makes, looks at or takes the table is told so.
    highest = json.loads(run_cli("table", "inspect", table, "--json").out)["highest"]
    assert highest < 6
    rare = "more than once" if highest == 1 else f"more than {highest} times"
    taken = run_cli("decode", "-p", prompts, "-d", "pld", "--verifier", "csd", "--table", table, *tiny_options)
    for said in (result.err, run_cli("table", "inspect", table).out, taken.err):
        assert rare in said
        assert "from 6 times on" in said
    untaught = run_cli("decode", "-p", prompts, "-d", "pld", "--verifier", "csd", *tiny_options)
    assert "verifier csd starts with an empty table" in untaught.err
    again = run_cli("calibrate-csd", "-p", prompts, "-o", table, "-d", "pld", "--temperature", 1.5, *tiny_options)
    assert "0 prompts, 0 tokens counted; 5 were known" in again.err
    shown = run_cli("table", "inspect", table, "--json", "--model", tiny_options[1])
    before = json.loads(shown.out)
    assert before["divergences"] > 0
    assert before["prompts"] == 5
    assert set(before["top"][0]) == {"draft_token", "target_token", "count", "draft_text", "target_text"}
    assert run_cli("table", "inspect", table, "--top", 3).out.count("w") >= 1
    lenient = ["--verifier", "csd", "--table", table, "--verifier-set", "frequency=0", "--verifier-set", "tau=0"]
    command = ["decode", "-p", prompts, "-d", "pld", "--budget", 6, *lenient, *tiny_options]
    trace = tmp_path / "trace.parquet"
    decoded = run_cli(*command, "--update-table", "--trace", trace)
    assert decoded.code == 0, decoded.err
    records = [json.loads(line) for line in decoded.out.splitlines()]
    assert not any(record["lossless"] for record in records)
    assert sum(record["counters"]["rescued"] for record in records) > 0
    assert "(lossy)" in decoded.err
    assert "accepted (lossy)" in decoded.err
    assert "starts with" not in decoded.err
    assert "seen more than" not in decoded.err
    rows = pq.read_table(trace).to_pylist()
    passed = [(node, row) for row in rows for node in row["rescue_nodes"]]
    assert passed
    assert all(node in row["path"] and row["draft_sources"][node] == "pld" for node, row in passed)
    after = json.loads(run_cli("table", "inspect", table, "--json").out)
    assert after["divergences"] > before["divergences"]
    assert after["prompts"] == 10
    # Without --update-table nothing is learned.
    assert run_cli(*command).code == 0
    assert json.loads(run_cli("table", "inspect", table, "--json").out)["divergences"] == after["divergences"]


def test_tables_are_added_cut_and_compared(
    run_cli: Run, prompts: Path, tiny_options: list[object], tmp_path: Path
) -> None:
    one, other, total, small = (tmp_path / f"{name}.parquet" for name in ("one", "other", "total", "small"))
    for path, seed in ((one, 1), (other, 2)):
        options = ["-d", "pld", "--temperature", 1.5, "--seed", seed, *tiny_options]
        assert run_cli("calibrate-csd", "-p", prompts, "-o", path, *options).code == 0
    assert run_cli("table", "merge", one, other, "-o", total).code == 0
    counts = {path: json.loads(run_cli("table", "inspect", path, "--json").out) for path in (one, other, total)}
    assert counts[total]["divergences"] == counts[one]["divergences"] + counts[other]["divergences"]
    assert run_cli("table", "prune", total, "--top", 3, "-o", small).code == 0
    assert json.loads(run_cli("table", "inspect", small, "--json").out)["pairs"] == 3
    shown = run_cli("table", "diff", one, other)
    assert shown.code == 0
    assert "counted differently" in shown.out
    lines = run_cli("table", "diff", one, other, "--top", 2, "--model", tiny_options[1]).out.splitlines()
    assert sum("'w" in line for line in lines) == 2
    assert "more pair" in lines[-1]
    lines = run_cli("table", "inspect", total, "--top", 1, "--model", tiny_options[1]).out.splitlines()
    assert f"… and {counts[total]['pairs'] - 1:,} more pair" in lines[-1]
    twice = run_cli("table", "merge", one, total, "-o", small)
    assert twice.code == 2
    assert "count twice" in twice.err
    foreign = run_cli("calibrate-csd", "-p", prompts, "-o", one, "-d", "recycling", *tiny_options)
    assert foreign.code == 1
    assert "of the draft pld" in foreign.err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--update-table"], 2, "without --table"),
        (["--table", "none.parquet", "--verifier", "csd"], 1, "no correction table none.parquet"),
        (["--table", "none.parquet"], 2, "verifier auto has no option 'table'"),
        (["--verifier", "csd", "--verifier-set", "lambda=3"], 2, "has no option 'lambda'"),
        (["--draft-model", "skip:0"], 2, "can be left out"),
        (["--draft-model", "skip:1", "-d", "pld"], 2, "--draft-model is given, and --drafter pld"),
    ],
)
def test_options_of_lossy_decoding_that_do_not_fit_are_refused(
    run_cli: Run, prompts: Path, tiny_options: list[object], arguments: list[str], code: int, message: str
) -> None:
    result = run_cli("decode", "-p", prompts, *arguments, *tiny_options)
    assert (result.code, result.out) == (code, "")
    assert message in result.err


def test_a_model_drafts_for_itself_as_choose_skip_says(
    run_cli: Run, prompts: Path, tiny_directory: Path, tiny_options: list[object]
) -> None:
    chosen = run_cli("choose-skip", "-p", prompts, "--max-new-tokens", 4, "--limit", 2, *tiny_options[:4])
    assert chosen.code == 0, chosen.err
    assert chosen.out.strip() == "skip:1"
    assert "expected speed" in chosen.err
    plain = run_cli("decode", "-p", prompts, "-d", "none", *tiny_options)
    drafted = run_cli("decode", "-p", prompts, "--draft-model", chosen.out.strip(), "--budget", 4, *tiny_options)
    other = run_cli("decode", "-p", prompts, "--draft-model", tiny_directory, "--budget", 4, *tiny_options)
    texts = [[json.loads(line)["tokens"] for line in one.out.splitlines()] for one in (plain, drafted, other)]
    assert texts[0] == texts[1] == texts[2]
    assert sum(json.loads(line)["counters"]["accepted"] for line in other.out.splitlines()) > 0


def test_answers_are_the_same_however_many_are_written_at_once(
    run_cli: Run, prompts: Path, tmp_path: Path, tiny_options: list[object]
) -> None:
    """Also where some fail, and where a file holds the first of them already."""
    prompts.write_text(prompts.read_text() + '{"id": "blank", "prompt": ""}\n{"id": "long", "prompt": "w1 w2 w3"}\n')

    def told(*arguments: object, stdin: str = "") -> list[tuple[str, list[int] | None, bool]]:
        result = run_cli("decode", *arguments, *tiny_options, "-d", "pld", "-q", stdin=stdin)
        assert result.code == 1, result
        return [(record["id"], record.get("tokens"), "error" in record) for record in result.records]

    alone = told("-p", prompts, "--parallel", 1)
    assert [name for name, _, failed in alone if failed] == ["blank"]
    assert told("-p", prompts, "--parallel", 3) == told("-p", prompts) == alone
    assert told("-p", "-", "--parallel", 3, stdin=prompts.read_text()) == alone
    assert told("-p", prompts, "--parallel", 3, "--kv-memory", "1MB") == alone
    output = tmp_path / "answers.jsonl"
    told("-p", prompts, "--parallel", 4, "-o", output)
    whole = [json.loads(line) for line in output.read_text().splitlines()]
    assert [record["id"] for record in whole] == [name for name, _, _ in alone]
    output.write_text("".join(output.read_text().splitlines(keepends=True)[:2]) + '{"id": "p2", "te')
    told("-p", prompts, "--parallel", 4, "-o", output)
    again = [json.loads(line) for line in output.read_text().splitlines()]
    assert [(one["id"], one.get("text"), one["key"]) for one in again] == [
        (one["id"], one.get("text"), one["key"]) for one in whole
    ]


@pytest.mark.parametrize("wrong", [["--parallel", "0"], ["--parallel", "many"], ["--kv-memory", "some"]])
def test_wrong_numbers_of_requests_are_refused_before_a_model_is_looked_for(
    wrong: list[object], run_cli: Run, prompts: Path
) -> None:
    run_cli("decode", "-p", prompts, "--model", "nowhere", *wrong).refused(str(wrong[0]), code=2)


def test_a_slow_pipe_is_answered_as_its_rows_come(tiny_directory: Path) -> None:
    """Several at once, too; and an end while the pipe is silent is an ordinary one."""
    command = [sys.executable, "-c", "from specds.cli.main import run; run()", "decode", "-p", "-", "--device", "cpu"]
    command += ["--model", str(tiny_directory), "--max-new-tokens", "4", "-d", "none", "--parallel", "4", "-q"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        for number in range(3):
            process.stdin.write(json.dumps({"id": str(number), "prompt": f"w{number}"}) + "\n")
            process.stdin.flush()
            assert json.loads(process.stdout.readline())["id"] == str(number)
        process.send_signal(signal.SIGINT)
        said = process.stderr.read()
    assert process.returncode == 130
    assert said.startswith("error: interrupted")
    assert said.count("\n") == 1


def test_generate_drafts_from_the_store_that_it_writes_to(
    run_cli: Run, prompts: Path, tmp_path: Path, tiny_options: list[object]
) -> None:
    store = tmp_path / "own.ds"
    command = ["generate", prompts, "-s", store, *tiny_options, "--parallel", 3]
    run_cli(*command, "-d", "rest").refused("has none", "--draft-store", code=2)
    assert not store.exists()
    first = run_cli(*command, "-d", "none")
    assert "3 at once, MAT 1.00" in first.err
    assert run_cli("build-suffix", store).code == 0
    again = run_cli(*command, "-d", "rest", "--budget", 8, "--source", "again")
    (mat,) = re.findall(r"MAT (\d+\.\d\d)", again.err)
    assert float(mat) > 2
    texts = [response for _, response in corpus_of(store).values()]
    assert texts[: len(texts) // 2] == texts[len(texts) // 2 :]
