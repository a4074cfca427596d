"""The engine: a model, a drafter and a verifier put together to answer prompts one after another."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specds.datastore.corrections import Pair
from specds.datastore.manifest import Identity
from specds.datastore.prompts import Message, Prompt
from specds.datastore.store import Store
from specds.decode import cost
from specds.decode.acceptance import Acceptance, choose_acceptance
from specds.decode.budget import Auto, Budget, Fixed
from specds.decode.contracts import Drafter, Signal, Step, Taps, Target, Verifier
from specds.decode.cost import Corrected, Prices
from specds.decode.counters import Counters
from specds.decode.draft_model import (
    SKIP_HALF,
    DraftModel,
    Separate,
    Skipping,
    Speaker,
    check_draft_model,
    drafting_noise,
    parse_skip,
)
from specds.decode.drafters import DRAFTERS, EITHER
from specds.decode.loop import decode
from specds.decode.registry import load, parse_options
from specds.decode.rehearsal import rehearse
from specds.decode.stream import Stream
from specds.decode.targets import choose_runtime, make_target
from specds.decode.targets.counted import Counted
from specds.decode.verifiers import make_verifier
from specds.decode.verifiers.csd import Memory
from specds.errors import CorruptStore, PromptError, UsageError
from specds.model import LanguageModel
from specds.sampling import Noise, Sampling


@dataclass(frozen=True, slots=True)
class Turn:
    """The model's answer to one turn of a conversation.

    Attributes:
        text: without special tokens.
        tokens: every committed token id, a stop token included.
        finish_reason: `stop` (a stop token), `length` (max_new_tokens) or `context` (the model's context is full).
        prompt: the token ids that were answered, template and history included.
        steps: the trace.
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: str
    prompt: tuple[int, ...]
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """The model's answers to all turns of one prompt."""

    id: str
    turns: tuple[Turn, ...]

    @property
    def text(self) -> str:
        """The last turn's text."""
        return self.turns[-1].text

    @property
    def counters(self) -> Counters:
        """What the steps of all turns add up to."""
        return Counters.of(step for turn in self.turns for step in turn.steps)


@dataclass(slots=True)
class Engine:
    """Answers prompts with one model and one way of drafting.

    Attributes:
        model: the target.
        drafter: a name in the drafters' registry.
        drafter_options: that drafter's options, as text.
        stores: where a retrieving drafter looks; each needs the index that the drafter reads.
        verifier: `auto`, or a name in the verifiers' registry.
        sampling: greedy by default.
        budget: the most draft nodes a step; None: as many as pay for themselves on this machine, by the cost curve
            that `specds profile` left, or by one measured now in a second or two, and by what passes take.
        runtime: a name in the targets' registry, or `auto`: the fastest that can run the model.
        verifier_options: that verifier's options, as text.
        draft_model: what drafter `model` drafts with: a model of the target's tokenizer, `skip:…` for the target
            without some layers, or None for the target without every second one.

    One request at a time: the key-value cache is the engine's. Beginning another ends the one before.

    Raises:
        UsageError: an unknown name or option, a budget below 0, a drafter without the store it needs.
        MissingIndex, ForeignModel, CorruptStore: a store that the drafter cannot read.
        UnsupportedModel: a model that cannot verify a tree.
    """

    model: LanguageModel
    drafter: str = "none"
    drafter_options: Mapping[str, str] = field(default_factory=dict)
    stores: Sequence[Store] = ()
    verifier: str = "auto"
    sampling: Sampling = field(default_factory=Sampling)
    budget: int | None = None
    runtime: str = "auto"
    verifier_options: Mapping[str, str] = field(default_factory=dict)
    draft_model: LanguageModel | str | None = None
    wrap: Callable[[Any], Drafter] | None = field(init=False, repr=False, default=None)
    """Put around each request's drafter, by who wants to watch it."""
    _class: Any = field(init=False, repr=False)
    _options: Any = field(init=False, repr=False)
    _indexes: list[Any] = field(init=False, repr=False)
    _verifier: Verifier = field(init=False, repr=False)
    _budget: Budget = field(init=False, repr=False)
    _target: Target = field(init=False, repr=False)
    _drafting: DraftModel | None = field(init=False, repr=False, default=None)
    _curve: Corrected | None = field(init=False, repr=False, default=None)
    _stream: Stream | None = field(init=False, repr=False, default=None)
    _acceptance: Acceptance | None = field(init=False, repr=False, default=None)
    _request: object = field(init=False, repr=False, default=None)
    _runtime: str = field(init=False, repr=False, default="")

    def __post_init__(self) -> None:
        if self.budget is not None and self.budget < 0:
            raise UsageError(f"--budget is {self.budget}", "0 (no drafts) or more")
        self._class = load(DRAFTERS, self.drafter, "drafter")
        self._options = parse_options(self._class.Options, self.drafter_options, f"drafter {self.drafter}")
        if self._class.store_required and not self.stores:
            raise UsageError(
                f"drafter {self.drafter} looks things up in a datastore, and none is given",
                f"add --store S, a store with a {self._class.index} index",
            )
        self._indexes = open_indexes(self._class.index, self.stores, self.model)
        self._verifier = make_verifier(self.verifier, self.sampling, self.verifier_options, self.pair)
        runtime = self._runtime = choose_runtime(self.model, self.runtime)
        self._acceptance = acceptance_for(self._class, self._options, [store.path for store in self.stores], self.model)
        self._target = make_target(self.model, runtime, taps_of(self.make_drafter(), self.model))
        if getattr(self._class, "takes_model", False):
            self._drafting = self._make_draft_model(runtime)
            self._indexes = [self._drafting]
        elif getattr(self._class, "may_take_model", False) and self.draft_model is not None:
            self._drafting = self._make_draft_model(runtime)
            self._indexes = [*self._indexes, self._drafting]
        if self.budget is None and self.drafter != "none":
            self._curve = Corrected(cost.known(self._target, self.model, runtime))
        self._budget, self._stream = self._make_budget()
        if self.drafter != "none" and not getattr(self._class, "takes_model", False):
            self._rehearse()

    def _rehearse(self) -> None:
        own = [index for index in self._indexes if index is not self._drafting]
        budget, stream = self._make_budget()
        drafter = new_drafter(self._class, self._options, own, stream, self._acceptance)
        with self._naming_stores():
            rehearse(drafter, budget, self.model)

    def _make_draft_model(self, runtime: str) -> DraftModel:
        speaker: Speaker
        if isinstance(self.draft_model, LanguageModel):
            check_draft_model(self.draft_model, self.model)
            speaker = Separate(make_target(self.draft_model, self.runtime))
        else:
            skip = parse_skip(self.draft_model or SKIP_HALF, int(self.model.config.num_hidden_layers))
            speaker = Skipping(self._target, skip)
        return DraftModel(speaker, self.sampling, self.independent, Noise.of(self.sampling.seed, ()))

    def _make_budget(self) -> tuple[Budget, Stream | None]:
        return new_budget(self.budget or 0, self._curve, self._acceptance)

    @property
    def pair(self) -> Pair:
        """Who drafts for whom, as correction tables name it."""
        tokenizer = self.model.tokenizer
        return Pair(
            Identity(self.model.name, self.model.fingerprint),
            self._draft_identity(),
            Identity(tokenizer.name, tokenizer.fingerprint),
            int(self.model.config.vocab_size),
        )

    def _draft_identity(self) -> Identity:
        if isinstance(self.draft_model, LanguageModel):
            return Identity(self.draft_model.name, self.draft_model.fingerprint)
        name = self.drafter
        if getattr(self._class, "takes_model", False):
            name = self.draft_model or SKIP_HALF
        return Identity(name, f"drafter {name}")

    def count_passes(self) -> Counted:
        """The engine's target, whose passes are counted from now on."""
        counted = self._target = Counted(self._target)
        return counted

    @property
    def memory(self) -> Memory | None:
        """What the verifier counts; None if it counts nothing."""
        return getattr(self._verifier, "memory", None)

    @property
    def chosen_runtime(self) -> str:
        """The runtime that the target runs on, where `runtime` may say `auto`."""
        return self._runtime

    @property
    def unused(self) -> list[Store]:
        """Stores whose dense index is of another model, which the drafter does without."""
        return [store for store in self.stores if self._class.index == EITHER and _foreign(store, self.model)]

    def plain_seconds(self, answer: Answer) -> float | None:
        """About what an answer would have taken without drafts, by the cost curve; None without a curve."""
        if self._curve is None:
            return None
        seconds = 0.0
        for turn in answer.turns:
            first, *later = turn.steps
            context = len(turn.prompt) + len(turn.tokens) // 2
            one = float(self._curve.at(context)[1])
            seconds += first.forward_seconds + first.verify_seconds + one * sum(len(step.tokens) for step in later)
        return seconds

    @property
    def independent(self) -> bool:
        """Whether the verifier draws on its own, so that above temperature 0 texts are not those of plain sampling."""
        return bool(getattr(self._verifier, "independent", False))

    @property
    def lossless(self) -> bool:
        """Whether texts are those of plain decoding."""
        return self._verifier.lossless

    def make_drafter(self) -> Drafter:
        """A drafter for one request."""
        drafter = new_drafter(self._class, self._options, self._indexes, self._stream, self._acceptance)
        return drafter if self.wrap is None else self.wrap(drafter)

    def steps(self, tokens: Sequence[int], max_new_tokens: int, *, sample: int = 0) -> Iterator[Step]:
        """Generate from token ids, a step at a time.

        Args:
            sample: which of several samples of one prompt this is; each has noise of its own.

        Raises:
            PromptError: no tokens, or as many as the model's context holds or more.
        """
        self._check_prompt(tokens)
        self._verifier.start(Noise.of(self.sampling.seed, tokens, sample))
        longest = min(max_new_tokens, self.model.context_length - len(tokens))
        if self._drafting is not None:
            self._drafting.noise = drafting_noise(self.sampling.seed, tokens, sample, self._drafting.independent)
            self._drafting.end = len(tokens) + longest
        steps = decode(
            self._target,
            self.make_drafter(),
            self._verifier,
            tokens,
            max_new_tokens=longest,
            budget=self._budget,
            stop_tokens=self.model.stop_tokens,
        )
        return self._exclusive(steps)

    def _exclusive(self, steps: Iterator[Step]) -> Iterator[Step]:
        """The steps, as long as no other request takes the key-value cache."""
        request = self._request = object()
        with self._naming_stores():
            for step in steps:
                if self._curve is not None:
                    self._curve.observe(step)
                yield step
                if self._request is not request:
                    raise UsageError(
                        "another request was begun on this engine before this one was done",
                        "finish one before the next, or make an engine for each",
                    )

    @contextlib.contextmanager
    def _naming_stores(self) -> Iterator[None]:
        """Say which stores are meant where one turns out to be broken."""
        try:
            yield
        except CorruptStore as error:
            paths = ", ".join(str(store.path) for store in self.stores)
            raise CorruptStore(f"{paths}: {error.message}", error.hint) from error

    def answer(self, prompt: Prompt, max_new_tokens: int) -> Answer:
        """Answer every turn of a prompt, each turn seeing the answers before it.

        Raises:
            PromptError: a turn that has no tokens, is too long, or that the chat template refuses.
        """
        history: list[Message] = []
        turns = []
        for messages in prompt.turns:
            history += messages
            tokenizer = self.model.tokenizer
            tokens = tokenizer.prompt(history[0]["content"]) if prompt.raw else tokenizer.chat(history)
            turns.append(self._turn(tokens, max_new_tokens))
            history.append({"role": "assistant", "content": turns[-1].text})
        return Answer(prompt.id, tuple(turns))

    def _turn(self, prompt: list[int], max_new_tokens: int) -> Turn:
        steps = tuple(self.steps(prompt, max_new_tokens))
        tokens = tuple(token for step in steps for token in step.tokens)
        if tokens[-1] in self.model.stop_tokens:
            reason = "stop"
        elif len(tokens) < max_new_tokens:
            reason = "context"
        else:
            reason = "length"
        return Turn(self.model.tokenizer.decode(tokens), tokens, reason, tuple(prompt), steps)

    def _check_prompt(self, tokens: Sequence[int]) -> None:
        if not tokens:
            raise PromptError("the prompt has no tokens", "give it some text")
        if min(tokens) < 0 or max(tokens) >= self.model.config.vocab_size:
            raise PromptError(
                f"the prompt has token ids from {min(tokens)} to {max(tokens)}, "
                f"and {self.model.name} knows {self.model.config.vocab_size}",
                "the tokenizer is not the model's",
            )
        if len(tokens) >= self.model.context_length:
            raise PromptError(
                f"the prompt has {len(tokens):,} tokens, and {self.model.name} holds {self.model.context_length:,} "
                "with the answer",
                "shorten it, or use a model with a longer context",
            )


def open_indexes(kind: str | None, stores: Sequence[Store], model: LanguageModel) -> list[Any]:
    """What a drafter looks things up in: of each store its index of a kind; of a drafter that asks for none, nothing.

    Raises:
        MissingIndex, ForeignModel, CorruptStore: a store that cannot be read so.
    """
    if kind == EITHER:
        return [index for store in stores for index in _all_indexes(store, model)]
    if kind == "dense":
        return [store.dense_index(model.fingerprint) for store in stores]
    indexes = [store.suffix_index() for store in stores] if kind == "suffix" else []
    for index in indexes:
        index.warm_up()
    return indexes


def _all_indexes(store: Store, model: LanguageModel) -> list[Any]:
    """A store's suffix index, and its dense index if it is of the model's own states; one of them at least."""
    found: list[Any] = []
    if store.manifest.suffix or not store.manifest.dense:
        index = store.suffix_index()
        index.warm_up()
        found.append(index)
    if store.manifest.dense and not (found and _foreign(store, model)):
        found.append(store.dense_index(model.fingerprint))
    return found


def _foreign(store: Store, model: LanguageModel) -> bool:
    """Whether a store's dense index, or a part of it, is of another model's states."""
    return any(one.model is None or one.model.fingerprint != model.fingerprint for one in store.manifest.dense)


def acceptance_for(found: Any, options: Any, stores: Sequence[Path], model: LanguageModel) -> Acceptance | None:
    """What a drafter that weighs its drafts itself goes by; None for any other.

    Args:
        found: the drafter's class.
        stores: their paths; a calibration lies beside a store.

    Raises:
        InputError: what is named, or lies there, is no calibration.
    """
    if not getattr(found, "weighs", False):
        return None
    return choose_acceptance(options.calibration, stores, model.fingerprint)


def new_budget(nodes: int, curve: Prices | None, acceptance: Acceptance | None) -> tuple[Budget, Stream | None]:
    """A budget, and for a drafter that weighs its drafts what its requests share.

    Args:
        nodes: the most, where there is no curve.
        curve: as much as pays for itself by it.
    """
    if acceptance is None:
        return (Fixed(nodes) if curve is None else Auto(curve)), None
    stream = Stream(curve)
    return Fixed(nodes if curve is None else stream.most), stream


def new_drafter(
    found: Any, options: Any, indexes: Sequence[Any], stream: Stream | None, acceptance: Acceptance | None
) -> Drafter:
    """A drafter for one request."""
    drafter: Drafter
    drafter = found(options, indexes) if acceptance is None else found(options, indexes, stream, acceptance)
    return drafter


def taps_of(drafter: Drafter, model: LanguageModel) -> Taps:
    """What a target must be made to hand over for a drafter."""
    layer = 0
    if Signal.LAYER in drafter.needs:
        layers = int(model.config.num_hidden_layers)
        asked: float = drafter.layer  # type: ignore[attr-defined]  # what asks for a layer says which
        layer = max(1, round(asked * layers)) if asked < 1 else int(asked)
    return Taps(Signal.HIDDEN in drafter.needs, layer, Signal.CONTEXT_TOPK in drafter.needs)
