"""Warm-up: a drafter's first steps, before any is timed."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from specds.decode.contracts import TOP, Activations, Drafter
from specds.decode.loop import decode_one
from specds.decode.pricing.budget import Budget
from specds.decode.targets.recorded import Reading, RecordedTarget
from specds.decode.verifiers.recorded import Recorded
from specds.model import LanguageModel

_CIRCLE, _ROUNDS = 7, 6
_STEPS = 32


def warm_up(drafter: Drafter, budget: Budget, model: LanguageModel) -> None:
    """Let a drafter and a budget run on a made-up answer, so that whatever they call is compiled and loaded.

    Otherwise the first answer's steps would, and a budget that weighs what drafting takes would find it too expensive.
    No model runs. What drafter and budget have learned is of no use afterwards.

    Raises:
        CorruptStore: what the drafter looks things up in turns out to be broken.
    """
    vocabulary, width = int(model.config.vocab_size), int(model.config.hidden_size)
    # A text that goes round in a circle, so that there is something to find in it; later on drafts are wrong.
    prompt = [number % vocabulary for number in range(_CIRCLE)] * _ROUNDS
    around = [prompt[place % _CIRCLE] for place in range(_STEPS // 2)]
    text = [*prompt, *around, *((place * place) % vocabulary for place in range(_STEPS - len(around)))]
    random = np.random.default_rng(0)
    logits = torch.zeros((_STEPS, vocabulary), device=model.device)
    logits[range(_STEPS), text[len(prompt) :]] = 9.0

    def states(count: int) -> NDArray[np.float32]:
        return random.standard_normal((count, width), np.float32)

    reading = Reading(
        logits,
        torch.from_numpy(states(_STEPS)).to(model.device),
        Activations(states(len(text)), random.integers(0, vocabulary, (len(text), TOP)).astype(np.int32)),
        lambda tokens: states(len(tokens)),
    )
    target = RecordedTarget(text, len(prompt), reading)
    for _ in decode_one(target, drafter, Recorded(text), prompt, max_new_tokens=_STEPS, budget=budget):
        pass
