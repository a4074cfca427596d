"""A bench's rows: all of them, whatever stops it on the way."""

from __future__ import annotations

import contextlib
import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from specds.calibration.bench.cases import Case, choose_cases
from specds.calibration.bench.results import JOURNAL, STEPS, Row, key_of, open_results, read_rows, read_steps
from specds.errors import InputError, OutputError, PeerError, PromptError, UnsafeFile
from specds.model import LanguageModel
from specds.reading.prompts import BadRow, Prompt

from ...tools import Mortal, Run, mortal
from .conftest import Bench, case, ours


def texts(rows: list[Row]) -> dict[tuple[str, str, int], list[list[int]]]:
    assert len({key_of(row) for row in rows}) == len(rows)
    return {key_of(row): row["tokens"] for row in rows}


def check_steps(path: Path) -> None:
    """Every row's steps are there once, and add up to its tokens."""
    rows = {key_of(row): row for row in read_rows(path)}
    committed: Counter[tuple[str, str, int]] = Counter()
    seen = Counter()
    for batch in read_steps(path):
        for step in batch:
            committed[key_of(step)] += step["committed"]
            seen[(*key_of(step), step["turn"], step["step"])] += 1
    assert set(seen.values()) == {1}
    assert committed == {key: row["new_tokens"] for key, row in rows.items() if not row["peer"]}


def test_every_method_answers_every_prompt_as_often_as_asked(run_bench: Bench) -> None:
    cases = [case(0, "even", turns=2), case(1, "odd"), case(2, "even", turns=2), case(3, "odd")]
    summary = run_bench("none,pld@4,sam@4", cases, repeats=2)
    rows = read_rows(summary["path"])
    methods = ("none", "pld@4", "sam@4")
    assert [key_of(row) for row in rows] == [(one.key, name, r) for one in cases for name in methods for r in range(2)]
    assert {row["group"] for row in rows if row["prompt"] in ("p0", "p2")} == {"even"}
    for row in rows:
        assert len(row["tokens"]) == len(row["prompt_tokens"]) == (2 if row["group"] == "even" else 1)
        assert row["new_tokens"] == sum(map(len, row["tokens"])) > 0
        assert row["steps"] == row["passes"] <= row["new_tokens"]
        assert row["same"] is True
    check_steps(summary["path"])
    assert [(one["group"], one["prompts"]) for one in summary["groups"]] == [("even", 2), ("odd", 2), ("all", 4)]
    assert not (summary["path"] / JOURNAL).exists()


def test_methods_take_turns_on_each_prompt_in_a_rotating_order(run_bench: Bench) -> None:
    rows = read_rows(run_bench("none,pld@4,sam@4", repeats=2)["path"])
    order = [(row["repeat"], row["prompt"], row["method"]) for row in sorted(rows, key=lambda row: row["order"])]
    turns = [order[start : start + 3] for start in range(0, len(order), 3)]
    assert [turn[0][:2] for turn in turns] == [(r, f"p{number}") for r in range(2) for number in range(3)]
    assert all(len({one[:2] for one in turn}) == 1 and len({one[2] for one in turn}) == 3 for turn in turns)
    assert [turn[0][2] for turn in turns] == ["none", "pld@4", "sam@4"] * 2


def test_a_finished_bench_measures_nothing_again(run_bench: Bench) -> None:
    first = run_bench("none,pld@4", out="same")
    rows = read_rows(first["path"])
    steps = [step for batch in read_steps(first["path"]) for step in batch]
    second = run_bench("none,pld@4", out="same")
    assert read_rows(first["path"]) == rows
    assert [step for batch in read_steps(first["path"]) for step in batch] == steps
    assert second == first


def test_other_options_are_refused_and_named(run_bench: Bench) -> None:
    path = run_bench("none,pld@4", out="same")["path"]
    held = {file.name: file.read_bytes() for file in path.iterdir()}
    for methods, cases, plan, word in (
        ("none,pld@5", None, {}, "methods"),
        ("none,pld@4", None, {"max_new_tokens": 9}, "max-new-tokens"),
        ("none,pld@4", None, {"repeats": 2}, "repeats"),
        ("none,pld@4", [case(7)], {}, "prompts-digest"),
    ):
        with pytest.raises(InputError, match=word):
            run_bench(methods, cases, out="same", **plan)
    assert {file.name: file.read_bytes() for file in path.iterdir() if file.name != JOURNAL} == held


