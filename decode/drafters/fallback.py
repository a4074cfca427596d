"""The drafter inside a drafter: who drafts where the outer one has nothing."""

from __future__ import annotations

from collections.abc import Sequence

from specds.decode.contracts import Drafter, Step, Use
from specds.decode.draft import Draft
from specds.decode.registry import load
from specds.errors import UsageError


class Fallback(Drafter):
    """Any registered drafter that needs no store, with its default options; passes everything on to it."""

    def __init__(self, name: str, owner: str) -> None:
        from specds.decode.drafters import DRAFTERS

        kind: type[Drafter] = load(DRAFTERS, name, "fallback drafter")
        needs = "datastore" if kind.store_required else "draft model" if kind.draft_model is Use.ALWAYS else ""
        if name == owner or needs:
            reason = "that is itself" if name == owner else f"that needs a {needs} of its own"
            raise UsageError(f"drafter {owner} cannot fall back on {name}: {reason}", "take recycling, pld or none")
        self._inner = kind(kind.Options())
        self.needs, self.layer = self._inner.needs, self._inner.layer

    def start(self, prompt: Sequence[int]) -> None:
        """See `Drafter.start`."""
        self._inner.start(prompt)

    def observe(self, step: Step) -> None:
        """See `Drafter.observe`."""
        self._inner.observe(step)

    def propose(self, budget: int) -> Draft:
        """See `Drafter.propose`."""
        return self._inner.propose(budget)
