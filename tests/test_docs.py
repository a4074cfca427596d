"""What the documents say of the program: links lead somewhere, files are there, and commands are understood."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from specds.cli.main import app

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
COMMAND = typer.main.get_command(app)
FOLDERS = ("bench", "calibration", "cli", "datastore", "decode", "docs", "reading", "specds", "tests")
# A file of the repository; not one of an older commit, as in `git show 1234abc:bench/old.py`.
NAMED_FILE = re.compile(r"(?<![\w/:~.])(?:" + "|".join(FOLDERS) + r")/[\w/]+\.(?:py|md|json)")
# The file that "How to add a drafter" tells its reader to write.
TO_BE_WRITTEN = "yours.py"

every_document = pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)


def blocks(text: str) -> Iterator[tuple[str, list[str]]]:
    """Prose, and code that is indented or fenced, in order: (language or "indented" or "prose", lines)."""
    kind, lines = "prose", list[str]()
    after_blank = True
    for line in text.splitlines():
        fence = re.match(r"\s*```(\w*)", line)
        if fence and kind in {"prose", "indented"}:
            yield kind, lines
            kind, lines = fence[1] or "fenced", []
        elif fence:
            yield kind, lines
            kind, lines = "prose", []
        elif kind == "prose" and after_blank and line.startswith("    "):
            yield kind, lines
            kind, lines = "indented", [line]
        elif kind == "indented" and line.strip() and not line.startswith("    "):
            yield kind, lines
            kind, lines = "prose", [line]
        else:
            lines.append(line)
        after_blank = not line.strip()
    yield kind, lines


def anchors(path: Path) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    prose = [line for kind, lines in blocks(path.read_text()) if kind == "prose" for line in lines]
    headings = [line.lstrip("# ").lower() for line in prose if re.match(r"#+ ", line)]
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in headings}


def shell_lines(text: str) -> Iterator[str]:
    """The command lines of a document, each on one line."""
    for kind, lines in blocks(text):
        if kind in {"indented", "fenced", "sh", "bash", "console"}:
            yield from re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines()


def commands(line: str) -> Iterator[list[str]]:
    """The arguments of each `specds` of a shell line; what is piped or redirected is left out."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="();<>|&")
    lexer.whitespace_split = True
    words: list[str] = []
    for word in [*lexer, ";"]:
        if set(word) <= set("();<>|&"):
            if words[:1] == ["specds"]:
                yield words[1:]
            words = []
        else:
            words.append(word)


def parse(arguments: list[str]) -> None:
    """Parse as the command line does, without running anything. Raises: what it raises at wrong usage."""
    command, rest = COMMAND, arguments
    try:
        while isinstance(command, typer.core.TyperGroup):
            name, *rest = rest
            assert name in command.commands, f"there is no command {name}"
            command = command.commands[name]
        command.make_context(command.name, rest)
    except Exception as error:
        error.add_note(f"specds {shlex.join(arguments)}")
        raise


@every_document
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        if re.match(r"\w+:", target):
            continue
        file, _, anchor = target.partition("#")
        there = path.parent / file if file else path
        assert there.exists(), target
        assert not anchor or anchor in anchors(there), target


@every_document
def test_named_files_are_there(path: Path) -> None:
    text = path.read_text()
    missing = {name for name in NAMED_FILE.findall(text) if not (ROOT / name).exists()}
    assert not {name for name in missing if Path(name).name != TO_BE_WRITTEN}


def test_the_map_names_modules_that_exist() -> None:
    known = {file.name for folder in FOLDERS for file in (ROOT / folder).rglob("*.py")} | {TO_BE_WRITTEN}
    assert set(re.findall(r"\b\w+\.py\b", (ROOT / "CONTRIBUTING.md").read_text())) <= known


@every_document
def test_commands_are_understood(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for line in shell_lines(path.read_text()):
        for arguments in commands(line) if "specds" in line else ():
            parse(arguments)
    assert not list(tmp_path.iterdir())


def test_the_readme_has_every_command_as_it_is_called() -> None:
    assert isinstance(COMMAND, typer.core.TyperGroup)
    rows = re.findall(r"^\| `([a-z][\w-]*)([^`]*)` \|", README.read_text(), re.MULTILINE)
    assert COMMAND.commands.keys() <= {name for name, _ in rows}
    for name, arguments in rows:
        if name in COMMAND.commands and r"\|" not in arguments:
            parse([name, *arguments.split()])


def test_python_in_the_readme_imports_what_there_is() -> None:
    sources = ["\n".join(lines) for kind, lines in blocks(README.read_text()) if kind == "python"]
    assert sources
    for node in (node for source in sources for node in ast.walk(ast.parse(source))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("specds"):
            for name in node.names:
                assert hasattr(importlib.import_module(node.module), name.name)