def test_what_is_not_a_result_is_left_alone(run_bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("…")
    with pytest.raises(InputError, match="not a result"):
        run_bench("none", out="mine")
    assert [one.name for one in (tmp_path / "mine").iterdir()] == ["thesis.tex"]
    (tmp_path / "file").write_text("…")
    with pytest.raises(OutputError, match="not a directory"):
        run_bench("none", out="file")


@pytest.mark.parametrize("name", [".lock", JOURNAL])
@pytest.mark.parametrize("planted", ["link", "pipe", "other name"])
def test_what_is_planted_in_a_result_is_not_written_through(name: str, planted: str, tmp_path: Path) -> None:
    path, victim = tmp_path / "result", tmp_path / "victim"
    path.mkdir()
    victim.write_text("precious")
    if planted == "link":
        (path / name).symlink_to(victim)
    elif planted == "pipe":
        os.mkfifo(path / name)
    else:
        os.link(victim, path / name)
    # A lock is never written to, so that another name of it does no harm.
    harmless = (name, planted) == (".lock", "other name")
    with contextlib.nullcontext() if harmless else pytest.raises(UnsafeFile), open_results(path, {}) as results:
        results.begin({})
    assert victim.read_text() == "precious"


def test_a_cut_journal_goes_on_and_a_damaged_one_is_refused(run_bench: Bench, tiny: LanguageModel) -> None:
    class Stopped(Exception):
        pass

    contenders = ours(tiny, "none,pld@4")
    answer = contenders[1].answer
    count = 0

    def stopping(*arguments: object) -> object:
        nonlocal count
        count += 1
        if count == 4:
            raise Stopped
        return answer(*arguments)  # type: ignore[arg-type]

    contenders[1].answer = stopping  # type: ignore[method-assign,assignment]
    with pytest.raises(Stopped):
        run_bench(contenders, out="cut")
    whole = read_rows(run_bench("none,pld@4", out="whole")["path"])
    path = run_bench("none")["path"].with_name("cut")
    lines = (path / JOURNAL).read_bytes().splitlines(keepends=True)
    assert 0 < len(lines) < len(whole)
    (path / JOURNAL).write_bytes(b"".join(lines)[:-20])
    resumed = run_bench("none,pld@4", out="cut")
    assert texts(read_rows(path)) == texts(whole)
    assert len(resumed["sessions"]) == 2
    check_steps(path)
    (path / JOURNAL).write_bytes(b"not ours\n")
    with pytest.raises(InputError, match="damaged"):
        run_bench("none,pld@4", out="cut")
    (path / JOURNAL).unlink()
    (path / STEPS).write_bytes(b"not ours")
    with pytest.raises(InputError, match=STEPS):
        run_bench("none,pld@4", out="cut")


@pytest.fixture(scope="module")
def killable(tmp_path_factory: pytest.TempPathFactory, tiny_directory: Path) -> Iterator[Mortal]:
    """Runs `specds` in processes that can be killed, and that measure their cost curve once."""
    folder = tmp_path_factory.mktemp("killable")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        with mortal(folder / "log", tiny_directory) as runner:
            yield runner


def test_killed_and_started_again_a_bench_gives_the_same_rows(
    killable: Mortal, tiny_directory: Path, tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(
        "".join(json.dumps({"id": f"p{n}", "turns": [f"w{n} w2 w{n} w2", "w3"]}) + "\n" for n in range(3))
    )
    command = ["bench", "-p", prompts, "--methods", "pld@4", "--model", tiny_directory, "--device", "cpu"]
    command += ["--max-new-tokens", 8, "--warmup", 2]
    assert killable.run([*command, "--output", tmp_path / "whole"]) == 0, killable.said
    whole = texts(read_rows(tmp_path / "whole"))
    assert len(whole) == 6
    died = 0
    for at in (2, 5, 9, 13, 15, 17, 19):
        out = tmp_path / f"killed-{at}"
        died += killable.run([*command, "--output", out], at=at, root=out) == 9
        # Once more at another place, then to the end.
        killable.run([*command, "--output", out], at=at // 2 + 3, root=out)
        assert killable.run([*command, "--output", out]) == 0, killable.said
        assert texts(read_rows(out)) == whole
        check_steps(out)
        assert {one.name for one in out.iterdir()} == {one.name for one in (tmp_path / "whole").iterdir()}
    assert died >= 6


def test_a_prompt_that_cannot_be_answered_is_left_out_of_every_method(run_bench: Bench) -> None:
    long = Case("long", "one", Prompt("long", (({"role": "user", "content": "w1 " * 400},),)))
    bad = Case("bad", "one", BadRow("bad", PromptError("row 3 is not a valid prompt", "mend it")))
    summary = run_bench("none,pld@4", [case(0), long, bad, case(1)])
    assert not summary["valid"]
    assert {(one["kind"], one["prompt"]) for one in summary["problems"]} == {("failed", "long"), ("failed", "bad")}
    assert summary["prompts"] == {"asked": 4, "compared": 2}
    assert summary["groups"][0]["prompts"] == 2
    rows = read_rows(summary["path"])
    assert len(rows) == 8
    assert all((row["error"] is not None) == (row["prompt"] in ("long", "bad")) for row in rows)
    nothing = run_bench("none", [bad])
    assert (nothing["valid"], nothing["groups"]) == (False, [])


def test_a_peer_that_fails_later_has_rows_that_say_so_and_is_asked_again(run_bench: Bench, tiny: LanguageModel) -> None:
    contenders = ours(tiny, "none,pld@4")
    answer = contenders[1].answer

    def failing(prompt: Prompt, most: int) -> object:
        if prompt.id == "p1" and most > 2:
            raise PeerError("it died", "look at it")
        return answer(prompt, most)

    contenders[1].answer = failing  # type: ignore[method-assign,assignment]
    summary = run_bench(contenders, out="later")
    assert [(one["kind"], one["prompt"]) for one in summary["problems"]] == [("failed", "p1")]
    assert run_bench("none,pld@4", out="later")["valid"]
    assert run_bench("none,pld@4", out="later")["prompts"]["compared"] == 3


def test_prompts_are_spread_evenly_over_groups_and_files(tmp_path: Path) -> None:
    rows = [{"question_id": n, "category": "ab"[n % 2], "turns": ["w1", "w2"], "reference": ["x"]} for n in range(20)]
    (tmp_path / "question.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "all.txt").write_text("w1\nw2\nw3\n")
    question, lines = str(tmp_path / "question.jsonl"), str(tmp_path / "all.txt")
    cases = choose_cases([question], group="category", limit=3)
    assert [(one.key, one.group) for one in cases] == [
        ("0", "a"),
        ("6", "a"),
        ("12", "a"),
        ("1", "b"),
        ("7", "b"),
        ("13", "b"),
    ]
    assert all(isinstance(one.prompt, Prompt) and len(one.prompt.turns) == 2 for one in cases)
    assert {one.prompt.reference for one in cases if isinstance(one.prompt, Prompt)} == {"x"}
    cases = choose_cases([f"{question}=2", lines], turns=1)
    assert [(one.key, one.group) for one in cases[:2]] == [("0", "question"), ("10", "question")]
    # "all" is the name of the row of all groups, and ids of different files may be the same.
    assert [(one.key, one.group) for one in cases[2:]] == [
        ("0#2", "all (file)"),
        ("1", "all (file)"),
        ("2", "all (file)"),
    ]
    assert all(isinstance(one.prompt, Prompt) and len(one.prompt.turns) == 1 for one in cases)
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(InputError, match="no prompts"):
        choose_cases([str(tmp_path / "empty.jsonl")])


@pytest.fixture
def asked(tiny_directory: Path, tmp_path: Path) -> list[object]:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(
        "".join(json.dumps({"prompt": f"w{n} w2 w{n} w2", "reference": "#### 2"}) + "\n" for n in range(2))
    )
    return ["bench", "-p", prompts, "--model", tiny_directory, "--device", "cpu", "--max-new-tokens", 6]


def test_the_command_line_measures_compares_and_says_by_its_code_whether_to_believe_it(
    run_cli: Run, asked: list[object], tmp_path: Path
) -> None:
    result = run_cli(*asked, "--methods", "pld@4,pld@4!lossy?tau=0.001", "--output", tmp_path / "r")
    assert (result.code, result.out) == (0, ""), result.err
    assert "× plain" in result.err
    assert "valid" in result.err
    summary = json.loads((tmp_path / "r" / "summary.json").read_text())
    assert [one["name"] for one in summary["methods"]] == ["none", "pld@4", "pld@4!lossy?tau=0.001"]
    lossy = summary["groups"][0]["methods"]["pld@4!lossy?tau=0.001"]
    assert lossy["log_p"] < 0
    assert lossy["graded"] == 2
    assert summary["cost"]["rows"][0] == 1
    assert {"torch", "numpy", "specds"} <= set(summary["sessions"][0]["versions"])
    run_cli(*asked, "--methods", "pld@2,pld@4", "--budget", "3", "--output", tmp_path / "s")
    result = run_cli("compare", tmp_path / "r", tmp_path / "s")
    assert result.code == 0, result.err
    assert "budget" in result.out
    assert "methods only in the second: pld@2" in result.out
    result = run_cli("compare", tmp_path / "r", tmp_path / "s", "--json")
    (found,) = result.records
    assert found["changed"]["options"]["budget"] == ["auto", "3"]
    assert found["only"]["methods"] == [["pld@4!lossy?tau=0.001"], ["pld@2"]]
    assert [row["method"] for row in found["groups"]] == ["none", "pld@4"]
    assert found["groups"][0]["paired"]["prompts"] == 2
    run_cli("compare", tmp_path / "r", tmp_path / "prompts.jsonl").refused("prompts.jsonl")
    result = run_cli(*asked, "-p", tmp_path / "long.txt", "--output", tmp_path / "t")
    result.refused("long.txt")
    (tmp_path / "long.txt").write_text("w1 " * 400)
    result = run_cli(*asked, "-p", tmp_path / "long.txt", "--output", tmp_path / "t")
    assert result.code == 1
    assert "NOT VALID" in result.err
    assert (tmp_path / "t" / "report.html").exists()


@pytest.mark.parametrize(
    "wrong",
    [
        ["--methods", "nonsense"],
        ["--methods", "pld,pld"],
        ["--methods", "pld?nonsense=1"],
        ["--methods", "pld!nonsense"],
        ["--methods", "rest"],
        ["--budget", "many"],
        ["--peers", "nonsense"],
        ["--peers", "hf-assisted"],
        ["--peers", "hf-generate", "--temperature", "1"],
        ["--peers", "hf-generate,hf-generate"],
        ["--peer", "nonsense"],
        ["--assistant", "x"],
    ],
)
def test_wrong_usage_is_refused_before_anything_is_measured(
    wrong: list[object], run_cli: Run, asked: list[object], tmp_path: Path
) -> None:
    run_cli(*asked, "--output", tmp_path / "r", *wrong).refused(code=2)
    assert not (tmp_path / "r").exists()


def test_a_peer_that_cannot_be_run_stops_the_bench(run_cli: Run, asked: list[object], tmp_path: Path) -> None:
    run_cli(*asked, "--output", tmp_path / "r", "--peer", "x=/no/such/program --flag").refused("/no/such/program")
    run_cli(*asked, "--output", tmp_path / "r", "--peer", "y=python -c pass").refused("other options")
    run_cli(*asked, "--output", tmp_path / "s", "--peer", "y=python -c pass").refused("died")
    run_cli(*asked, "--output", tmp_path / "t", "--peer", "y=sh -c 'read line; echo words'").refused("not JSON")
    run_cli(*asked, "--output", tmp_path / "u", "--peer", "y=sleep 30", "--peer-timeout", 1).refused("silent")


def test_transformers_own_ways_are_peers_with_the_same_text(run_cli: Run, asked: list[object], tmp_path: Path) -> None:
    model = asked[4]
    peers = ("hf-generate", "hf-prompt-lookup", "hf-assisted")
    result = run_cli(*asked, "--peers", ",".join(peers), "--assistant", model, "--output", tmp_path / "r")
    assert result.code == 0, result.err
    assert "× generate" in result.err
    rows = read_rows(tmp_path / "r")
    for name in peers:
        own = [row for row in rows if row["method"] == name]
        assert all(row["same"] and row["peer"] and 0 < row["passes"] <= row["new_tokens"] for row in own)
    assert all(row["passes"] == row["new_tokens"] for row in rows if row["method"] == "hf-generate")
    figures = json.loads((tmp_path / "r" / "summary.json").read_text())["groups"][0]["methods"]
    assert figures["hf-generate"]["speedup"]["hf-generate"]["value"] == 1
    # Its own drafts are right, so that it needs fewer passes.
    assert figures["hf-assisted"]["mat"]["value"] > 1
