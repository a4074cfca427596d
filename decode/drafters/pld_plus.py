"""PLD+: of the places where the last token stood before, the one with the most similar hidden state, copied."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from specds.decode.contracts import NO_RESOURCES, Drafter, Resources, Signal, Step
from specds.decode.draft import Draft, Origin, Source, chain, empty
from specds.decode.registry import option
from specds.decode.text.anchors import Anchors, copy_scores

_SOURCE = Source("pld-plus", retrieved=True)


class PldPlus(Drafter):
    """Prompt lookup by the last token, ranked by the state before it at a middle layer (AdaPLD, §3.4)."""

    @dataclass(frozen=True, slots=True)
    class Options:
        """Options of PLD+."""

        layer: float = option(
            0.8,
            "layer whose states choose the place: its number, or below 1 a share of all layers",
            least=0.001,
            tries=(0.5, 0.65, 0.9),
        )
        length: int = option(30, "most tokens copied", least=1)

    summary: ClassVar[str] = "copies what followed the last token where the hidden state before it was most similar"
    source: ClassVar[str] = "PLD+ (Somasundaram et al., 2025)"
    needs: frozenset[Signal] = frozenset({Signal.LAYER})

    def __init__(self, options: Options, resources: Resources = NO_RESOURCES) -> None:
        self._options = options
        self.layer = options.layer
        self._anchors: Anchors | None = None

    def start(self, prompt: Sequence[int]) -> None:
        """See `Drafter.start`."""
        self._anchors = Anchors(prompt)

    def observe(self, step: Step) -> None:
        """See `Drafter.observe`."""
        if self._anchors is not None:
            self._anchors.observe(step.tokens, step.signals)

    def propose(self, budget: int) -> Draft:
        """A chain."""
        anchor = -1 if self._anchors is None else self._anchors.lexical()
        if self._anchors is None or anchor < 0:
            return empty()
        copied = self._anchors.tokens[anchor + 1 : anchor + 1 + min(budget, self._options.length)]
        return chain(copied, copy_scores(len(copied)), Origin.of(_SOURCE, len(copied), anchor + 1))
