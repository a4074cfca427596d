"""The engine: a model and a method put together to answer prompts, many at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from specds.datastore.corrections import Pair
from specds.datastore.manifest import Identity
from specds.datastore.store import Store
from specds.decode.answering import Answer, Answered, Answering
from specds.decode.assembly import Assembly, drafter_class, prepare
from specds.decode.contracts import Drafter, Slot, Step, Target, Use, Verifier
from specds.decode.draft_model import (
    SKIP_HALF,
    DraftDecoder,
    DraftModel,
    draft_models,
    drafting_noise,
    load_draft_model,
)
from specds.decode.loop import decode
from specds.decode.method import Method
from specds.decode.pricing import measurement
from specds.decode.pricing.curve import Corrected, Load, pass_costs
from specds.decode.pricing.parallel import choose_parallel
from specds.decode.request import Listed, Request, Source
from specds.decode.targets import choose_runtime, make_target
from specds.decode.targets.counted import Counted
from specds.decode.verifiers import make_verifier
from specds.decode.verifiers.csd import Memory
from specds.errors import PromptError, UsageError
from specds.model import LanguageModel
from specds.reading.prompts import BadRow, Prompt
from specds.sampling import Noise, Sampling


@dataclass(slots=True)
class Engine:
    """Answers prompts with one model and one way of decoding.

    Attributes:
        model: the target.
        method: drafter, stores, budget and verifier; plain decoding by default.
        sampling: greedy by default.
        runtime: a name in the targets' registry, or `auto`: the fastest that can run the model.
        kv_memory: bytes of the key-value cache, at most; None: half of what is free. Requests wait for room.

    Raises:
        UsageError: what `check_method` refuses, or a draft model of another tokenizer.
        MissingIndex, ForeignModel, CorruptStore: a store that the drafter cannot read.
        UnsupportedModel: a model that cannot verify a tree.
    """

    model: LanguageModel
    method: Method = field(default_factory=Method)
    sampling: Sampling = field(default_factory=Sampling)
    runtime: str = "auto"
    kv_memory: int | None = None
    wrap: Callable[[Any], Drafter] | None = field(init=False, repr=False, default=None)
    """Put around each request's drafter, by who wants to watch it."""
    _verifier: Verifier = field(init=False, repr=False)
    _target: Target = field(init=False, repr=False)
    _draft_models: Callable[[Slot, int], DraftModel] | None = field(init=False, repr=False, default=None)
    _curve: Corrected | None = field(init=False, repr=False, default=None)
    _assembly: Assembly = field(init=False, repr=False)
    _runtime: str = field(init=False, repr=False, default="")

    def __post_init__(self) -> None:
        prepared = prepare(self.method, self.model)
        runtime = self._runtime = choose_runtime(self.model, self.runtime)
        drafting = load_draft_model(self.method.draft_model, self.model)
        self.method = replace(self.method, draft_model=drafting)
        self._verifier = make_verifier(self.method.verifier, self.sampling, self.method.verifier_options, self.pair)
        self._target = make_target(self.model, runtime, prepared.captures, memory=self.kv_memory)
        use = prepared.drafter.draft_model
        if use is Use.ALWAYS or (use is Use.OPTIONAL and drafting is not None):
            self._draft_models = draft_models(drafting, self._target, self.model, self.runtime, self.kv_memory)
        if self.method.budget is None and prepared.drafter.drafts:
            self._curve = Corrected(measurement.known(self._target, self.model, runtime))
        self._assembly = prepared.assemble(self._curve)
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

    def plain_seconds(self, requests: int, context: int) -> float | None:
        """What a token takes without drafts, as one of so many requests at once; None without a cost curve.

        Args:
            context: tokens behind which each writes, about.
        """
        if self._curve is None:
            return None
        return float(pass_costs(self._curve, Load([context] * requests, 0), 0)[1]) / requests

    @property
    def independent(self) -> bool:
        """Whether the verifier draws on its own, so that above temperature 0 texts are not those of plain sampling."""
        return self._verifier.independent

    @property
    def lossless(self) -> bool:
        """Whether texts are those of plain decoding."""
        return self._verifier.lossless

    def parallel(self, context: int) -> int:
        """The number of requests at once that makes most tokens per second, as far as there is room for them.

        Args:
            context: tokens behind which each writes, about; in the end there are twice as many.
        """
        curve = self._curve.measured if self._curve is not None else None
        curve = curve or measurement.known(self._target, self.model, self._runtime)
        return choose_parallel(curve, context, self._target.capacity // (2 * context + 1))

    def request(self, tokens: Sequence[int], max_new_tokens: int, *, sample: int = 0) -> Request:
        """A prompt's token ids, made ready for the decoding loop.

        Args:
            sample: which of several samples of one prompt this is; each has noise of its own.

        Raises:
            PromptError: no tokens, or as many as the model's context holds or more.
        """
        self._check_prompt(tokens)
        longest = min(max_new_tokens, self.model.context_length - len(tokens))
        request = Request(
            tokens, longest, self._drafter, Noise.of(self.sampling.seed, tokens, sample), self.model.stop_tokens
        )
        if self._draft_models is not None:
            models, independent = self._draft_models, self.independent
            noise = drafting_noise(self.sampling.seed, tokens, sample, independent)

            def begin(slot: Slot) -> Drafter:
                end = len(tokens) + longest
                decoder = DraftDecoder(models(slot, end), self.sampling, independent, noise, end)
                request.end = decoder.model.close
                return self._drafter(slot, decoder)

            request.drafter = begin
        return request

    def _drafter(self, slot: Slot, draft_model: DraftDecoder | None = None) -> Drafter:
        drafter = self._assembly.make_drafter(draft_model)
        return drafter if self.wrap is None else self.wrap(drafter)

    def steps(self, tokens: Sequence[int], max_new_tokens: int, *, sample: int = 0) -> Iterator[Step]:
        """Generate from token ids, a step at a time; arguments and errors are those of `request`."""
        return self._steps(self.request(tokens, max_new_tokens, sample=sample))

    def _steps(self, request: Request) -> Iterator[Step]:
        for _ in self.decode(Listed([request])):
            if request.error is not None:
                raise request.error
            assert request.step is not None
            yield request.step

    def decode(self, requests: Source, parallel: int = 1) -> Iterator[Request]:
        """The decoding loop over this engine's requests; see `loop.decode`.

        Raises:
            UsageError: `parallel` is below 1.
        """
        if parallel < 1:
            raise UsageError(f"{parallel} requests at once are asked for", "at least 1")
        with self._assembly.naming_stores():
            yield from decode(self._target, requests, self._verifier, self._assembly.budget, parallel=parallel)

    def answers(
        self,
        prompts: Iterable[Prompt | BadRow],
        max_new_tokens: int,
        *,
        parallel: int = 1,
        ordered: bool = True,
    ) -> Iterator[Answered]:
        """Answer prompts, some at once; every turn of a prompt sees the answers before it.

        Args:
            prompts: taken as there is room for them; an `Ahead` is never waited for while there is something to do.
            parallel: most requests at once.
            ordered: in the prompts' order, else as they end.
        """
        answering = Answering(self, prompts, max_new_tokens)
        waiting: dict[int, Answered] = {}
        following = 0
        for _ in chain(map(answering.observe, self.decode(answering, parallel)), (None,)):
            for answered in answering.finished():
                if not ordered:
                    yield answered
                    continue
                waiting[answered.number] = answered
                while following in waiting:
                    yield waiting.pop(following)
                    following += 1

    def answer(self, prompt: Prompt, max_new_tokens: int) -> Answer:
        """Answer every turn of a prompt, each turn seeing the answers before it.

        Raises:
            PromptError: a turn that has no tokens, is too long, or that the chat template refuses.
            ModelError: the model's logits are not numbers.
        """
        (answered,) = self.answers([prompt], max_new_tokens)
        if answered.error is not None:
            raise answered.error
        assert answered.answer is not None
        return answered.answer

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
