"""A target that has answered already: its rows come from one pass over the whole text, or there are none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from specds.decode.contracts import Activations, Embed, Forward, Item, Signal, Slot, Target
from specds.decode.prompt import hold
from specds.errors import UsageError

PER_ANSWER = frozenset(
    {Signal.HIDDEN, Signal.TOPK, Signal.ENTROPY, Signal.LAYER, Signal.CONTEXT_TOPK, Signal.EMBEDDING}
)
"""Signals that depend on nothing but the text that is committed in the end; others also on what was drafted."""

_LOGITS = frozenset({Signal.TOPK, Signal.ENTROPY})


@dataclass(frozen=True, slots=True)
class Reading:
    """What a model says to a text that it is shown whole: m answer tokens behind a prompt of p.

    Attributes:
        logits: float[m, vocabulary], of what each answer token was picked from; None where nobody asks for them.
        hidden: float[m, d], the final-normed states of the same rows; None unless captured.
        kept: of prompt and answer, all but its last token.
        embed: the model's input embeddings.
    """

    logits: torch.Tensor | None
    hidden: torch.Tensor | None
    kept: Activations
    embed: Embed

    @property
    def size(self) -> int:
        """Bytes in memory."""
        tensors = sum(one.nbytes for one in (self.logits, self.hidden) if one is not None)
        return tensors + sum(one.nbytes for one in (self.kept.layer, self.kept.top) if one is not None)


def read(target: Target, prompt: Sequence[int], answer: Sequence[int], *, logits: bool) -> Reading:
    """Show an answer to its model: as if it were all prompt.

    On a runtime whose rows do not depend on what stands beside them, these are the rows that decoding sees, bit by bit.

    Args:
        target: made with the captures that are wanted.
        answer: at least one token.
        logits: whether to keep them: m times the vocabulary.
    """
    text = [*prompt, *answer[:-1]]
    slot = hold(target, prompt[:-1], len(text))
    rows: list[torch.Tensor] = []
    states: list[torch.Tensor] = []
    try:
        while len(slot.tokens) < len(text):
            start = len(slot.tokens)
            tokens = text[start : start + target.chunk]
            wanted = max(0, min(len(tokens), start + len(tokens) - len(prompt) + 1))
            forward = target.forward([Item.chain(slot, tokens, wanted)])
            # The target's next pass may write where these are.
            if logits and wanted:
                rows.append(forward.logits[-wanted:].detach().clone())
            if forward.hidden is not None and wanted:
                states.append(forward.hidden[-wanted:].detach().clone())
            target.commit(slot, range(len(tokens)))
        kept = target.activations(slot)
    finally:
        target.close(slot)
    return Reading(torch.cat(rows) if rows else None, torch.cat(states) if states else None, kept, target.embed)


@dataclass(slots=True)
class _Slot:
    """The tokens that are held of the one text."""

    tokens: list[int]


class RecordedTarget:
    """Gives a recorded answer's rows where a draft is right, and rows of zeros, which nobody looks at, where not.

    Meant for `verifiers.recorded.Recorded`. Without a reading there is nothing in its rows at all, and no model runs.

    Args:
        text: the prompt and the answer.
        prompt: how much of it is the prompt.
        reading: what the model says to it, if a drafter asks.
    """

    def __init__(self, text: Sequence[int], prompt: int, reading: Reading | None = None) -> None:
        self._text, self._prompt, self._reading = text, prompt, reading
        self.chunk, self.capacity = max(1, prompt), len(text)
        self._staged = np.empty(0, np.int32)

    def open(self, prompt: Sequence[int], length: int) -> Slot:
        """See `Target.open`; the prompt is the text's own."""
        return _Slot([])

    def close(self, slot: Slot, *, keep: bool = True) -> None:
        """See `Target.close`."""

    def forget(self) -> None:
        """See `Target.forget`."""

    def forward(self, items: Sequence[Item]) -> Forward:
        """See `Target.forward`, for one item. Rows that follow recorded text are the model's own."""
        item = items[0]
        held, count = len(item.slot.tokens), len(item.tokens)
        self._staged = item.tokens
        if held < self._prompt:
            return self._rows([0], [held + count - self._prompt], item.wanted)
        parents = np.arange(-1, count - 1) if item.parents is None else item.parents
        pairs = zip(parents.tolist(), item.tokens.tolist(), strict=True)
        children = {pair: row for row, pair in enumerate(pairs)}
        rows, places = [0], [held + 1 - self._prompt]  # of the answer, row 0 predicts this token
        while self._prompt + places[-1] < len(self._text):
            row = children.get((rows[-1], self._text[self._prompt + places[-1]]))
            if row is None:
                break
            rows.append(row)
            places.append(places[-1] + 1)
        return self._rows(rows, places, count)

    def commit(self, slot: Slot, rows: Sequence[int]) -> None:
        """See `Target.commit`."""
        assert isinstance(slot, _Slot)
        slot.tokens += self._staged[list(rows)].tolist()

    def activations(self, slot: Slot, start: int = 0) -> Activations:
        """See `Target.activations`."""
        if self._reading is None:
            return Activations()
        held = slice(start, len(slot.tokens))
        layer, top = self._reading.kept.layer, self._reading.kept.top
        return Activations(None if layer is None else layer[held], None if top is None else top[held])

    def embed(self, tokens: NDArray[np.integer]) -> NDArray[np.float32]:
        """See `Target.embed`."""
        assert self._reading is not None, "a drafter that asks for embeddings gets a reading"
        return self._reading.embed(tokens)

    def layer_skip(self, slot: Slot, token: int, ahead: int, skip: frozenset[int]) -> torch.Tensor:
        """A recorded answer drafts nothing.

        Raises:
            UsageError: always: there is no model here.
        """
        raise UsageError("a recorded answer is not a draft model", "measure drafter model with `specds decode`")

    def _rows(self, rows: list[int], places: list[int], count: int) -> Forward:
        ends = (0, count)
        if self._reading is None:
            return Forward(torch.empty(count, 0), None, ends)
        logits, hidden = self._reading.logits, self._reading.hidden
        known = len(self._text) - self._prompt
        chosen = [(row, place) for row, place in zip(rows, places, strict=True) if place < known]

        def fill(source: torch.Tensor | None) -> torch.Tensor | None:
            if source is None:
                return None
            # Zeros that are never written cost no memory.
            filled = torch.zeros((count, source.shape[1]), dtype=source.dtype, device=source.device)
            filled[[row for row, _ in chosen]] = source[[place for _, place in chosen]]
            return filled

        found = fill(logits)
        return Forward(torch.empty(count, 0) if found is None else found, fill(hidden), ends)
