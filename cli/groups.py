"""Groups of options: a command takes one parameter for options that belong together, and it is declared like this:

    @dataclass(frozen=True, slots=True)
    class SamplingOptions:
        temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy decoding.")] = 0.0
        seed: Annotated[int, typer.Option(help="Same seed, same text.")] = 0

    def decode(sampling: SamplingOptions, strict: Annotated[bool, typer.Option("--strict")] = False) -> None: ...

    add(app, decode)  # specds decode --temperature 0.7 --seed 3 --strict

A command's own defaults stand in a default of the group: `sampling: SamplingOptions = SamplingOptions(seed=7)`.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup
from typer.models import OptionInfo, ParameterInfo

ENVIRONMENT = "SPECDS"
"""Every option of every command has a variable of its own: SPECDS_DECODE_BUDGET is `decode --budget`."""
_EXAMPLE = "[dim]"
_METAVARS = {Path: "PATH", str: "TEXT", int: "N", float: "X"}


class Command(TyperCommand):
    """A command whose help shows no type for flags."""

    def get_params(self, ctx: Any) -> Any:
        """Its parameters, `--help` with them."""
        return _without_flags_types(super().get_params(ctx))


class Group(TyperGroup):
    """A group of commands whose help shows no type for flags."""

    def get_params(self, ctx: Any) -> Any:
        """Its parameters, `--help` with them."""
        return _without_flags_types(super().get_params(ctx))


def add(app: typer.Typer, function: Callable[..., None], *above: str, name: str | None = None) -> None:
    """Make a function a command.

    Args:
        above: names of the commands that it stands below, but for `specds` itself.
        name: what it is called; the function's own name if not given.
    """
    name = name or function.__name__.replace("_", "-")
    prefix = "_".join([ENVIRONMENT, *above, name]).replace("-", "_").upper()
    app.command(name, cls=Command, help=unfolded(inspect.getdoc(function) or ""))(_spread(function, prefix))


def unfolded(text: str) -> str:
    """A docstring with each paragraph in one line, so that the terminal's width folds it; examples stay as they are."""
    paragraphs = text.split("\n\n")
    return "\n\n".join(
        paragraph if paragraph.startswith(_EXAMPLE) else " ".join(paragraph.split()) for paragraph in paragraphs
    )


def _spread(function: Callable[..., None], prefix: str) -> Callable[..., None]:
    """The function with the fields of its groups for parameters, as typer looks at it."""
    signature = inspect.signature(function, eval_str=True)
    groups: dict[str, type[Any]] = {
        name: parameter.annotation
        for name, parameter in signature.parameters.items()
        if isinstance(parameter.annotation, type) and dataclasses.is_dataclass(parameter.annotation)
    }

    def run(**values: Any) -> None:
        given = {
            name: kind(**{field.name: values.pop(field.name) for field in dataclasses.fields(kind)})
            for name, kind in groups.items()
        }
        function(**given, **values)

    parameters = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=default,
            annotation=_completed(name, annotation, default, prefix),
        )
        for parameter in signature.parameters.values()
        for name, annotation, default in (_fields(parameter) if parameter.name in groups else [_plain(parameter)])
    ]
    spread: Any = run
    spread.__name__, spread.__doc__ = function.__name__, function.__doc__
    spread.__signature__ = inspect.Signature(parameters)
    spread.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _plain(parameter: inspect.Parameter) -> tuple[str, Any, Any]:
    return parameter.name, parameter.annotation, parameter.default


def _fields(group: inspect.Parameter) -> Iterator[tuple[str, Any, Any]]:
    """Name, annotation and default of each field; `inspect.Parameter.empty` where it must be given."""
    hints = get_type_hints(group.annotation, include_extras=True)
    for field in dataclasses.fields(group.annotation):
        if group.default is not inspect.Parameter.empty:
            default = getattr(group.default, field.name)
        elif field.default is not dataclasses.MISSING:
            default = field.default
        elif field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        else:
            default = inspect.Parameter.empty
        yield field.name, hints[field.name], default


def _completed(name: str, annotation: Any, default: Any, prefix: str) -> Any:
    """The annotation of an option with the command's environment variable, before those it has, and a metavar."""
    if get_origin(annotation) is not Annotated:
        return annotation
    kind, *infos = get_args(annotation)
    annotated: Any = Annotated
    return annotated[(kind, *(_option(info, name, kind, default, prefix) for info in infos))]


def _option(info: ParameterInfo, name: str, kind: Any, default: Any, prefix: str) -> Any:
    if not isinstance(info, OptionInfo):
        option = copy.copy(info)
        option.metavar = info.metavar or name.upper()
        return option
    words = [word for word in (info.default, *(info.param_decls or ())) if isinstance(word, str)]
    flag = next((word for word in words if word.startswith("--")), f"--{name}")
    option = copy.copy(info)
    variable = f"{prefix}_{flag.removeprefix('--').replace('-', '_').upper()}"
    option.envvar = [variable, *_variables(info)]
    option.show_envvar = False  # what the first screen says holds for all
    option.metavar = info.metavar or next((word for part, word in _METAVARS.items() if part in _parts(kind)), None)
    if default is not None and isinstance(info.show_default, str):
        option.show_default = True  # the words are for a default that is None
    return option


def _parts(kind: Any) -> set[Any]:
    """The types in `list[str] | None`."""
    return {kind}.union(*map(_parts, get_args(kind)))


def _variables(info: ParameterInfo) -> list[str]:
    if info.envvar is None:
        return []
    return [info.envvar] if isinstance(info.envvar, str) else list(info.envvar)


def _without_flags_types(parameters: Any) -> Any:
    for parameter in parameters:
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
    return parameters
