"""A method: one way of decoding, as fields, and as one word for commands that compare several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from specds.errors import UsageError

if TYPE_CHECKING:
    from specds.datastore.store import Store
    from specds.model import LanguageModel

FORM = "drafter[:store…][@budget][?name=value&…][!verifier[?name=value&…]]"
AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Method:
    """One way of decoding: a drafter with its options, stores, draft model and budget, and a verifier with its options.

    Attributes:
        drafter: a name in the drafters' registry.
        options: that drafter's, as text.
        stores: datastores it looks things up in: paths, or stores that are open; each needs an index that it reads.
        budget: the most draft nodes a step; None: as many as pay for themselves on this machine, by the cost curve
            that `specds profile` left, or by one measured now in a second or two, and by what passes take.
        verifier: `auto`, or a name in the verifiers' registry.
        verifier_options: that verifier's, as text.
        draft_model: what a drafter that takes one drafts with: a model of the target's tokenizer, loaded or by name,
            or `skip:…` for the target without some layers. None: for drafter `model` the target without every second.
        word: how it was written; empty: as it would be written.
    """

    drafter: str = "none"
    options: Mapping[str, str] = field(default_factory=dict, hash=False)
    stores: Sequence[Path | str | Store] = field(default=(), hash=False)
    budget: int | None = None
    verifier: str = AUTO
    verifier_options: Mapping[str, str] = field(default_factory=dict, hash=False)
    draft_model: LanguageModel | str | None = field(default=None, hash=False)
    word: str = field(default="", compare=False)

    @property
    def paths(self) -> tuple[Path, ...]:
        """Of the stores."""
        return tuple(Path(store) if isinstance(store, str | Path) else store.path for store in self.stores)

    @property
    def name(self) -> str:
        """The word."""
        if self.word:
            return self.word
        options = dict(self.options)
        if self.draft_model is not None:
            model = self.draft_model if isinstance(self.draft_model, str) else self.draft_model.name
            options["draft_model"] = model.replace(",", "+")
        drafting = ":".join([self.drafter, *map(str, self.paths)]) + f"@{written_budget(self.budget)}" + _query(options)
        judging = self.verifier + _query(self.verifier_options)
        return drafting if judging == AUTO else f"{drafting}!{judging}"


def parse_budget(text: str) -> int | None:
    """A number of draft tokens; None for `auto`.

    Raises:
        ValueError: neither.
    """
    if text == AUTO:
        return None
    if not text.isascii() or not text.isdigit():
        raise ValueError(f"{text!r} is neither a number nor {AUTO}")
    return int(text)


def written_budget(budget: int | None) -> str:
    """What `parse_budget` reads."""
    return AUTO if budget is None else str(budget)


def parse_methods(text: str, budget: int | None = None) -> list[Method]:
    """Methods from `none,rest:code.ds@16?min_match=3,pld!csd?table=T.parquet`.

    Args:
        budget: of methods that do not say theirs.

    Raises:
        UsageError: a word of another form.
    """
    return [parse_method(word.strip(), budget) for word in text.split(",")]


def parse_method(word: str, budget: int | None = None) -> Method:
    """One method. Commas stand between methods, so that `draft_model=skip:3+5-8` has `+` for them.

    Args:
        budget: if the word does not say it.

    Raises:
        UsageError: a word of another form.
    """
    drafting, _, judging = word.partition("!")
    name, _, settings = drafting.partition("?")
    name, at, nodes = name.partition("@")
    drafter, *stores = name.split(":")
    verifier, _, tolerance = judging.partition("?")
    try:
        said = parse_budget(nodes) if at else budget
    except ValueError:
        drafter = ""
    if not drafter or "" in stores:
        raise UsageError(f"{word!r} is not a valid method", f"a method is {FORM}")
    options = _pairs(word, settings)
    draft_model = options.pop("draft_model", None)
    return Method(
        drafter,
        options,
        tuple(map(Path, stores)),
        said,
        verifier or AUTO,
        _pairs(word, tolerance),
        draft_model and draft_model.replace("+", ","),
        word,
    )


def _pairs(word: str, settings: str) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for pair in filter(None, settings.split("&")):
        name, equals, value = pair.partition("=")
        if not name or not equals or name in pairs:
            raise UsageError(
                f"{word!r}: {pair!r} is not a valid option", "name=value, each name once, with & between them"
            )
        pairs[name.replace("-", "_")] = value
    return pairs


def _query(options: Mapping[str, str]) -> str:
    return "?" + "&".join(f"{name}={value}" for name, value in options.items()) if options else ""


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
