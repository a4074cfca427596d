"""Calibration: counts that do not depend on when it was stopped."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from specds.calibration.corrections import STRICT, calibrate
from specds.datastore.corrections import Table, calibrating, key_of, read_table
from specds.decode.engine import Engine
from specds.decode.method import Method
from specds.errors import ForeignTable, StoreLocked
from specds.model import LanguageModel
from specds.reading.prompts import Prompt
from specds.sampling import Sampling

from ..tools import Mortal

PROMPTS = [Prompt(str(n), (({"role": "user", "content": f"w{n} w9 w{n} w9 w7 w{n}"},),)) for n in range(6)]


def engine(model: LanguageModel, drafter: str = "pld", seed: int = 0) -> Engine:
    return Engine(
        model, Method(drafter, budget=6, verifier="csd", verifier_options=STRICT), sampling=Sampling(0.6, seed=seed)
    )


def same(one: Table, other: Table) -> bool:
    columns = ("drafted", "picked", "count")
    return all(getattr(one, name).tolist() == getattr(other, name).tolist() for name in columns)


@pytest.mark.parametrize("parallel", [1, 4])
def test_every_divergence_of_standard_decoding_is_counted(parallel: int, tmp_path: Path, tiny: LanguageModel) -> None:
    path = tmp_path / "t.parquet"
    state = calibrate(engine(tiny), PROMPTS, path, 24, parallel=parallel)
    table = read_table(path)
    expected: dict[int, int] = {}
    strict = Engine(tiny, Method("pld", budget=6, verifier="rejection"), sampling=Sampling(0.6))
    tokens = 0
    for prompt in PROMPTS:
        for step in strict.answer(prompt, 24).turns[0].steps:
            tokens += len(step.tokens)
            node = step.path[-1] if step.path else -1
            if step.accepted < len(step.path) or len(step.tokens) == step.accepted:
                continue  # cut by a stop token inside the path
            for child in (step.draft.parents == node).nonzero()[0].tolist():
                key = key_of(int(step.draft.tokens[child]), step.tokens[-1])
                expected[key] = expected.get(key, 0) + 1
    found = dict(zip(map(key_of, table.drafted.tolist(), table.picked.tolist()), table.count.tolist(), strict=True))
    assert found == expected
    assert sum(found.values()) > 10
    assert (state.prompts, state.tokens, table.prompts, table.tokens) == (6, tokens, 6, tokens)


def test_prompts_count_once_and_more_prompts_add(tmp_path: Path, tiny: LanguageModel) -> None:
    once, parts = tmp_path / "once.parquet", tmp_path / "parts.parquet"
    calibrate(engine(tiny), PROMPTS, once, 24)
    calibrate(engine(tiny), PROMPTS[:4], parts, 24)
    again = calibrate(engine(tiny), PROMPTS, parts, 24)
    assert (again.prompts, again.known) == (2, 4)
    assert same(read_table(once), read_table(parts))
    # Another seed is another sample of the same prompts.
    assert calibrate(engine(tiny, seed=1), PROMPTS, parts, 24).prompts == 6
    assert read_table(parts).prompts == 12
    with pytest.raises(ForeignTable, match="of the draft pld"):
        calibrate(engine(tiny, "recycling"), PROMPTS, parts, 24)


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory, tiny_directory: Path) -> Callable[[Path], list[object]]:
    asked = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    rows = [{"id": str(n), "prompt": f"w{n} w9 w{n} w9 w7 w{n}"} for n in range(16)]
    asked.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ["--model", tiny_directory, "--device", "cpu", "--threads", 1, "--max-new-tokens", 24, "-d", "pld"]

    def make(out: Path) -> list[object]:
        return ["calibrate-csd", "-p", asked, "--output", out, "--budget", 6, *options]

    return make


def test_killed_and_resumed_it_counts_as_if_uninterrupted(
    tmp_path: Path, killable: Mortal, command: Callable[[Path], list[object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = tmp_path / "whole.parquet"
    assert killable.run(command(whole)) == 0, killable.said
    expected, seconds = read_table(whole), killable.seconds
    path = tmp_path / "killed" / "t.parquet"
    path.parent.mkdir()
    rng = random.Random(1)
    for _ in range(4):
        assert killable.run(command(path), after=seconds * rng.uniform(0.2, 0.9)) in (-9, 0)
    # Before every change of a file, too: the table is the old one or the new one.
    point = 1
    while (code := killable.run(command(path), at=point, root=path.parent)) == 9:
        if path.exists():
            read_table(path)
        point += 1
        if point > 4:  # each of these runs does all the work that is left, so let one finish
            code = killable.run(command(path))
            break
    assert code == 0, killable.said
    assert same(read_table(path), expected)
    assert read_table(path).done == expected.done


def test_two_calibrations_do_not_count_into_one_table_at_once(tmp_path: Path, tiny: LanguageModel) -> None:
    path = tmp_path / "t.parquet"
    with calibrating(path), pytest.raises(StoreLocked, match="another calibration"):
        calibrate(engine(tiny), PROMPTS, path, 8)
    calibrate(engine(tiny), PROMPTS[:1], path, 8)
