"""How many draft tokens a pass verifies: a fixed number for each request, or as many as pay for themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from specds.decode.contracts import Step
from specds.decode.draft import Draft, along_paths
from specds.decode.pricing.benefit import Benefit, Gains
from specds.decode.pricing.curve import Load, Prices
from specds.jit import compiled

_MEMORY = 0.98
_PRIOR = 0.5
_LIKELIEST = 0.98
_DEPTHS = 16
# Drafting that takes less than this share of a plain step is not weighed; trials and longest pause of weighing it.
_CHEAP, _TRIALS, _PAUSE = 0.02, 32, 32
# Most draft nodes of a pass over many requests.
_MOST_TOGETHER = 256
# By how much drafts must raise the tokens per second of many requests. They fill passes that are full of tokens
# already, and what such passes cost is known less well than what they cost with one request.
_WORTH = 1.05
# How fast it is forgotten how much others' drafts gave.
_RATE = 0.2


@dataclass(slots=True)
class Terms:
    """On what terms the next pass takes a request's draft, for a drafter that grows one as far as it may pay.

    Attributes:
        cost: float64[most + 2]: entry 1 + n is what the pass takes with n nodes of this request; 1 each where nothing
            is weighed.
        gain: tokens that the pass is expected to give without them: at least one of each request.
        drafting: seconds that drafting for one request takes, lately; written by the drafter.
    """

    cost: NDArray[np.float64] = field(default_factory=lambda: np.ones(2))
    gain: float = 1.0
    drafting: float = 0.0


class Allowance(Protocol):
    """One request's part in a budget."""

    @property
    def most(self) -> int:
        """Most nodes of its next draft."""

    def observe(self, step: Step) -> None:
        """What came of its step."""


class Budget(Protocol):
    """Cuts the drafts of all requests to size.

    Attributes:
        most: most nodes that a request's draft may ever have.
    """

    @property
    def most(self) -> int: ...

    def open(self) -> Allowance:
        """A new request's part."""

    def prepare(self, load: Load) -> None:
        """What the next pass is made of besides drafts."""

    def allocate(self, drafts: Sequence[Draft]) -> list[Draft]:
        """The part of each request's draft that is worth verifying, in the order of the load's requests."""

    def observe(self, rows: int, seconds: float) -> None:
        """What the pass took, with its query tokens in all."""


@dataclass(frozen=True, slots=True)
class Fixed:
    """Always the same number, for each request."""

    most: int

    def open(self) -> Allowance:
        """See `Budget.open`."""
        return _Always(self.most)

    def prepare(self, load: Load) -> None:
        """See `Budget.prepare`."""

    def allocate(self, drafts: Sequence[Draft]) -> list[Draft]:
        """See `Budget.allocate`."""
        return [draft.trim(self.most) for draft in drafts]

    def observe(self, rows: int, seconds: float) -> None:
        """See `Budget.observe`: there is nothing to learn."""


@dataclass(frozen=True, slots=True)
class _Always:
    """A request's part where drafting is not weighed."""

    most: int

    def observe(self, step: Step) -> None:
        """See `Allowance.observe`."""


class Adaptive:
    """The number of nodes that makes expected tokens per second largest, of all requests' drafts together.

    A node's chance to be accepted never rises along its branch, so the best n nodes of all are the n likeliest, and
    those above one threshold: with the likeliest n a pass over r requests gives r + Σ p tokens in expectation and takes
    T(r + n). Nothing is drafted where nothing pays. Parts of prompts that share the pass would be read anyway: their
    own time does not count.

    A node's chance is its draft's path probability; of a drafter whose scores are not calibrated times how far scores
    of its depth came true: accepted nodes over summed scores, among nodes whose parent was accepted, over the last
    hundred steps or so. What is not tried is forgotten slowly, so that it is tried again now and then. A drafter that
    takes long is asked as far as what it saves is worth more seconds than asking takes.

    Args:
        curve: what passes cost.
        terms: written for a drafter whose scores are calibrated; None for others.
    """

    def __init__(self, curve: Prices, terms: Terms | None = None, most: int | None = None) -> None:
        self.curve = curve
        self.most = min(most or curve.rows[-1], curve.rows[-1] - 1)
        self._terms = terms
        self.gains = Gains()
        self._accepted = np.zeros(_DEPTHS)
        self._expected = np.zeros(_DEPTHS)
        self._load = Load((), 0)
        self.requests = 1
        self.cost = np.ones(self.most + 2)
        # Nodes and expected tokens of the drafts of a pass, lately.
        self._nodes = self._tokens = 0.0

    def open(self) -> Allowance:
        """See `Budget.open`."""
        return _Weighed(self) if self._terms is None else _Always(self.most)

    def factors(self) -> NDArray[np.float64]:
        """float64[depths]: by depth from 1, the factor on a draft's scores.

        Before much is known of a depth, it is that of the depth above; of the first, 1.
        """
        factors: NDArray[np.float64] = _factors(self._accepted, self._expected)
        return factors

    def prepare(self, load: Load) -> None:
        """See `Budget.prepare`."""
        self._load, requests = load, len(load.contexts)
        if not requests:
            return
        self.requests = requests
        most = self.most if requests == 1 else min(requests * self.most, _MOST_TOGETHER)
        self.cost = self.curve.costs(load, most)
        if self._terms is None:
            return
        self.cost = self.cost + requests * self._terms.drafting
        others = (requests - 1) / requests
        first = min(round(others * self._nodes), most - min(self.most, most))
        self._terms.cost = self.cost[first : first + self.most + 2]
        self._terms.gain = requests + others * self._tokens

    def allocate(self, drafts: Sequence[Draft]) -> list[Draft]:
        """See `Budget.allocate`."""
        sizes = [len(draft) for draft in drafts]
        if not any(sizes):
            self._nodes -= _RATE * self._nodes
            self._tokens -= _RATE * self._tokens
            return list(drafts)
        chances = [self._chances(draft) for draft in drafts]
        chance = chances[0] if len(drafts) == 1 else np.concatenate(chances)
        taken = allocated(chance, self.cost, float(len(drafts)))
        if len(drafts) > 1 and not self._worth(float(chance[taken].sum()), int(taken.sum()), len(drafts)):
            taken[:] = False
        self._nodes += _RATE * (int(taken.sum()) - self._nodes)
        self._tokens += _RATE * (float(chance[taken].sum()) - self._tokens)
        kept, end = [], 0
        for draft, size in zip(drafts, sizes, strict=True):
            kept.append(draft.keep(np.flatnonzero(taken[end : end + size])) if size else draft)
            end += size
        return kept

    def observe(self, rows: int, seconds: float) -> None:
        """See `Budget.observe`."""
        self.curve.learn(self._load, rows, seconds)

    def _worth(self, tokens: float, nodes: int, requests: int) -> bool:
        """Whether drafts raise the expected tokens per second by more than what is known of passes may be wrong by."""
        return bool((requests + tokens) / self.cost[1 + nodes] > _WORTH * requests / self.cost[1])

    def learn(self, step: Step) -> None:
        """What came of a request's draft."""
        self._accepted *= _MEMORY
        self._expected *= _MEMORY
        draft = step.draft
        if len(draft):
            path = np.array(step.path, np.int64)
            _learn(draft.parents, draft.score, path, self._accepted, self._expected)

    def _chances(self, draft: Draft) -> NDArray[np.float64]:
        """float64[n]: how likely each node is to be accepted."""
        if self._terms is not None:
            return along_paths(draft.parents, draft.score.astype(np.float64))
        chances: NDArray[np.float64] = _corrected(draft.parents, draft.score, self._accepted, self._expected)
        return chances


