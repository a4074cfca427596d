"""The engine: a model and a method put together to answer prompts one after another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from specds.datastore.corrections import Pair
from specds.datastore.manifest import Identity
from specds.datastore.store import Store
from specds.decode.assembly import Assembly, drafter_class, prepare
from specds.decode.contracts import Drafter, Step, Target, Use, Verifier
from specds.decode.counters import Counters
from specds.decode.draft_model import SKIP_HALF, DraftDecoder, draft_model_of, drafting_noise, load_draft_model
from specds.decode.loop import decode
from specds.decode.method import Method
from specds.decode.pricing import measurement
from specds.decode.pricing.curve import Corrected
from specds.decode.targets import choose_runtime, make_target
from specds.decode.targets.counted import Counted
from specds.decode.verifiers import make_verifier
from specds.decode.verifiers.csd import Memory
from specds.errors import PromptError, UsageError
from specds.model import LanguageModel
from specds.reading.conversation import Conversation
from specds.reading.prompts import Prompt
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
    """Answers prompts with one model and one way of decoding.

    Attributes:
        model: the target.
        method: drafter, stores, budget and verifier; plain decoding by default.
        sampling: greedy by default.
        runtime: a name in the targets' registry, or `auto`: the fastest that can run the model.

    One request at a time: the key-value cache is the engine's. Beginning another ends the one before.

    Raises:
        UsageError: what `check_method` refuses, or a draft model of another tokenizer.
        MissingIndex, ForeignModel, CorruptStore: a store that the drafter cannot read.
        UnsupportedModel: a model that cannot verify a tree.
    """

    model: LanguageModel
    method: Method = field(default_factory=Method)
    sampling: Sampling = field(default_factory=Sampling)
    runtime: str = "auto"
    wrap: Callable[[Any], Drafter] | None = field(init=False, repr=False, default=None)
    """Put around each request's drafter, by who wants to watch it."""
    _verifier: Verifier = field(init=False, repr=False)
    _target: Target = field(init=False, repr=False)
    _draft_model: DraftDecoder | None = field(init=False, repr=False, default=None)
    _curve: Corrected | None = field(init=False, repr=False, default=None)
    _assembly: Assembly = field(init=False, repr=False)
    _request: object = field(init=False, repr=False, default=None)
    _runtime: str = field(init=False, repr=False, default="")

    def __post_init__(self) -> None:
        prepared = prepare(self.method, self.model)
        runtime = self._runtime = choose_runtime(self.model, self.runtime)
        drafting = load_draft_model(self.method.draft_model, self.model)
        self.method = replace(self.method, draft_model=drafting)
        self._verifier = make_verifier(self.method.verifier, self.sampling, self.method.verifier_options, self.pair)
        self._target = make_target(self.model, runtime, prepared.captures)
        use = prepared.drafter.draft_model
        if use is Use.ALWAYS or (use is Use.OPTIONAL and drafting is not None):
            network = draft_model_of(drafting, self._target, self.model, self.runtime)
            noise = Noise.of(self.sampling.seed, ())
            self._draft_model = DraftDecoder(network, self.sampling, self.independent, noise)
        if self.method.budget is None and prepared.drafter.drafts:
            self._curve = Corrected(measurement.known(self._target, self.model, runtime))
        self._assembly = prepared.assemble(self._curve, self._draft_model)
        self._assembly.warm_up()

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
        drafting = self.method.draft_model
        if isinstance(drafting, LanguageModel):
            return Identity(drafting.name, drafting.fingerprint)
        name = self.method.drafter
        if drafter_class(name).draft_model is Use.ALWAYS:
            name = drafting or SKIP_HALF
        return Identity(name, f"drafter {name}")

    def count_passes(self) -> Counted:
        """The engine's target, whose passes are counted from now on."""
        counted = self._target = Counted(self._target)
        return counted

    @property
    def memory(self) -> Memory | None:
        """What the verifier counts; None if it counts nothing."""
        return self._verifier.memory

    @property
    def chosen_runtime(self) -> str:
        """The runtime that the target runs on, where `runtime` may say `auto`."""
        return self._runtime

    @property
    def unused(self) -> tuple[Store, ...]:
        """Stores whose dense index is of another model, which the drafter does without."""
        return self._assembly.prepared.unused

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
        return self._verifier.independent

    @property
    def lossless(self) -> bool:
        """Whether texts are those of plain decoding."""
        return self._verifier.lossless

    def make_drafter(self) -> Drafter:
        """A drafter for one request."""
        drafter = self._assembly.make_drafter()
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
        if self._draft_model is not None:
            independent = self._draft_model.independent
            self._draft_model.noise = drafting_noise(self.sampling.seed, tokens, sample, independent)
            self._draft_model.end = len(tokens) + longest
        steps = decode(
            self._target,
            self.make_drafter(),
            self._verifier,
            tokens,
            max_new_tokens=longest,
            budget=self._assembly.budget,
            stop_tokens=self.model.stop_tokens,
        )
        return self._exclusive(steps)

    def _exclusive(self, steps: Iterator[Step]) -> Iterator[Step]:
        """The steps, as long as no other request takes the key-value cache."""
        request = self._request = object()
        with self._assembly.naming_stores():
            for step in steps:
                if self._curve is not None:
                    self._curve.observe(step)
                yield step
                if self._request is not request:
                    raise UsageError(
                        "another request was begun on this engine before this one was done",
                        "finish one before the next, or make an engine for each",
                    )

    def answer(self, prompt: Prompt, max_new_tokens: int) -> Answer:
        """Answer every turn of a prompt, each turn seeing the answers before it.

        Raises:
            PromptError: a turn that has no tokens, is too long, or that the chat template refuses.
        """
        conversation = Conversation(prompt)
        turns = []
        while not conversation.done:
            turns.append(self._turn(conversation.tokens(self.model.tokenizer), max_new_tokens))
            conversation.answered(turns[-1].text)
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
