from __future__ import annotations

import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from specds.calibration.explanation import explain
from specds.calibration.trace import TraceWriter, read_passes
from specds.decode.answers import answer_file
from specds.decode.contracts import Step
from specds.decode.engine import Engine
from specds.decode.method import Method
from specds.decode.request import Listed
from specds.errors import InputError, OutputError
from specds.model import LanguageModel

from ..conftest import make_model
from ..faults import crash_points

# Passes that one request has alone.
LEAST_PASSES = 10


def test_a_trace_has_a_row_a_forward_pass_and_tells_the_text(tmp_path: Path, tiny: LanguageModel) -> None:
    engine = Engine(tiny, Method("pld"))
    prompt = [9, 30, 12, 9, 30, 12, 9, 30]
    steps = list(engine.steps(prompt, 24))
    with TraceWriter(tmp_path / "t.parquet") as trace:
        trace.add("a", 0, "pld", steps)
        assert not (tmp_path / "t.parquet").exists()
    rows = pq.read_table(tmp_path / "t.parquet").to_pylist()
    assert len(rows) == len(steps)
    assert [token for row in rows for token in row["tokens"]] == [token for step in steps for token in step.tokens]
    for row in rows:
        # What was committed is what the path through the draft says, and one token more.
        assert [row["draft_tokens"][node] for node in row["path"]] == row["tokens"][: len(row["path"])]
        assert row["committed"] == len(row["tokens"]) <= row["accepted"] + 1
        assert row["drafted"] == len(row["draft_tokens"]) == len(row["draft_parents"]) == len(row["draft_scores"])
    assert [path.name for path in tmp_path.iterdir()] == ["t.parquet"]


def test_the_passes_of_a_trace(tmp_path: Path, tiny: LanguageModel) -> None:
    path = tmp_path / "t.parquet"
    prompt = [9, 30, 12, 9, 30, 12, 9, 30]
    steps = list(Engine(tiny, Method("pld", budget=3)).steps(prompt, 40))
    with TraceWriter(path) as trace:
        trace.add("a", 0, "pld", steps)
        trace.add("b", 0, "none", list(Engine(tiny).steps(prompt, 40)))
    passes = read_passes(str(path))
    assert passes.prompts.tolist() == [8, 8]
    assert len(passes.rows) == len(pq.read_table(path)) - 2
    assert passes.rows[: len(steps) - 1].tolist() == [len(step.draft) + 1 for step in steps[1:]]
    assert passes.contexts[: len(steps) - 1].tolist() == [step.position - 1 for step in steps[1:]]
    assert (passes.seconds > 0).all()
    table = pq.read_table(path)
    for column, wrong in (("forward_seconds", float("nan")), ("drafted", -2), ("position", 0), ("drafted", 2**31 - 2)):
        place = table.schema.get_field_index(column)
        values = pa.array([*table[column].to_pylist()[:-1], wrong], table.schema.field(place).type)
        pq.write_table(table.set_column(place, table.schema.field(place), values), tmp_path / "wrong.parquet")
        with pytest.raises(InputError, match="that cannot be"):
            read_passes(str(tmp_path / "wrong.parquet"))


