"""Generation: the target's own answers to prompts, as an in-distribution corpus (DReSD §4.2.1)."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import LogitsProcessor, StoppingCriteria

from specds.datastore.corpus import Document, add_documents, document_ids
from specds.datastore.manifest import Identity
from specds.datastore.segments import consolidate
from specds.datastore.store import Store, require_tokenizer
from specds.errors import PromptError, UsageError
from specds.model import LanguageModel
from specds.reading.conversation import Conversation
from specds.reading.prompts import BadRow, Prompt
from specds.reference import PLAIN, until_stop
from specds.sampling import Noise, Sampling, pick

_SHARD_DOCUMENTS = 4_096

Progress = Callable[[float, int, int], None]


@dataclass(frozen=True, slots=True)
class GenerationOptions:
    """How responses are generated.

    Attributes:
        sampling: greedy by default.
        samples: responses a prompt.
        max_new_tokens: most tokens of a response.
        max_prompt_tokens: of longer prompts the last so many tokens are kept (DReSD §4.2: 1,024).
        batch: prompts in one forward pass. The corpus is saved after each batch.
        source: what the documents are filed under.

    Raises:
        UsageError: a value out of range.
    """

    sampling: Sampling = dataclasses.field(default_factory=Sampling)
    samples: int = 1
    max_new_tokens: int = 256
    max_prompt_tokens: int = 1_024
    batch: int = 16
    source: str = "generated"

    def __post_init__(self) -> None:
        for name in ("samples", "max_new_tokens", "max_prompt_tokens", "batch"):
            if getattr(self, name) < 1:
                raise UsageError(f"--{name.replace('_', '-')} is {getattr(self, name)}", "at least 1")
        if self.samples > 1 and self.sampling.greedy:
            raise UsageError(
                "--samples-per-prompt needs sampling: greedy answers would all be the same", "add --temperature 0.7"
            )


@dataclass(frozen=True, slots=True)
class GenerationReport:
    """What a run did.

    Attributes:
        documents, tokens: written now (tokens of responses).
        present: units of work that an earlier run had done.
        truncated: prompts cut to max_prompt_tokens.
        failed: rows that could not be used.
    """

    documents: int
    tokens: int
    present: int
    truncated: int
    failed: tuple[BadRow, ...]


@dataclass(frozen=True, slots=True)
class _Unit:
    """One prompt, one sample: what is done or not done."""

    key: str
    prompt: Prompt
    sample: int


def generate(
    store: Store,
    model: LanguageModel,
    prompts: Iterable[Prompt | BadRow],
    options: GenerationOptions,
    progress: Progress = lambda done, total, tokens: None,
    *,
    strict: bool = False,
) -> GenerationReport:
    """Write the model's responses to prompts into a store's corpus.

    Each unit of work (prompt, sample, sampling, model) has a key; units whose key the store holds are skipped,
    so the same call after a crash goes on where it stopped. Batches are cut from the whole list of units, done or
    not, so that an interrupted and resumed run computes the very batches of an uninterrupted one.

    Args:
        progress: called with (units done, units in all, response tokens written so far by this call). Of a batch that
            is under way, a part counts as done: as much as the longest response can have of its tokens.
        strict: stop at the first prompt that cannot be used; what was answered before its batch is kept.

    Raises:
        PromptError: with `strict`, of the first prompt that cannot be used.
        ForeignTokenizer, StoreLocked, OutputError, CorruptStore: see their docstrings.
    """
    require_tokenizer(store, model.tokenizer)
    failed = []
    units: list[_Unit] = []
    seen: Counter[str] = Counter()
    for prompt in prompts:
        if isinstance(prompt, BadRow):
            if strict:
                raise prompt.error
            failed.append(prompt)
            continue
        content = json.dumps(prompt.content, ensure_ascii=True)
        # A prompt that stands twice in the input is two more samples of it, not a duplicate of a key.
        for sample in range(seen[content], seen[content] + options.samples):
            units.append(_Unit(_key(content, sample, model, options), prompt, sample))
        seen[content] += options.samples

    identity = Identity(model.name, model.fingerprint)
    sampling = dataclasses.asdict(options.sampling) | {"max_new_tokens": options.max_new_tokens}
    documents = tokens = present = truncated = finished = 0
    with store.writer() as writer:
        done = document_ids(writer.store)
        for start in range(0, len(units), options.batch):
            batch = units[start : start + options.batch]
            missing = [unit for unit in batch if f"{unit.key}.0" not in done]
            present += len(batch) - len(missing)
            if missing:
                tick = functools.partial(_tick, progress, finished, len(batch), len(units), tokens)
                written, cut, refused = _Batch(model, options, tick).run(missing)
                if strict and refused:
                    raise refused[0].error
                if written:
                    add_documents(writer, written, origin="generated", model=identity, sampling=sampling)
                documents += len(written)
                tokens += sum(len(document.response) for document in written)
                truncated += cut
                failed += refused
            finished += len(batch)
            progress(finished, len(units), tokens)
        # Batches leave many small files.
        consolidate(writer, _SHARD_DOCUMENTS, lambda shard: shard.origin == "generated" and shard.model == identity)
    return GenerationReport(documents, tokens, present, truncated, tuple(failed))


def _key(content: str, sample: int, model: LanguageModel, options: GenerationOptions) -> str:
    parts = [
        content,
        model.fingerprint,
        model.dtype,
        *map(str, dataclasses.astuple(options.sampling)),
        str(options.max_new_tokens),
        str(options.max_prompt_tokens),
        options.source,
        str(sample),
    ]
    return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogatepass")).hexdigest()[:24]


def _tick(progress: Progress, done: int, batch: int, total: int, before: int, share: float, new: int) -> None:
    progress(done + batch * share, total, before + new)


class _Batch:
    """The conversations of one batch, answered turn by turn."""

    def __init__(
        self, model: LanguageModel, options: GenerationOptions, progress: Callable[[float, int], None]
    ) -> None:
        self._model = model
        self._options = options
        self._progress = progress
        self._truncated = 0
        # Shares of the batch that are done, and that the responses under way are; tokens of those that are done.
        self._done = self._part = 0.0
        self._tokens = 0

    def run(self, units: Sequence[_Unit]) -> tuple[list[Document], int, list[BadRow]]:
        """Documents in the order of units and turns; how many prompts were cut; units that failed."""
        written: dict[str, list[Document]] = {unit.key: [] for unit in units}
        failed: list[BadRow] = []
        alive = [(unit, Conversation(unit.prompt)) for unit in units]
        turns = max(len(unit.prompt.turns) for unit in units)
        for turn in range(turns):
            asked: list[tuple[_Unit, Conversation, list[int]]] = []
            for unit, conversation in alive:
                if conversation.done:
                    continue
                try:
                    asked.append((unit, conversation, self._encode(conversation)))
                except PromptError as error:
                    failed.append(BadRow(unit.prompt.id, error))
                    written.pop(unit.key)
            alive = [(unit, conversation) for unit, conversation, _ in asked]
            if not asked:
                break
            self._done, self._part = turn / turns, 1 / turns / len(asked)
            samples = [unit.sample for unit, _ in alive]
            responses = self._respond_within_context([tokens for *_, tokens in asked], samples)
            for (unit, conversation, prompt), response in zip(asked, responses, strict=True):
                written[unit.key].append(
                    Document(
                        f"{unit.key}.{turn}",
                        self._options.source,
                        np.array(prompt, np.int32),
                        np.array(response, np.int32),
                    )
                )
                conversation.answered(self._model.tokenizer.decode(response))
        return [document for documents in written.values() for document in documents], self._truncated, failed

    def _encode(self, conversation: Conversation) -> list[int]:
        tokens = conversation.tokens(self._model.tokenizer)
        if not tokens:
            raise PromptError("the prompt has no tokens", "give it some text")
        most = min(self._options.max_prompt_tokens, self._model.context_length - 1)
        if len(tokens) > most:
            self._truncated += 1
        # The end of a prompt says what is wanted, and where the answer starts.
        return tokens[-most:]

    def _respond_within_context(self, prompts: list[list[int]], samples: list[int]) -> list[list[int]]:
        """Prompts that leave less room than max_new_tokens are answered alone: in a batch they would cut the others."""
        room = self._model.context_length - self._options.max_new_tokens
        together = [row for row, tokens in enumerate(prompts) if len(tokens) <= room]
        groups = [*([together] if together else []), *([row] for row in range(len(prompts)) if row not in together)]
        responses: dict[int, list[int]] = {}
        for group in groups:
            answers = self._respond([prompts[row] for row in group], [samples[row] for row in group])
            self._done += len(group) * self._part
            self._tokens += sum(map(len, answers))
            responses |= dict(zip(group, answers, strict=True))
        return [responses[row] for row in range(len(prompts))]

    @torch.inference_mode()
    def _respond(self, prompts: list[list[int]], samples: list[int]) -> list[list[int]]:
        model, options = self._model, self._options
        longest = max(map(len, prompts))
        stops = sorted(model.stop_tokens)
        pad = stops[0] if stops else 0
        padded = torch.full((len(prompts), longest), pad, dtype=torch.long)
        mask = torch.zeros_like(padded)
        for row, tokens in enumerate(prompts):
            padded[row, longest - len(tokens) :] = torch.tensor(tokens)
            mask[row, longest - len(tokens) :] = 1
        processors = []
        if not options.sampling.greedy:
            processors.append(_PositionKeyed(options.sampling, prompts, samples))

        def tick(rows: int, generated: int) -> None:
            share = self._done + rows * self._part * generated / options.max_new_tokens
            self._progress(share, self._tokens + rows * generated)

        output = model.network.generate(
            input_ids=padded.to(model.device),
            attention_mask=mask.to(model.device),
            max_new_tokens=min(options.max_new_tokens, model.context_length - longest),
            eos_token_id=stops or None,
            pad_token_id=pad,
            logits_processor=processors,
            stopping_criteria=[_Ticker(longest, tick)],
            **PLAIN,
        )
        return [until_stop(row, model.stop_tokens) for row in output[:, longest:].tolist()]


class _PositionKeyed(LogitsProcessor):  # type: ignore[misc]
    """Makes greedy search take the token that `specds decode` would draw with the same seed."""

    def __init__(self, sampling: Sampling, prompts: list[list[int]], samples: list[int]) -> None:
        self._sampling = sampling
        self._lengths = [len(prompt) for prompt in prompts]
        self._noises = [
            Noise.of(sampling.seed, prompt, sample) for prompt, sample in zip(prompts, samples, strict=True)
        ]
        self._padded = max(self._lengths)

    def __call__(self, input_ids: Any, scores: torch.Tensor) -> torch.Tensor:
        generated = input_ids.shape[1] - self._padded
        chosen = torch.full_like(scores, -torch.inf)
        for row, (length, noise) in enumerate(zip(self._lengths, self._noises, strict=True)):
            chosen[row, pick(scores[row], self._sampling, noise, length + generated)] = 0.0
        return chosen


class _Ticker(StoppingCriteria):  # type: ignore[misc]
    """Stops nothing; tells how many rows there are, and how many tokens of each."""

    def __init__(self, start: int, progress: Callable[[int, int], None]) -> None:
        self._start = start
        self._progress = progress

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        self._progress(input_ids.shape[0], input_ids.shape[1] - self._start)
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)