class _Weighed:
    """A request's part in an adaptive budget: asked for drafts as far as that pays."""

    def __init__(self, budget: Adaptive) -> None:
        self._budget, self._benefit, self._asked = budget, Benefit(budget.gains, _TRIALS, _PAUSE), True

    @property
    def most(self) -> int:
        """Most nodes of the next draft; 0 where asking for one takes longer than it saves."""
        return self._budget.most if self._asked else 0

    def observe(self, step: Step) -> None:
        """See `Allowance.observe`."""
        self._budget.learn(step)
        cost, requests = self._budget.cost, self._budget.requests
        plain = float(cost[1]) / requests
        if self._asked and step.index:
            rows = float(cost[min(1 + len(step.draft), len(cost) - 1)]) - float(cost[1])
            self._benefit.observe(0, step.accepted * plain - rows, step.draft_seconds)
        self._asked = self._benefit.cost < _CHEAP * plain or self._benefit.decide(0)


@compiled
def allocated(chance: Any, cost: Any, requests: float) -> Any:
    """Which nodes of all requests' drafts make expected tokens per second largest.

    Args:
        chance: float64[n], never larger than that of a node's parent, which comes before it.
        cost: float64[m + 2]: entry 1 + k is what the pass takes with k of them; at most m are taken.
        requests: how many, each of which gives one token without a draft.

    Returns:
        bool[n].
    """
    # A child is never likelier than its parent and never before it, so a stable order keeps trees whole.
    order = np.argsort(-chance, kind="mergesort")[: len(cost) - 2]
    nodes, gain = 0, requests
    best = gain / cost[1]
    for rank in range(len(order)):
        gain += chance[order[rank]]
        if gain / cost[rank + 2] > best:
            nodes, best = rank + 1, gain / cost[rank + 2]
    taken = np.zeros(len(chance), np.bool_)
    for rank in range(nodes):
        taken[order[rank]] = True
    return taken


@compiled
def _factors(accepted: Any, expected: Any) -> Any:
    """float64[depths], of float64[depths] each: see `Adaptive.factors`."""
    factors = np.empty(len(accepted))
    above = 1.0
    for depth in range(len(accepted)):
        above = (accepted[depth] + _PRIOR * above) / (expected[depth] + _PRIOR)
        factors[depth] = above
    return factors


@compiled
def _corrected(parents: Any, score: Any, accepted: Any, expected: Any) -> Any:
    """float64[n]: path probabilities of a draft, int32[n] and float32[n], by `_factors`."""
    count = len(parents)
    factors = _factors(accepted, expected)
    depth, chance = np.empty(count, np.int64), np.empty(count)
    for node in range(count):
        parent = parents[node]
        depth[node] = 0 if parent < 0 else depth[parent] + 1
        own = min(score[node] * factors[min(depth[node], len(factors) - 1)], _LIKELIEST)
        chance[node] = own if parent < 0 else own * chance[parent]
    return chance


@compiled
def _learn(parents: Any, score: Any, path: Any, accepted: Any, expected: Any) -> None:
    """Count the nodes whose parent was accepted: what their scores expected, and which were accepted themselves.

    Args:
        parents, score: int32[n] and float32[n], of a draft.
        path: int64[m], the accepted nodes.
        accepted, expected: float64[depths], added to.
    """
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
