"""Options that are the same in all commands: their names, their variables, their help."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from specds.cli.main import app
from specds.limits import MAX_MANIFEST, MAX_ROW

from ..tools import Run


def commands(group: Any = None, above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command, with the words that it is called by."""
    group = group or typer.main.get_command(app)
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*above, name))
        else:
            yield (*above, name), command


COMMANDS = dict(commands())


def options(command: Any) -> list[Any]:
    return [one for one in command.params if any(word.startswith("--") for word in one.opts)]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"id": f"p{n}", "prompt": f"w{n} w{n + 1}"}) + "\n" for n in range(3)))
    return path


def test_every_option_has_a_variable_of_its_own_named_after_command_and_option() -> None:
    seen = {MAX_ROW.variable, MAX_MANIFEST.variable, "SPECDS_DEBUG", "SPECDS_MODEL", "SPECDS_THREADS"}
    for words, command in COMMANDS.items():
        for option in options(command):
            long = next(word for word in option.opts if word.startswith("--"))
            expected = "_".join(["SPECDS", *words, long.removeprefix("--")]).replace("-", "_").upper()
            assert option.envvar[0] == expected
            assert expected not in seen
            seen.add(expected)


def test_one_name_for_one_thing_in_all_commands() -> None:
    short: dict[str, set[str]] = {}
    for command in COMMANDS.values():
        for option in options(command):
            for word in option.opts:
                if not word.startswith("--"):
                    short.setdefault(word, set()).add(option.opts[0])
            assert not {"--out", "--rows", "--dir"} & set(option.opts)
            if "--prompts" in option.opts:
                assert set(option.opts) == {"--prompts", "-p", "--prompt-file"}
            if "--output" in option.opts:
                assert set(option.opts) == {"--output", "-o"}
    assert all(len(names) == 1 for names in short.values()), short


@pytest.mark.parametrize("words", COMMANDS)
def test_help_fills_80_columns_and_shows_no_type_of_flags(
    words: tuple[str, ...], run_cli: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = run_cli(*words, "--help").out
    assert not [word for word in ("<bool>", "BOOLEAN") if word in shown]
    lines = [line.strip() for line in shown.partition("╭")[0].splitlines()]
    assert all(len(line) <= 80 for line in shown.splitlines())
    for line, following in itertools.pairwise(lines):
        if line and following and not following.startswith("specds ") and not line.startswith(("specds ", "echo ")):
            first = following.split()[0]
            assert len(line) + 1 + len(first) > 76, f"{line!r} is cut short"


def test_the_model_and_any_option_come_from_the_environment_and_the_command_line_counts_more(
    run_cli: Run, prompts: Path, tiny_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECDS_MODEL", str(tiny_directory))
    monkeypatch.setenv("SPECDS_DEVICE", "cpu")
    monkeypatch.setenv("SPECDS_DECODE_MAX_NEW_TOKENS", "3")
    monkeypatch.setenv("SPECDS_DECODE_SET", "max_ngram=2 length=4")
    monkeypatch.setenv("SPECDS_DECODE_QUIET", "1")
    result = run_cli("decode", "-p", prompts, "-d", "pld")
    assert (result.code, result.err) == (0, "")
    assert all(len(record["tokens"]) <= 3 for record in result.records)
    longer = run_cli("decode", "-p", prompts, "-d", "pld", "--max-new-tokens", 5).records
    assert max(len(record["tokens"]) for record in longer) > 3
    run_cli("generate", prompts, "-s", tmp_path / "own.ds", "--max-new-tokens", 2)
    (part,) = run_cli("inspect", tmp_path / "own.ds", "--json").records[0]["corpus"]
    assert f"SPECDS_MODEL={tiny_directory} specds generate " in part["command"]
    # The command's own variable counts more than that of all commands.
    monkeypatch.setenv("SPECDS_MODEL", str(tmp_path / "no-such-model"))
    monkeypatch.setenv("SPECDS_DECODE_MODEL", str(tiny_directory))
    again = run_cli("decode", "-p", prompts, "-d", "pld").records
    assert [record["tokens"] for record in again] == [record["tokens"] for record in result.records]
    run_cli("generate", prompts, "-s", tmp_path / "s.ds").refused("no-such-model")
    monkeypatch.setenv("SPECDS_DECODE_LIMIT", "few")
    refused = run_cli("decode", "-p", prompts)
    assert refused.code == 2
    assert "SPECDS_DECODE_LIMIT" in refused.err


def test_generate_and_decode_take_prompts_alike(
    run_cli: Run, prompts: Path, tiny_directory: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text('{"id": "last", "prompt": "w8 w9"}\n')
    model = ["--model", tiny_directory, "--device", "cpu", "--max-new-tokens", 2]
    for number, given in enumerate(
        (
            [prompts, other],
            ["-p", prompts, "-p", other],
            ["-p", prompts, other],  # what a shell makes of -p *.jsonl
            ["--prompts", prompts, "--prompt-file", other],
        )
    ):
        decoded = run_cli("decode", *given, "-d", "none", *model)
        assert sorted(record["id"] for record in decoded.records) == ["last", "p0", "p1", "p2"]
        generated = run_cli("generate", *given, "-s", tmp_path / f"{number}.ds", *model)
        assert "4 new documents" in generated.err
    for command in (["decode"], ["generate", "-s", tmp_path / "none.ds"]):
        run_cli(*command, *model).refused("no prompts", "--prompts", code=2)


def test_shells_complete_options(run_cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    # Which shell asks is found out by looking at the processes above, and a test may have none.
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    shown = run_cli("--show-completion", "bash")
    assert (shown.code, shown.err) == (0, "")
    assert "_SPECDS_COMPLETE=complete_bash" in shown.out
    monkeypatch.setenv("_SPECDS_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "specds decode --prom")
    monkeypatch.setenv("COMP_CWORD", "2")
    completed = run_cli()
    assert completed.code == 0
    assert {"--prompts", "--prompt-file", "--prompt-field"} == set(completed.out.split())
    monkeypatch.setenv("COMP_WORDS", "specds decode -d pl")
    monkeypatch.setenv("COMP_CWORD", "3")
    assert {"pld", "pld-plus"} == set(run_cli().out.split())
