"""Imports: arrows between folders point one way, and modules form no circle."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import specds

ROOT = Path(__file__).parents[1]
BELOW = {
    "cli": {"decode", "calibration", "datastore", "reading"},
    "calibration": {"decode", "datastore", "reading"},
    "decode": {"datastore", "reading"},
    "datastore": {"reading"},
    "reading": set[str](),
    "specds": set[str](),
}


def sources() -> dict[str, Path]:
    """Every module's file, by the module's name."""
    found = {}
    for folder in BELOW:
        for path in (ROOT / folder).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join([specds.__name__, *parts[folder == "specds" :]]).removesuffix(".__init__")] = path
    return found


def imported(path: Path, modules: dict[str, Path], *, at_import: bool = False) -> Iterator[str]:
    """Modules of ours that a file imports.

    Args:
        at_import: only those that importing the file imports, not those of functions and of `TYPE_CHECKING`.
    """
    stack: list[ast.AST] = [ast.parse(path.read_bytes())]
    while stack:
        node = stack.pop()
        later = isinstance(node, ast.FunctionDef)
        later |= isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{name.name}" for name in node.names} & modules.keys()
            yield from inner or {node.module} & modules.keys()
        if not (at_import and later):
            stack.extend(ast.iter_child_nodes(node))


def test_arrows_point_one_way() -> None:
    modules = sources()
    rooms = {name: path.relative_to(ROOT).parts[0] for name, path in modules.items()}
    assert set(rooms.values()) == BELOW.keys()
    wrong = [
        (name, other)
        for name, path in modules.items()
        if name != specds.__name__  # the public names, imported on first use
        for other in imported(path, modules)
        if rooms[other] not in {rooms[name], "specds"} | BELOW[rooms[name]]
    ]
    assert not wrong


def test_modules_form_no_circle() -> None:
    modules = sources()
    graph = {name: set(imported(path, modules, at_import=True)) - {name} for name, path in modules.items()}
    assert len(list(TopologicalSorter(graph).static_order())) == len(modules)
