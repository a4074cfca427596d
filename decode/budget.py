"""How many draft tokens a step verifies: a fixed number, or as many as pay for themselves."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from specds.decode.contracts import Step
from specds.decode.cost import CostCurve
from specds.decode.draft import Draft, along_paths

_MEMORY = 0.98
_PRIOR = 0.5
_LIKELIEST = 0.98
_DEPTHS = 16
_CONTEXT_STEP = 64


class Budget(Protocol):
    """Cuts drafts to size; holds the state of one request stream."""

    most: int

    def fit(self, draft: Draft, context: int) -> Draft:
        """The part of a draft that is worth verifying behind `context` committed tokens."""

    def observe(self, step: Step) -> None:
        """What came of a step."""


class Fixed:
    """Always the same number."""

    def __init__(self, nodes: int) -> None:
        self.most = nodes

    def fit(self, draft: Draft, context: int) -> Draft:
        """See `Budget.fit`."""
        return draft.trim(self.most)

    def observe(self, step: Step) -> None:
        """See `Budget.observe`."""


class Auto:
    """The number of nodes that makes expected tokens per second largest.

    A node's chance is its draft's score, times what scores of its depth turned out to be worth: accepted nodes
    over summed scores, among nodes whose parent was accepted, over the last hundred steps or so. With the likeliest
    b nodes a step gives 1 + Σ p tokens in expectation and takes T(1 + b); nothing is drafted where nothing pays.
    What is not tried is forgotten slowly, so that it is tried again now and then.
    """

    def __init__(self, curve: CostCurve, most: int | None = None) -> None:
        self._curve = curve
        self.most = min(most or curve.rows[-1], curve.rows[-1] - 1)
        self._accepted = np.zeros(_DEPTHS)
        self._promised = np.zeros(_DEPTHS)
        self._context = -1
        self._cost = np.zeros(1)

    def worth(self) -> NDArray[np.float64]:
        """float64[depths]: by depth from 1, the factor on a draft's scores.

        Before much is known of a depth, it is that of the depth above; of the first, 1.
        """
        factors = np.empty(_DEPTHS)
        above = 1.0
        for depth, (accepted, promised) in enumerate(zip(self._accepted, self._promised, strict=True)):
            above = factors[depth] = (accepted + _PRIOR * above) / (promised + _PRIOR)
        return factors

    def fit(self, draft: Draft, context: int) -> Draft:
        """See `Budget.fit`."""
        if not len(draft):
            return draft
        depths = np.minimum(draft.depths(), _DEPTHS) - 1
        chance = along_paths(draft.parents, np.minimum(draft.score * self.worth()[depths], _LIKELIEST))
        # A child is never likelier than its parent and never before it, so a stable order keeps trees whole.
        order = np.argsort(-chance, kind="stable")[: self.most]
        if self._context < 0 or abs(context - self._context) > _CONTEXT_STEP:
            self._context, self._cost = context, self._curve.at(context)
        gain = 1.0 + np.concatenate([[0.0], np.cumsum(chance[order])])
        nodes = int(np.argmax(gain / self._cost[1 : len(gain) + 1]))
        return draft.keep(np.sort(order[:nodes]))

    def observe(self, step: Step) -> None:
        """See `Budget.observe`."""
        self._accepted *= _MEMORY
        self._promised *= _MEMORY
        draft = step.draft
        if not len(draft):
            return
        taken = np.zeros(len(draft) + 1, np.bool_)
        taken[[-1, *step.path]] = True  # the last entry stands for the root, parent -1
        judged = taken[draft.parents]
        depths = np.minimum(draft.depths(), _DEPTHS) - 1
        np.add.at(self._promised, depths[judged], draft.score[judged])
        np.add.at(self._accepted, depths[judged], taken[:-1][judged])
