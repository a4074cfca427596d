"""No drafts: plain decoding on the same runtime, the baseline that every speedup is against."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from specds.decode.contracts import Signal, Step
from specds.decode.draft import Draft, empty


class Null:
    """Proposes nothing."""

    @dataclass(frozen=True, slots=True)
    class Options:
        """It has none."""

    summary: ClassVar[str] = "nothing is drafted: plain decoding, the baseline"
    source: ClassVar[str] = ""
    index: ClassVar[str | None] = None
    store_required: ClassVar[bool] = False
    needs: ClassVar[frozenset[Signal]] = frozenset()

    def __init__(self, options: Options, indexes: Sequence[object] = ()) -> None:
        pass

    def start(self, prompt: Sequence[int]) -> None:
        """See `Drafter.start`."""

    def propose(self, budget: int) -> Draft:
        """See `Drafter.propose`."""
        return empty()

    def observe(self, step: Step) -> None:
        """See `Drafter.observe`."""
