"""Generation: the target's own answers to prompts, as an in-distribution corpus (DReSD §4.2.1)."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from specds.datastore.corpus import Document, add_documents, document_ids
from specds.datastore.manifest import Identity
from specds.datastore.segments import consolidate
from specds.datastore.store import Store, require_tokenizer
from specds.datastore.writer import Writer
from specds.decode.answering import Answer, Answered, Answering
from specds.decode.counters import Counters
from specds.decode.engine import Engine
from specds.errors import SpecdsError, UsageError
from specds.reading.conversation import Conversation
from specds.reading.prompts import BadRow, Prompt

_SHARD_DOCUMENTS = 4_096

Progress = Callable[[float, int, int], None]


@dataclass(frozen=True, slots=True)
class GenerationOptions:
    """How responses are generated.

    Attributes:
        samples: responses a prompt.
        max_new_tokens: most tokens of a response.
        max_prompt_tokens: of longer prompts the last so many tokens are kept (DReSD §4.2: 1,024).
        parallel: most responses written at once.
        save_every: responses after which the corpus is saved.
        source: what the documents are filed under.

    Raises:
        UsageError: a value out of range.
    """

    samples: int = 1
    max_new_tokens: int = 256
    max_prompt_tokens: int = 1_024
    parallel: int = 1
    save_every: int = 64
    source: str = "generated"

    def __post_init__(self) -> None:
        for name in ("samples", "max_new_tokens", "max_prompt_tokens", "parallel", "save_every"):
            if getattr(self, name) < 1:
                raise UsageError(f"--{name.replace('_', '-')} is {getattr(self, name)}", "at least 1")


@dataclass(frozen=True, slots=True)
class Failed:
    """A prompt that has no response, and why."""

    id: str
    error: SpecdsError


@dataclass(frozen=True, slots=True)
class GenerationReport:
    """What a run did.

    Attributes:
        documents, tokens: written now (tokens of responses).
        present: units of work that an earlier run had done.
        truncated: prompts cut to max_prompt_tokens.
        failed: rows that could not be used.
        counters: sums over the responses written now.
    """

    documents: int
    tokens: int
    present: int
    truncated: int
    failed: tuple[Failed, ...]
    counters: Counters


@dataclass(frozen=True, slots=True)
class _Unit:
    """One prompt, one sample: what is done or not done."""

    key: str
    prompt: Prompt
    sample: int


def generate(
    store: Store,
    engine: Engine,
    prompts: Iterable[Prompt | BadRow],
    options: GenerationOptions,
    progress: Progress = lambda done, total, tokens: None,
    *,
    strict: bool = False,
) -> GenerationReport:
    """Write the model's responses to prompts into a store's corpus.

    Each unit of work (prompt, sample, sampling, model) has a key; units whose key the store holds are skipped,
    so the same call after a crash goes on where it stopped. Documents are saved in the order of the prompts, whichever
    response ends first, so that an interrupted and resumed run leaves the corpus of an uninterrupted one: exactly where
    a text does not depend on what else is in a pass (the cpu runtime), else up to nearly equally likely tokens.

    Args:
        engine: of a lossless verifier; its sampling is that of the responses, whatever drafts.
        progress: called with (units done, units in all, response tokens written so far by this call), once a pass. Of
            responses that are under way a part counts as done: as much as they can have of their tokens.
        strict: stop at the first prompt that cannot be used; what was answered before it is kept.

    Raises:
        UsageError: an engine whose texts are not the model's own, or several samples at temperature 0.
        PromptError, ModelError: with `strict`, of the first prompt that cannot be used.
        ForeignTokenizer, StoreLocked, OutputError, CorruptStore: see their docstrings.
    """
    model, sampling = engine.model, engine.sampling
    if not engine.lossless or (engine.independent and not sampling.greedy):
        raise UsageError(
            f"verifier {engine.method.verifier} does not write the model's own text", "greedy, or sampling with a seed"
        )
    if options.samples > 1 and sampling.greedy:
        raise UsageError(
            "--samples-per-prompt needs sampling: greedy answers would all be the same", "add --temperature 0.7"
        )
    require_tokenizer(store, model.tokenizer)
    units, failed = _units(prompts, engine, options, strict=strict)
    with store.writer() as writer:
        done = document_ids(writer.store)
        missing = [unit for unit in units if f"{unit.key}.0" not in done]
        present = len(units) - len(missing)
        truncated = 0

        def encode(conversation: Conversation) -> list[int]:
            nonlocal truncated
            tokens = conversation.tokens(model.tokenizer)
            most = min(options.max_prompt_tokens, model.context_length - 1)
            truncated += len(tokens) > most
            # The end of a prompt says what is wanted, and where the answer starts.
            return tokens[-most:]

        answering = Answering(
            engine,
            (unit.prompt for unit in missing),
            options.max_new_tokens,
            encode=encode,
            sample=lambda number: missing[number].sample,
        )
        saved = _Saved(writer, engine, options)
        longest = options.max_new_tokens * max((len(unit.prompt.turns) for unit in missing), default=1)
        waiting: dict[int, Answered] = {}
        finished = following = seen = 0
        for request in engine.decode(answering, options.parallel):
            answering.observe(request)
            for ended in answering.finished():
                finished += 1
                waiting[ended.number] = ended
            while (answered := waiting.pop(following, None)) is not None:
                unit = missing[following]
                following += 1
                if answered.answer is not None:
                    saved.add(unit, answered.answer)
                    continue
                assert answered.error is not None
                if strict:
                    saved.write()
                    raise answered.error
                failed.append(Failed(unit.prompt.id, answered.error))
            if request.step is not None and request.step.forward_pass != seen:
                seen = request.step.forward_pass
                progress(present + finished + answering.under_way / longest, len(units), answering.tokens)
        saved.write()
        # Saving leaves many small files.
        identity = Identity(model.name, model.fingerprint)
        consolidate(writer, _SHARD_DOCUMENTS, lambda shard: shard.origin == "generated" and shard.model == identity)
    progress(len(units), len(units), saved.counters.tokens)
    return GenerationReport(saved.documents, saved.counters.tokens, present, truncated, tuple(failed), saved.counters)


@dataclass(slots=True)
class _Saved:
    """Documents on their way into a corpus, some at a time."""

    writer: Writer
    engine: Engine
    options: GenerationOptions
    documents: int = 0
    counters: Counters = field(default_factory=Counters)
    _waiting: list[Document] = field(default_factory=list)
    _units: int = 0

    def add(self, unit: _Unit, answer: Answer) -> None:
        for number, turn in enumerate(answer.turns):
            name, prompt, response = f"{unit.key}.{number}", turn.prompt, turn.tokens
            self._waiting.append(
                Document(name, self.options.source, np.array(prompt, np.int32), np.array(response, np.int32))
            )
        self.counters = self.counters + answer.counters
        self._units += 1
        if self._units >= self.options.save_every:
            self.write()

    def write(self) -> None:
        if self._waiting:
            model = self.engine.model
            sampling = dataclasses.asdict(self.engine.sampling) | {"max_new_tokens": self.options.max_new_tokens}
            identity = Identity(model.name, model.fingerprint)
            add_documents(self.writer, self._waiting, origin="generated", model=identity, sampling=sampling)
        self.documents += len(self._waiting)
        self._waiting, self._units = [], 0


def _units(
    prompts: Iterable[Prompt | BadRow], engine: Engine, options: GenerationOptions, *, strict: bool
) -> tuple[list[_Unit], list[Failed]]:
    """What is to be done, and the rows that are no prompts."""
    units: list[_Unit] = []
    failed: list[Failed] = []
    seen: Counter[str] = Counter()
    for prompt in prompts:
        if isinstance(prompt, BadRow):
            if strict:
                raise prompt.error
            failed.append(Failed(prompt.id, prompt.error))
            continue
        content = json.dumps(prompt.content, ensure_ascii=True)
        # A prompt that stands twice in the input is two more samples of it, not a duplicate of a key.
        for sample in range(seen[content], seen[content] + options.samples):
            units.append(_Unit(_key(content, sample, engine, options), prompt, sample))
        seen[content] += options.samples
    return units, failed


def _key(content: str, sample: int, engine: Engine, options: GenerationOptions) -> str:
    parts = [
        content,
        engine.model.fingerprint,
        engine.model.dtype,
        *map(str, dataclasses.astuple(engine.sampling)),
        str(options.max_new_tokens),
        str(options.max_prompt_tokens),
        options.source,
        str(sample),
    ]
    return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogatepass")).hexdigest()[:24]
