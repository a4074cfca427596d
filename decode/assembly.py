"""From a method to what its requests are made of: the one place that puts a way of decoding together."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from specds.datastore.corrections import read_table
from specds.datastore.dense import DenseIndex
from specds.datastore.store import Store, open_store
from specds.datastore.suffix import SuffixIndex
from specds.decode.contracts import NO_RESOURCES, Captures, Drafter, Resources, Signal, Use
from specds.decode.draft_model import DraftDecoder
from specds.decode.drafters import DRAFTERS
from specds.decode.method import Method
from specds.decode.pricing.budget import Adaptive, Budget, Fixed
from specds.decode.pricing.curve import Prices
from specds.decode.registry import load, parse_options
from specds.decode.verifiers import verifier_class
from specds.decode.warm_up import warm_up
from specds.errors import CorruptStore, UsageError
from specds.model import LanguageModel
from specds.sampling import Sampling


def drafter_class(name: str) -> type[Drafter]:
    """A registered drafter.

    Raises:
        UsageError: there is none of that name.
    """
    kind: type[Drafter] = load(DRAFTERS, name, "drafter")
    return kind


def check_method(method: Method, sampling: Sampling | None = None) -> None:
    """Refuse a method that cannot be assembled for any model, before one is loaded.

    Raises:
        UsageError: an unknown name or option, a budget below 0, a drafter without the store or with the draft model
            that it does not take.
    """
    kind = drafter_class(method.drafter)
    parse_options(kind.Options, method.options, f"drafter {method.drafter}")
    judge = verifier_class(method.verifier, sampling or Sampling())
    parse_options(judge.Options, method.verifier_options, f"verifier {method.verifier}")
    if method.budget is not None and method.budget < 0:
        raise UsageError(f"--budget is {method.budget}", "0 (no drafts) or more")
    if kind.store_required and not method.stores:
        raise UsageError(
            f"drafter {method.drafter} looks things up in a datastore, and none is given",
            f"add --store S, a store with a {' or '.join(kind.indexes)} index; in a method, {method.drafter}:S",
        )
    if method.draft_model is not None and kind.draft_model is Use.NEVER:
        raise UsageError(
            f"--draft-model is given, and --drafter {method.drafter}", "--drafter auto and model draft with a model"
        )


def check_files(method: Method) -> None:
    """Refuse a method for its stores and its correction table, before a model is looked for.

    Raises:
        SpecdsError: whatever a store or a table is refused with.
    """
    for path in method.paths:
        open_store(path)
    if table := method.verifier_options.get("table"):
        read_table(Path(table))


@dataclass(slots=True)
class Library:
    """Stores and their indexes, opened once for several methods of one model."""

    model: LanguageModel
    _opened: dict[tuple[tuple[str, ...], tuple[Path, ...]], tuple[Resources, tuple[Store, ...]]] = field(
        default_factory=dict
    )

    def indexes(self, kind: type[Drafter], method: Method) -> tuple[Resources, tuple[Store, ...]]:
        """The indexes that a drafter reads, and stores whose dense index is another model's, which it does without.

        Raises:
            whatever a store is refused with; MissingIndex, ForeignModel, CorruptStore of an index.
        """
        if not kind.indexes:
            return NO_RESOURCES, ()
        key = kind.indexes, method.paths
        if key not in self._opened:
            tokenizer = self.model.tokenizer
            stores = [store if isinstance(store, Store) else open_store(store, tokenizer) for store in method.stores]
            self._opened[key] = _indexes(kind.indexes, stores, self.model)
        return self._opened[key]


def _indexes(kinds: tuple[str, ...], stores: list[Store], model: LanguageModel) -> tuple[Resources, tuple[Store, ...]]:
    suffix: list[SuffixIndex] = []
    dense: list[DenseIndex] = []
    unused: list[Store] = []
    for store in stores:
        if "suffix" in kinds and (len(kinds) == 1 or store.manifest.suffix or not store.manifest.dense):
            index = store.suffix_index()
            index.warm_up()
            suffix.append(index)
        if "dense" in kinds and (len(kinds) == 1 or _serves(store, model)):
            dense.append(store.dense_index(model.fingerprint))
        elif "dense" in kinds and store.manifest.dense:
            unused.append(store)
    return Resources(tuple(suffix), tuple(dense)), tuple(unused)


def _serves(store: Store, model: LanguageModel) -> bool:
    """Whether a store's dense index is of the model's own states, or is all that the store has."""
    segments = store.manifest.dense
    own = all(segment.model is not None and segment.model.fingerprint == model.fingerprint for segment in segments)
    return bool(segments) and (own or not store.manifest.suffix)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A method's drafter with its options and indexes.

    Attributes:
        method, model: which, and for whom.
        drafter: its class.
        options: parsed.
        resources: its indexes.
        unused: stores whose dense index is another model's, which it does without.
        needs: what it asks of the target.
        captures: what a target must be made to hand over for it.
    """

    method: Method
    model: LanguageModel
    drafter: type[Drafter]
    options: Any
    resources: Resources
    unused: tuple[Store, ...]
    needs: frozenset[Signal]
    captures: Captures

    def assemble(self, curve: Prices | None = None) -> Assembly:
        """What the requests of one engine are made of.

        Args:
            curve: what passes cost; needed where the method's budget is not fixed.
        """
        if self.method.budget is not None or not self.drafter.drafts:
            curve = None
        fingerprint = self.model.fingerprint
        shared = self.drafter.cross_request(self.options, curve, self.method.paths, fingerprint)
        return Assembly(self, replace(self.resources, shared=shared), curve)


