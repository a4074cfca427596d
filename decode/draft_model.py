"""Draft models: another network, or the target itself with layers left out (the layer-skipping self-draft of SWIFT)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from specds.decode.contracts import Item, Slot, Target
from specds.decode.draft import common_prefix
from specds.decode.targets import make_target
from specds.errors import ModelError, UsageError
from specds.model import LanguageModel, load_model
from specds.sampling import Noise, Sampling, numbers, pick, warp

SKIP = "skip:"
SKIP_HALF = "skip:half"


class DraftModel(Protocol):
    """A draft model over one request's text."""

    def logits(self, text: Sequence[int], ahead: int) -> torch.Tensor:
        """float[vocabulary] of what follows a text, valid until the next call.

        Args:
            text: prompt, committed and drafted tokens.
            ahead: how many of them were drafted since the last commit; grows by one from call to call.
        """

    def close(self) -> None:
        """The request is done."""


class Separate:
    """A model with a cache of its own; what it drafted and the target took is not computed again.

    Args:
        length: of the longest text.
    """

    def __init__(self, target: Target, length: int) -> None:
        self._target, self._length = target, length
        self._slot: Slot | None = None

    def logits(self, text: Sequence[int], ahead: int) -> torch.Tensor:
        """See `DraftModel.logits`."""
        slot = self._hold(text)
        while True:
            tokens = text[len(slot.tokens) : len(slot.tokens) + self._target.chunk]
            last = len(slot.tokens) + len(tokens) == len(text)
            result = self._target.forward([Item.chain(slot, tokens, int(last))])
            self._target.commit(slot, range(len(tokens)))
            if last:
                return result.logits[-1]

    def close(self) -> None:
        """See `DraftModel.close`."""
        if self._slot is not None:
            self._target.close(self._slot)
            self._slot = None

    def _hold(self, text: Sequence[int]) -> Slot:
        """A slot that holds nothing but what a text begins with."""
        if self._slot is not None and common_prefix(self._slot.tokens, text[:-1]) < len(self._slot.tokens):
            self.close()  # what is right of it is found again
        if self._slot is None:
            self._slot = self._target.open(text, self._length)
        if self._slot is None:
            raise ModelError(
                "the key-value cache of the draft model has no room for one more request",
                "a larger --kv-memory, or a smaller --parallel",
            )
        return self._slot


class Skipping:
    """The verifying target without some of its layers, over the same cache."""

    def __init__(self, target: Target, slot: Slot, skip: frozenset[int]) -> None:
        self._target, self._slot, self._skip = target, slot, skip

    def logits(self, text: Sequence[int], ahead: int) -> torch.Tensor:
        """See `DraftModel.logits`."""
        return self._target.layer_skip(self._slot, text[-1], ahead, self._skip)

    def close(self) -> None:
        """See `DraftModel.close`: nothing is held."""


def parse_skip(text: str, layers: int) -> frozenset[int]:
    """The layers of `skip:3,5-8`, 0 the first; of `skip:half` every second one.

    Raises:
        UsageError: something else, or the first or the last of the model's `layers`.
    """
    if text == SKIP_HALF:
        return frozenset(range(1, layers - 1, 2))
    found: set[int] = set()
    for word in text.removeprefix(SKIP).split(","):
        low, dash, high = word.partition("-")
        if not low.isascii() or not low.isdigit() or (dash and not (high.isascii() and high.isdigit())):
            raise UsageError(f"--draft-model is {text!r}", "skip:half, or layers such as skip:3,5-8; see choose-skip")
        found |= set(range(int(low), int(high or low) + 1))
    if not found or min(found) < 1 or max(found) > layers - 2:
        raise UsageError(
            f"--draft-model is {text!r}, and of {layers} layers 1 to {layers - 2} can be left out",
            "the first and the last are needed",
        )
    return frozenset(found)


