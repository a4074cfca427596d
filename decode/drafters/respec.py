"""ReSpec: retrieve from the text where the target is sure of itself, and from the places that served well before."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from specds.decode.contracts import NO_RESOURCES, Drafter, Resources, Signal, Step
from specds.decode.draft import Draft, Origin, Source, common_prefix, merge
from specds.decode.drafters.fallback import Fallback
from specds.decode.registry import option
from specds.decode.text.automaton import SuffixAutomaton
from specds.decode.text.context import Context

_NEUTRAL = 0.5
_SOURCE = Source("respec", retrieved=True)


@dataclass(slots=True)
class _Candidate:
    """A place in the text (where the key ends there), and the tokens copied from it."""

    place: int
    tokens: NDArray[np.int64]


class ReSpec(Drafter):
    """Entropy-guided trigger (§3.2.1), feedback-driven selection of match positions (§3.3), and a fallback.

    The paper leaves α, λ and the score threshold open; the defaults come from a sweep (docs/results.md).
    """

    @dataclass(frozen=True, slots=True)
    class Options:
        """Options of ReSpec."""

        lookback: int = option(3, "longest suffix that may be the key (§4: 3)", least=1, tries=(1, 2, 5))
        entropy: float = option(1.5, "retrieve where the key's mean entropy is at most this (nats; §4: 1.5)", least=0)
        weight: float = option(1.0, "λ: how much a longer key is preferred (Eq. 2)", least=0)
        rate: float = option(0.5, "α: how fast a place's score follows its last outcome (Eq. 4)", least=0)
        least_score: float = option(0.1, "θ: places with a lower score are left out (§3.3)", least=0)
        candidates: int = option(3, "places drafted from at once (§4: 3)", least=1)
        length: int = option(10, "most tokens copied from a place", least=1)
        fallback: str = option("recycling", "the drafter that drafts otherwise; none: nobody", tries=("pld", "none"))

    summary: ClassVar[str] = (
        "copies from places in the text that served well, where the target is sure; else a fallback"
    )
    source: ClassVar[str] = "ReSpec"

    def __init__(self, options: Options, resources: Resources = NO_RESOURCES) -> None:
        self._options = options
        self._fallback = Fallback(options.fallback, "respec")
        self.needs: frozenset[Signal] = self._fallback.needs | {Signal.ENTROPY}
        self.layer = self._fallback.layer
        self._begin(())

    def _begin(self, prompt: Sequence[int]) -> None:
        self._context = Context(prompt)
        self._automaton = SuffixAutomaton()
        self._automaton.extend(np.asarray(prompt, np.int64))
        self._entropies: deque[float] = deque(maxlen=self._options.lookback)
        self._scores = np.full(2 * len(prompt) + 256, _NEUTRAL)
        self._drafted: list[_Candidate] = []

    def start(self, prompt: Sequence[int]) -> None:
        """See `Drafter.start`."""
        self._begin(prompt)
        self._fallback.start(prompt)

    def observe(self, step: Step) -> None:
        """Judge the places drafted from (Eq. 4 and 5), and take in the text."""
        if self._drafted and len(step.draft):
            self._judge(step)
        self._drafted = []
        self._context.extend(step.tokens)
        self._automaton.extend(np.array(step.tokens, np.int64))
        length = len(self._context.tokens)
        if length > len(self._scores):
            self._scores = np.concatenate([self._scores, np.full(length, _NEUTRAL)])
        self._entropies.extend(step.signals[Signal.ENTROPY].tolist())
        self._fallback.observe(step)

    def propose(self, budget: int) -> Draft:
        """A tree of what followed the best places; the fallback's draft where the trigger says no."""
        self._drafted = self._select(self._key())
        if not self._drafted:
            return self._fallback.propose(budget)
        chains = [candidate.tokens for candidate in self._drafted]
        weights = [max(float(self._scores[one.place]), 1e-3) for one in self._drafted]
        origins = [Origin.of(_SOURCE, len(one.tokens), one.place) for one in self._drafted]
        return merge(chains, weights, budget, origins)

    def _key(self) -> int:
        """Length of the retrieval key: of the suffixes the one of least H_k + λ / k, if its H_k is low (Eq. 1-3)."""
        recent = list(self._entropies)[::-1]
        means = [sum(recent[:size]) / size for size in range(1, len(recent) + 1)]
        if not means:
            return 0
        best = min(range(len(means)), key=lambda index: means[index] + self._options.weight / (index + 1))
        return best + 1 if means[best] <= self._options.entropy else 0

    def _select(self, key: int) -> list[_Candidate]:
        """The places of best score that are above the threshold; of equal ones the latest (§3.3)."""
        text = self._context.tokens
        places = self._automaton.ends(key)[::-1]
        scores = self._scores[places]
        best = np.argsort(-scores, kind="stable")[: self._options.candidates]
        chosen = places[best[scores[best] >= self._options.least_score]].tolist()
        return [_Candidate(end, text[end : end + self._options.length].copy()) for end in chosen]

    def _judge(self, step: Step) -> None:
        """The winner gets the share of its tokens that was accepted, the others 0."""
        taken = [int(step.draft.tokens[node]) for node in step.path][: step.accepted]
        lengths = [common_prefix(taken, candidate.tokens.tolist()) for candidate in self._drafted]
        winner = int(np.argmax(lengths)) if max(lengths) else -1
        for number, candidate in enumerate(self._drafted):
            drafted = _depth(step.draft, candidate.tokens)
            reward = lengths[number] / drafted if number == winner and drafted else 0.0
            old = self._scores[candidate.place]
            self._scores[candidate.place] = (1 - self._options.rate) * old + self._options.rate * reward


def _depth(draft: Draft, tokens: NDArray[np.int64]) -> int:
    """How far a chain of tokens is in the draft that was verified."""
    children = draft.children()
    node, depth = -1, 0
    for token in tokens.tolist():
        found = children.get((node, token))
        if found is None:
            break
        node, depth = found, depth + 1
    return depth