def prepare(method: Method, model: LanguageModel, library: Library | None = None) -> Prepared:
    """Open what a method's drafter looks things up in.

    Raises:
        UsageError: what `check_method` refuses.
        and what opening a store or an index raises.
    """
    check_method(method)
    kind = drafter_class(method.drafter)
    options = parse_options(kind.Options, method.options, f"drafter {method.drafter}")
    resources, unused = (library or Library(model)).indexes(kind, method)
    drafter = kind(options, resources)
    return Prepared(method, model, kind, options, resources, unused, drafter.needs, captures_of(drafter, model))


@dataclass(frozen=True, slots=True)
class Assembly:
    """What the requests of one engine are made of, but for the target, the verifier and the text.

    Attributes:
        prepared: the drafter's class, options and indexes.
        resources: those, and what requests share.
        budget: cuts the drafts of all requests to size.
    """

    prepared: Prepared
    resources: Resources
    curve: Prices | None
    budget: Budget = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "budget", self._make_budget())

    def _make_budget(self) -> Budget:
        nodes = self.prepared.method.budget
        if nodes is not None or self.curve is None:
            return Fixed(nodes or 0)
        shared = self.resources.shared
        return Adaptive(self.curve) if shared is None else Adaptive(self.curve, shared.terms, shared.most)

    def make_drafter(self, draft_model: DraftDecoder | None = None) -> Drafter:
        """A drafter for one request, with a draft model for it."""
        resources = self.resources if draft_model is None else replace(self.resources, draft_model=draft_model)
        return self.prepared.drafter(self.prepared.options, resources)

    def warm_up(self) -> None:
        """Let a drafter and a budget of the same kind run on a made-up answer; see `warm_up`.

        A draft model, which would run, takes no part in it.

        Raises:
            CorruptStore: what the drafter looks things up in turns out to be broken.
        """
        if not self.prepared.drafter.drafts or self.prepared.drafter.draft_model is Use.ALWAYS:
            return
        shared = self.resources.shared
        own = replace(self.resources, shared=None if shared is None else shared.fresh())
        fresh = Assembly(self.prepared, own, None if self.curve is None else self.curve.measured)
        with self.naming_stores():
            warm_up(fresh.make_drafter(), fresh.budget, self.prepared.model)

    @contextlib.contextmanager
    def naming_stores(self) -> Iterator[None]:
        """Say which stores are meant where one turns out to be broken."""
        try:
            yield
        except CorruptStore as error:
            paths = ", ".join(map(str, self.prepared.method.paths))
            raise CorruptStore(f"{paths}: {error.message}", error.hint) from error


def captures_of(drafter: Drafter, model: LanguageModel) -> Captures:
    """What a target must be made to hand over for a drafter."""
    layer = 0
    if Signal.LAYER in drafter.needs:
        layers = int(model.config.num_hidden_layers)
        layer = max(1, round(drafter.layer * layers)) if drafter.layer < 1 else int(drafter.layer)
    return Captures(Signal.HIDDEN in drafter.needs, layer, Signal.CONTEXT_TOPK in drafter.needs)
