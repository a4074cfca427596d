"""A target that has answered already: its rows come from one pass over the whole text, or there are none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from specds.decode.contracts import Activations, Embed, Forward, Signal, Target
from specds.decode.draft import Draft, chain
from specds.errors import UsageError

PER_ANSWER = frozenset(
    {Signal.HIDDEN, Signal.TOPK, Signal.ENTROPY, Signal.LAYER, Signal.CONTEXT_TOPK, Signal.EMBEDDING}
)
"""Signals that depend on nothing but the text that is committed in the end; others also on what was drafted."""

_LOGITS = frozenset({Signal.TOPK, Signal.ENTROPY})
# Rows of one pass over an answer.
_CHUNK = 64


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
    """Show an answer to its model: the prompt's pass, and then the answer's as drafts that are all accepted.

    On a runtime whose rows do not depend on what stands beside them, these are the rows that decoding sees, bit by bit.

    Args:
        target: made with the captures that are wanted.
        answer: at least one token.
        logits: whether to keep them: m times the vocabulary.
    """
    passes = [target.prefill(prompt)]
    rows: list[torch.Tensor] = []
    states: list[torch.Tensor] = []

    def keep(forward: Forward) -> None:
        # The target's next pass may write where these are.
        if logits:
            rows.append(forward.logits.detach().clone())
        if forward.hidden is not None:
            states.append(forward.hidden.detach().clone())

    keep(passes[0])
    for start in range(0, len(answer) - 1, _CHUNK):
        last, *more = answer[start : min(start + _CHUNK, len(answer) - 1)]
        keep(target.forward(last, chain(more, [1.0] * len(more))))
        target.commit(range(len(more)))
    kept = target.activations()
    return Reading(
        torch.cat(rows) if rows else None,
        torch.cat(states) if states else None,
        Activations(
            None if kept.layer is None else kept.layer.copy(),
            None if kept.top is None else kept.top.copy(),
        ),
        target.embed,
    )


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
        self._held = 0

    def prefill(self, tokens: Sequence[int]) -> Forward:
        """See `Target.prefill`; the tokens are the text's own prompt."""
        self._held = len(tokens)
        return self._rows([0], [len(tokens) - self._prompt], 1)

    def forward(self, last: int, draft: Draft) -> Forward:
        """See `Target.forward`. Rows that follow recorded text are the model's own."""
        follows = self._held + 1 - self._prompt  # of the answer, row 0 predicts this token
        rows, places = [0], [follows]
        children = draft.children()
        node = -1
        while self._prompt + places[-1] < len(self._text):
            found = children.get((node, self._text[self._prompt + places[-1]]))
            if found is None:
                break
            node = found
            rows.append(node + 1)
            places.append(places[-1] + 1)
        return self._rows(rows, places, len(draft) + 1)

    def commit(self, path: Sequence[int]) -> None:
        """See `Target.commit`."""
        self._held += 1 + len(path)

    def activations(self) -> Activations:
        """See `Target.activations`."""
        if self._reading is None:
            return Activations()
        layer, top = self._reading.kept.layer, self._reading.kept.top
        return Activations(None if layer is None else layer[: self._held], None if top is None else top[: self._held])

    def embed(self, tokens: NDArray[np.integer]) -> NDArray[np.float32]:
        """See `Target.embed`."""
        assert self._reading is not None, "a drafter that asks for embeddings gets a reading"
        return self._reading.embed(tokens)

    def layer_skip(self, token: int, ahead: int, skip: frozenset[int]) -> torch.Tensor:
        """A recorded answer drafts nothing.

        Raises:
            UsageError: always: there is no model here.
        """
        raise UsageError("a recorded answer is not a draft model", "measure drafter model with `specds decode`")

    def _rows(self, rows: list[int], places: list[int], count: int) -> Forward:
        if self._reading is None:
            return Forward(torch.empty(0))
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
        return Forward(torch.empty(0) if found is None else found, fill(hidden))
