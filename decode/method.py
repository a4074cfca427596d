"""A method: one way of decoding, written as one word, as commands that compare several take it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from specds.errors import UsageError

if TYPE_CHECKING:
    from specds.decode.engine import Engine
    from specds.model import LanguageModel
    from specds.sampling import Sampling

FORM = "drafter[:store…][@budget][?name=value&…][!verifier[?name=value&…]]"


@dataclass(frozen=True, slots=True)
class Method:
    """A drafter with its stores, budget and options, and a verifier with its options.

    Attributes:
        name: the word itself.
        stores: paths of datastores.
        budget: the most draft nodes a step; None: what the run says.
        draft_model: what drafter `model` drafts with.
    """

    name: str
    drafter: str
    stores: tuple[str, ...] = ()
    budget: int | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    verifier: str = "auto"
    verifier_options: Mapping[str, str] = field(default_factory=dict)
    draft_model: str | None = None


def parse_methods(text: str) -> list[Method]:
    """Methods from `none,rest:code.ds@16?min_match=3,pld!csd?table=T.parquet`.

    Raises:
        UsageError: a word of another form.
    """
    return [parse_method(word.strip()) for word in text.split(",")]


def parse_method(word: str) -> Method:
    """One method. Commas stand between methods, so that `draft_model=skip:3+5-8` has `+` for them.

    Raises:
        UsageError: a word of another form.
    """
    drafting, _, judging = word.partition("!")
    name, _, settings = drafting.partition("?")
    name, at, budget = name.partition("@")
    drafter, *stores = name.split(":")
    verifier, _, tolerance = judging.partition("?")
    if not drafter or "" in stores or (at and not (budget.isascii() and budget.isdigit())):
        raise UsageError(f"{word!r} is no method", f"a method is {FORM}")
    options = _pairs(word, settings)
    draft_model = options.pop("draft_model", None)
    return Method(
        word,
        drafter,
        tuple(stores),
        int(budget) if at else None,
        options,
        verifier or "auto",
        _pairs(word, tolerance),
        draft_model and draft_model.replace("+", ","),
    )


def require_method(method: Method) -> None:
    """Refuse a method for its stores and its table, before any model is looked for.

    Raises:
        UsageError: its drafter needs a store, and it names none.
        SpecdsError: whatever a store or a table is refused with, whoever's tokens it holds.
    """
    from specds.datastore.corrections import read_table
    from specds.datastore.store import open_store
    from specds.decode.drafters import DRAFTERS
    from specds.decode.registry import load

    found = load(DRAFTERS, method.drafter, "drafter")
    if found.store_required and not method.stores:
        raise UsageError(
            f"method {method.name}: drafter {method.drafter} looks things up in a datastore, and none is given",
            f"write {method.drafter}:STORE, a store with a {found.index} index",
        )
    for path in method.stores:
        open_store(path)
    if table := method.verifier_options.get("table"):
        read_table(Path(table))


def open_method(
    model: LanguageModel, method: Method, sampling: Sampling, budget: int | None = None, runtime: str = "auto"
) -> Engine:
    """The engine that decodes by a method.

    Args:
        budget: that of methods without one of their own; None: as many nodes as pay for themselves.

    Raises:
        SpecdsError: whatever a store, a model or an option is refused with.
    """
    from specds.datastore.store import open_store
    from specds.decode.draft_model import SKIP
    from specds.decode.engine import Engine
    from specds.model import load_model

    draft_model: LanguageModel | str | None = method.draft_model
    if method.draft_model and not method.draft_model.startswith(SKIP):
        draft_model = load_model(method.draft_model, device=str(model.device), dtype=model.dtype)
    return Engine(
        model,
        method.drafter,
        method.options,
        [open_store(path, model.tokenizer) for path in method.stores],
        method.verifier,
        sampling,
        budget if method.budget is None else method.budget,
        runtime,
        method.verifier_options,
        draft_model,
    )


def _pairs(word: str, settings: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for pair in filter(None, settings.split("&")):
        name, equals, value = pair.partition("=")
        if not name or not equals or name in found:
            raise UsageError(f"{word!r}: {pair!r} is no option", "name=value, each name once, with & between them")
        found[name.replace("-", "_")] = value
    return found


def distinct(methods: Sequence[Method]) -> list[Method]:
    """The methods, refused if one is named twice.

    Raises:
        UsageError: one is.
    """
    names = [method.name for method in methods]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"method {name} is given twice", "name it once; --repeats measures it more often")
    return list(methods)
