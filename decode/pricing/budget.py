"""How many draft tokens a step verifies: a fixed number, or as many as pay for themselves."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from specds.decode.contracts import Step
from specds.decode.draft import Draft
from specds.decode.pricing.benefit import Benefit
from specds.decode.pricing.curve import Prices
from specds.jit import compiled

_MEMORY = 0.98
_PRIOR = 0.5
_LIKELIEST = 0.98
_DEPTHS = 16
_CONTEXT_STEP = 64
# Drafting that takes less than this share of a plain step is not weighed; trials and longest pause of weighing it.
_CHEAP, _TRIALS, _PAUSE = 0.02, 32, 32


class Budget(Protocol):
    """Cuts drafts to size; holds what requests one after another share."""

    @property
    def most(self) -> int:
        """Most nodes of the next draft."""

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


class Adaptive:
    """The number of nodes that makes expected tokens per second largest.

    A node's chance is its draft's score, times how far scores of its depth came true: accepted nodes over
    summed scores, among nodes whose parent was accepted, over the last hundred steps or so. With the likeliest
    b nodes a step gives 1 + Σ p tokens in expectation and takes T(1 + b); nothing is drafted where nothing pays.
    What is not tried is forgotten slowly, so that it is tried again now and then. A drafter that takes long is asked
    as far as what it saves is worth more seconds than asking takes.
    """

    def __init__(self, curve: Prices, most: int | None = None) -> None:
        self._curve = curve
        self._most = min(most or curve.rows[-1], curve.rows[-1] - 1)
        self._benefit, self._asked = Benefit(_TRIALS, _PAUSE), True
        self._accepted = np.zeros(_DEPTHS)
        self._expected = np.zeros(_DEPTHS)
        self._context = -1
        self._cost = np.zeros(1)

    @property
    def most(self) -> int:
        """Most nodes of the next draft; 0 where asking for one takes longer than it saves."""
        return self._most if self._asked else 0

    def factors(self) -> NDArray[np.float64]:
        """float64[depths]: by depth from 1, the factor on a draft's scores.

        Before much is known of a depth, it is that of the depth above; of the first, 1.
        """
        factors: NDArray[np.float64] = _factors(self._accepted, self._expected)
        return factors

    def fit(self, draft: Draft, context: int) -> Draft:
        """See `Budget.fit`."""
        if not len(draft):
            return draft
        if self._context < 0 or abs(context - self._context) > _CONTEXT_STEP:
            self._context, self._cost = context, self._curve.at(context)
        kept: NDArray[np.int64] = _paying(
            draft.parents, draft.score, self._accepted, self._expected, self._cost, self._most
        )
        return draft.keep(kept)

    def observe(self, step: Step) -> None:
        """See `Budget.observe`."""
        self._accepted *= _MEMORY
        self._expected *= _MEMORY
        draft = step.draft
        self._weigh(step)
        if len(draft):
            path = np.array(step.path, np.int64)
            _learn(draft.parents, draft.score, path, self._accepted, self._expected)

    def _weigh(self, step: Step) -> None:
        """Whether the next draft is to be asked for."""
        if step.index == 0:
            self._benefit.start()
        if self._context < 0:
            return
        plain = float(self._cost[1])
        if self._asked and step.index:
            rows = float(self._cost[min(1 + len(step.draft), len(self._cost) - 1)]) - plain
            self._benefit.observe(0, step.accepted * plain - rows, step.draft_seconds)
        self._asked = self._benefit.cost < _CHEAP * plain or self._benefit.decide(0)


@compiled
def _factors(accepted: Any, expected: Any) -> Any:
    factors = np.empty(len(accepted))
    above = 1.0
    for depth in range(len(accepted)):
        above = (accepted[depth] + _PRIOR * above) / (expected[depth] + _PRIOR)
        factors[depth] = above
    return factors


@compiled
def _paying(parents: Any, score: Any, accepted: Any, expected: Any, cost: Any, most: int) -> Any:
    """The nodes, ascending, with which a step gives most tokens for its cost."""
    count = len(parents)
    factors = _factors(accepted, expected)
    depth, chance = np.empty(count, np.int64), np.empty(count)
    for node in range(count):
        parent = parents[node]
        depth[node] = 0 if parent < 0 else depth[parent] + 1
        own = min(score[node] * factors[min(depth[node], len(factors) - 1)], _LIKELIEST)
        chance[node] = own if parent < 0 else own * chance[parent]
    # A child is never likelier than its parent and never before it, so a stable order keeps trees whole.
    order = np.argsort(-chance, kind="mergesort")[:most]
    nodes, gain = 0, 1.0
    best = gain / cost[1]
    for rank in range(len(order)):
        gain += chance[order[rank]]
        if gain / cost[rank + 2] > best:
            nodes, best = rank + 1, gain / cost[rank + 2]
    return np.sort(order[:nodes])


@compiled
def _learn(parents: Any, score: Any, path: Any, accepted: Any, expected: Any) -> None:
    """Count the nodes whose parent was accepted: what their scores expected, and which were accepted themselves."""
    count = len(parents)
    taken = np.zeros(count + 1, np.bool_)
    taken[count] = True  # the root, parent -1
    for node in path:
        taken[node] = True
    depth = np.empty(count, np.int64)
    for node in range(count):
        parent = parents[node]
        depth[node] = 0 if parent < 0 else depth[parent] + 1
        if taken[count if parent < 0 else parent]:
            place = min(depth[node], len(expected) - 1)
            expected[place] += score[node]
            accepted[place] += taken[node]
