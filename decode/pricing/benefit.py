"""Whether asking a source for drafts pays: seconds of decoding that it saves, against the seconds that it takes."""

from __future__ import annotations

import numpy as np

# How much of what a request has seen is left after it has asked once more.
_MEMORY = 0.97
# The cost of asking is at first the least of so many; later it follows slowly.
_FIRST, _COST_RATE, _COST_LEAP = 4, 0.1, 4
# How fast a gain is forgotten.
_GAIN_RATE = 0.03
# Steps between two times that a source which does not pay any more is asked, at first.
_SHORTEST = 8
# Times that each request asks, whatever others saw.
_OWN_TRIALS = 3
# Times that a request must have asked before what it saw counts as much as what others did.
_DOUBT = 4.0
# Gain over cost from which a source is not compared at each step; of how many steps one still is.
_FAR, _COMPARED = 4.0, 8
EDGES = (1.25, 1.7, 2.5)
"""Expected tokens that tell the kinds of steps apart."""


class Gains:
    """What asking a source has brought in all requests, by kind of step."""

    def __init__(self) -> None:
        kinds = len(EDGES) + 1
        self.gain, self.asked = np.zeros(kinds), np.zeros(kinds, np.int64)
        self.cost = 0.0
        """Seconds that asking takes, lately."""
        self.observed = 0
        """Times that it was asked."""

    def add(self, kind: int, gain: float, seconds: float) -> None:
        """What came of asking: seconds saved, and seconds it took."""
        # A pause of the machine is not the source's, and the first times there is code to be loaded.
        if self.observed < _FIRST:
            self.cost = min(self.cost, seconds) if self.observed else seconds
        else:
            self.cost += _COST_RATE * (min(seconds, _COST_LEAP * self.cost) - self.cost)
        self.observed += 1
        self.asked[kind] += 1
        self.gain[kind] += max(1.0 / self.asked[kind], _GAIN_RATE) * (gain - self.gain[kind])


class Benefit:
    """Whether asking a source pays in one request, by how much is expected without it.

    The tokens that the tree predicted with it and without it are compared, in seconds of decoding, less what more
    query tokens took: each time it was asked, and where it pays by far every 8th time. Where that is less than asking
    takes, it is asked ever more rarely, down to once in 256 steps, and at once again when it pays. A request may be of
    another kind than others: each asks a few times whatever they saw, and goes on asking where it gains more than they
    did.

    Args:
        gains: of all requests.
        trials: times that it is asked in each kind of step before anything is concluded.
        longest: most steps of a kind between two times that a source which does not pay is asked.
    """

    def __init__(self, gains: Gains, trials: int = 8, longest: int = 256) -> None:
        self._gains, self._trials, self._longest = gains, trials, longest
        kinds = len(EDGES) + 1
        self._waited, self._pause = np.zeros(kinds, np.int64), np.full(kinds, _SHORTEST)
        self._own_trials = _OWN_TRIALS
        # Of this request: gains beyond what all requests saw, gains, and times asked, each fading; steps trusted.
        self._excess, self._own_gain, self._own_asked, self._trusted = 0.0, 0.0, 0.0, 0

    @property
    def cost(self) -> float:
        """Seconds that asking takes, lately."""
        return self._gains.cost

    def kind(self, expected: float) -> int:
        """Which kind a step is in which so many tokens are expected without the source."""
        return int(np.searchsorted(EDGES, expected))

    def decide(self, kind: int) -> bool:
        """Decide for one step whether to ask; a step in which it is not asked is counted as waited."""
        if self._gains.asked[kind] < self._trials or self._own_trials > 0 or self._pays(kind):
            return True
        self._waited[kind] += 1
        if self._waited[kind] < self._pause[kind]:
            return False
        self._waited[kind] = 0
        self._pause[kind] = min(2 * self._pause[kind], self._longest)
        return True

    def trust(self) -> bool:
        """Decide for one step whether to ask without comparing: it paid by far in this request. Every 8th time: no."""
        if self._own_asked < _DOUBT or self._own_gain < _FAR * self.cost * self._own_asked:
            return False
        self._trusted += 1
        if self._trusted % _COMPARED:
            return True
        # Whatever kind of step this is: what is trusted must be compared.
        self._own_trials = max(self._own_trials, 1)
        return False

    def _pays(self, kind: int) -> bool:
        """Whether it does by what all requests saw, or by how much more this one did."""
        own = max(0.0, self._excess / (self._own_asked + _DOUBT))
        return bool(self._gains.gain[kind] + own > self._gains.cost)

    def observe(self, kind: int, gain: float, seconds: float) -> None:
        """What came of asking: seconds saved, and seconds it took."""
        self._own_trials -= 1
        self._excess = _MEMORY * self._excess + gain - self._gains.gain[kind]
        self._own_gain = _MEMORY * self._own_gain + gain
        self._own_asked = _MEMORY * self._own_asked + 1.0
        self._gains.add(kind, gain, seconds)
        if self._pays(kind):
            self._pause[kind] = _SHORTEST