def test_shares_of_passes_are_no_passes(tmp_path: Path) -> None:
    """Of requests that were answered at once only what one of them had alone says what a pass takes."""
    lengths = [2, 2, 2 + 2 * LEAST_PASSES]
    engine = Engine(make_model(stop=False), Method("none"))
    requests = [engine.request([9 + number, 30, 12], most) for number, most in enumerate(lengths)]
    steps: dict[int, list[Step]] = {number: [] for number in range(3)}
    for request in engine.decode(Listed(requests), parallel=3):
        assert request.step is not None
        steps[requests.index(request)].append(request.step)
    path = tmp_path / "t.parquet"
    with TraceWriter(path, resumable=True) as trace:
        for number in range(3):
            trace.add(str(number), 0, "none", steps[number])
    rows = pq.read_table(path).to_pylist()
    shared = [row for row in rows if row["step"] == 1]
    assert {row["forward_pass"] for row in shared} == {1}
    assert {row["pass_tokens"] for row in shared} == {3}
    passes = read_passes(str(path))
    assert passes.contexts.tolist() == [step.position - 1 for step in steps[2][2:]]
    assert not len(passes.prompts)
    # What explains a run knows how many shared a pass, and what as many would take without drafts.
    found = explain(str(path))
    assert (found.steps, found.passes) == (sum(lengths), lengths[2])
    first = sum(row["forward_seconds"] + row["verify_seconds"] for row in rows if row["step"] == 0)
    later = sum(row["forward_seconds"] + row["verify_seconds"] for row in rows if row["step"])
    assert found.plain - first == pytest.approx(later)
    # A run that goes on counts its passes from 0, and the file from where it was.
    with TraceWriter(path, resumable=True) as trace:
        assert trace.carry_over(["0", "1", "2"]) == []
        trace.add("3", 0, "none", steps[2])
    numbers = pq.read_table(path)["forward_pass"].to_pylist()
    assert min(numbers[len(rows) :]) > max(numbers[: len(rows)])


def test_a_trace_survives_an_error_and_says_where_it_cannot_write(tmp_path: Path, tiny: LanguageModel) -> None:
    steps = list(Engine(tiny).steps([9, 30], 5))
    with pytest.raises(ZeroDivisionError), TraceWriter(tmp_path / "t.parquet") as trace:
        trace.add("a", 0, "none", steps)
        raise ZeroDivisionError
    assert pq.read_table(tmp_path / "t.parquet").num_rows == len(steps)
    with pytest.raises(OutputError, match="cannot write the trace"), TraceWriter(tmp_path / "no" / "t.parquet"):
        pass


def test_a_run_that_dies_anywhere_leaves_what_its_successor_needs(tmp_path: Path, tiny: LanguageModel) -> None:
    """Two prompts of one id, and one of two turns; what is answered is on the disk after what is traced."""
    first, second = (list(Engine(tiny).steps(prompt, 4)) for prompt in ([9, 30], [12, 9]))
    asked = [("a", [first]), ("b", [first, second]), ("a", [second])]
    folder = tmp_path / "run"

    def run() -> None:
        with TraceWriter(folder / "t.parquet", resumable=True) as trace, answer_file(folder / "a.jsonl") as file:
            assert trace.carry_over([one.id for one in file.held]) == []
            for name, turns in asked[len(file.held) :]:
                for turn, steps in enumerate(turns):
                    trace.add(name, turn, "none", steps)
                file.write({"id": name, "key": ""})

    def fresh() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()

    fresh()
    run()
    whole = pq.read_table(folder / "t.parquet").drop_columns("forward_pass")
    points = 0
    for point in crash_points(fresh, run, folder):
        run()
        assert pq.read_table(folder / "t.parquet").drop_columns("forward_pass").equals(whole), point
        assert sorted(one.name for one in folder.iterdir()) == ["a.jsonl", "t.parquet"], point
        points += 1
    assert points > 15


def test_a_damaged_trace_is_not_cut_by_a_resumed_run(tmp_path: Path, tiny: LanguageModel) -> None:
    path = tmp_path / "t.parquet"
    steps = list(Engine(tiny).steps([9, 30], 40))
    with TraceWriter(path) as trace:
        for number in range(800):
            trace.add(str(number), 0, "none", steps)
    data = path.read_bytes()
    broken = bytearray(data)
    broken[len(data) * 3 // 4 : len(data) * 3 // 4 + 400] = bytes(400)
    path.write_bytes(broken)
    with pytest.raises(OutputError), TraceWriter(path) as trace:
        trace.carry_over([str(number) for number in range(800)])
    assert path.read_bytes() == bytes(broken)
