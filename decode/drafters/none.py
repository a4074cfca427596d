"""No drafts: plain decoding on the same runtime, the baseline that every speedup is against."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from specds.decode.contracts import NO_RESOURCES, Drafter, NoOptions, Resources, Step
from specds.decode.draft import Draft, empty


class Null(Drafter):
    """Proposes nothing."""

    drafts: ClassVar[bool] = False
    summary: ClassVar[str] = "nothing is drafted: plain decoding, the baseline"

    def __init__(self, options: NoOptions, resources: Resources = NO_RESOURCES) -> None:
        pass

    def start(self, prompt: Sequence[int]) -> None:
        """See `Drafter.start`."""

    def propose(self, budget: int) -> Draft:
        """See `Drafter.propose`."""
        return empty()

    def observe(self, step: Step) -> None:
        """See `Drafter.observe`."""
