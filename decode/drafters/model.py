"""A draft model: tokens that a smaller network, or the target without some of its layers, writes one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from specds.decode.contracts import NO_RESOURCES, Drafter, Resources, Step, Use
from specds.decode.draft import Draft, Origin, Source, chain, empty
from specds.decode.registry import option

_SOURCE = Source("model", retrieved=False)


class ModelDrafter(Drafter):
    """A chain of γ tokens from a draft model (Leviathan et al., 2023), with a cache of its own or the target's."""

    @dataclass(frozen=True, slots=True)
    class Options:
        """Options of the draft model."""

        gamma: int = option(6, "γ: tokens drafted a step (CSD, §5.1: 6)", least=1)
        least: float = option(0.0, "stop drafting where the likeliest token's probability is smaller", least=0)

    summary: ClassVar[str] = "what a draft model writes (--draft-model), or the target without some of its layers"
    source: ClassVar[str] = "Speculative decoding (Leviathan et al., 2023); SWIFT (Xia et al., 2024)"
    draft_model: ClassVar[Use] = Use.ALWAYS

    def __init__(self, options: Options, resources: Resources = NO_RESOURCES) -> None:
        self._options = options
        self._draft_model = resources.draft_model
        self._text: list[int] = []

    def start(self, prompt: Sequence[int]) -> None:
        """See `Drafter.start`."""
        self._text = list(prompt)

    def observe(self, step: Step) -> None:
        """See `Drafter.observe`."""
        self._text += step.tokens

    def propose(self, budget: int) -> Draft:
        """A chain; at a temperature with what its tokens were drawn from, where the verifier asks for it."""
        count = min(budget, self._options.gamma)
        if count < 1 or self._draft_model is None:
            return empty()
        tokens, scores, drawn = self._draft_model.generate(self._text, count, self._options.least)
        draft = chain(tokens, np.array(scores), Origin.of(_SOURCE, len(tokens)))
        return draft if drawn is None else Draft(draft.tokens, draft.parents, draft.score, drawn, draft.origin)