def check_draft_model(draft: LanguageModel, target: LanguageModel) -> None:
    """Refuse a draft model of another tokenizer or vocabulary.

    Raises:
        UsageError: its tokens are not the target's.
    """
    if draft.tokenizer.fingerprint != target.tokenizer.fingerprint:
        raise UsageError(
            f"the draft model {draft.name} has {draft.tokenizer.vocab_size:,} tokens of its own tokenizer, "
            f"and {target.name} {target.tokenizer.vocab_size:,} of another",
            "take a draft model of the same family, or --draft-model skip:half",
        )
    if draft.config.vocab_size != target.config.vocab_size:
        raise UsageError(
            f"the draft model {draft.name} has a vocabulary of {draft.config.vocab_size:,}, "
            f"and {target.name} of {target.config.vocab_size:,}",
            "take a draft model of the same size of vocabulary, or --draft-model skip:half",
        )


def load_draft_model(name: LanguageModel | str | None, target: LanguageModel) -> LanguageModel | str | None:
    """A draft model by name, as the target is loaded; what begins with `skip:` names the target's own layers.

    Raises:
        UsageError: its tokens are not the target's.
        ModelError: there is none of that name.
    """
    if isinstance(name, str) and not name.startswith(SKIP):
        name = load_model(name, device=str(target.device), dtype=target.dtype)
    if isinstance(name, LanguageModel):
        check_draft_model(name, target)
    return name


def draft_models(
    drafting: LanguageModel | str | None, target: Target, model: LanguageModel, runtime: str, memory: int | None = None
) -> Callable[[Slot, int], DraftModel]:
    """What drafts for a request in a slot, whose text grows to so many tokens: a model over a cache of its own, or
    `target`, which runs `model`, without some layers.
    """
    if isinstance(drafting, LanguageModel):
        drafter = make_target(drafting, runtime, memory=memory)
        return lambda slot, length: Separate(drafter, length)
    skip = parse_skip(drafting or SKIP_HALF, int(model.config.num_hidden_layers))
    return lambda slot, length: Skipping(target, slot, skip)


@dataclass(slots=True)
class DraftDecoder:
    """A draft model, and how its tokens are picked.

    Attributes:
        model: what gives the logits.
        sampling: the target's.
        independent: draw from the model with noise of its own and say from what, as rejection sampling needs it;
            otherwise use the target's noise at each position, so that equal distributions give equal tokens.
        noise: of the request.
        end: how long the request's text can become; nothing is drafted that could not be committed.
    """

    model: DraftModel
    sampling: Sampling
    independent: bool
    noise: Noise
    end: int = 0

    def generate(
        self, text: list[int], count: int, least: float
    ) -> tuple[list[int], list[float], NDArray[np.float32] | None]:
        """Up to `count` tokens after a text, their scores, and what each was drawn from ([n, vocabulary], or None).

        Args:
            least: stop before a token when the likeliest has a smaller probability.
        """
        said: list[int] = []
        scores: list[float] = []
        drawn: list[NDArray[np.float32]] = []
        written = list(text)
        count = min(count, self.end - len(text) - 1)  # the target adds a token of its own
        while len(said) < count:
            logits = self.model.logits(written, len(said))
            # A score that depended on the token drawn would let trimming choose among draws, and shift the outputs.
            sure = _highest_probability(logits)
            if sure < least:
                break
            scores.append(sure)
            token, distribution = self._pick(logits, len(written))
            if distribution is not None:
                drawn.append(distribution)
            said.append(token)
            written.append(token)
        return said, scores, np.stack(drawn) if drawn else None

    def _pick(self, logits: torch.Tensor, position: int) -> tuple[int, NDArray[np.float32] | None]:
        if self.sampling.greedy or not self.independent:
            return pick(logits, self.sampling, self.noise, position), None
        kept, scaled = warp(logits, self.sampling)
        q = np.exp(scaled - scaled.max())
        q /= q.sum()
        row = np.zeros(logits.shape[-1], np.float32)
        row[kept] = q
        with np.errstate(divide="ignore"):
            token = int(kept[(np.log(q) + self.noise.gumbel(position, kept)).argmax()])
        return token, row


def _highest_probability(logits: torch.Tensor) -> float:
    row = numbers(logits)
    return float(1.0 / np.exp(row - row.max()).sum())


def drafting_noise(seed: int, prompt: Sequence[int], sample: int, independent: bool) -> Noise:
    """Noise for a draft model: the target's own, or one that is independent of it."""
    return Noise.of(seed, [*prompt, -1] if independent else prompt, sample)
