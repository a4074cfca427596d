"""What sources turned out to be worth lately: corrections of a node's log-odds by source and depth."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from specds.decode.expansion import DEPTHS, SOURCES, Grown, depth_bucket
from specds.jit import compiled

# How much of what was learned is left after a step: of a request, and of all requests.
_REQUEST, _PROCESS = 0.97, 0.997
# How much must be learned before a correction counts half: of a request, and of all requests.
_SLOW, _ALL_SLOW = 1.0, 4.0
_LOWEST, _HIGHEST = -6.0, 1.5


@compiled
def _learn(
    tokens: Any,
    parents: Any,
    chance: Any,
    mask: Any,
    committed: Any,
    offsets: Any,
    known: Any,
    all_offsets: Any,
    all_known: Any,
) -> None:
    """Judge every node whose parent was committed, whether it was verified or not.

    A source's offset is a weight of a logistic model whose input is its share in a node: this is a step of Newton's
    method on its own, with what `known` sums up, Σ p (1 - p), as the curvature.
    """
    for bit in range(offsets.shape[0]):
        for bucket in range(offsets.shape[1]):
            known[bit, bucket] *= _REQUEST
            all_known[bit, bucket] *= _PROCESS
    node, at, start = -1, 0, 0
    depth = 1
    while at < len(committed):
        bucket = depth_bucket(depth)
        following = -1
        seen = False
        for child in range(start, len(tokens)):
            if parents[child] != node:
                if seen:
                    break  # siblings stand together
                continue
            seen = True
            hit = tokens[child] == committed[at]
            if hit:
                following = child
            share = 0.0
            for bit in range(offsets.shape[0]):
                share += mask[child] >> bit & 1
            share = 1.0 / max(share, 1.0)
            missed = (1.0 if hit else 0.0) - chance[child]
            spread = max(chance[child] * (1.0 - chance[child]), 0.02)
            for bit in range(offsets.shape[0]):
                if mask[child] >> bit & 1:
                    known[bit, bucket] += share * spread
                    all_known[bit, bucket] += share * spread
                    moved = offsets[bit, bucket] + share * missed / (_SLOW + known[bit, bucket])
                    offsets[bit, bucket] = min(max(moved, _LOWEST), _HIGHEST)
                    moved = all_offsets[bit, bucket] + share * missed / (_ALL_SLOW + all_known[bit, bucket])
                    all_offsets[bit, bucket] = min(max(moved, _LOWEST), _HIGHEST)
        if following < 0:
            break
        node, start = following, following + 1
        at += 1
        depth += 1


class Feedback:
    """Corrections of one stream of requests, and of the request that is being decoded.

    A request begins with what the stream has learned, and moves faster. Every candidate that was looked at behind a
    committed token is judged by the next one, whether it was verified or not: what is not drafted is judged, too, and
    a source that was wrong for a while comes back by itself, at no cost in rows.

    Attributes:
        offsets: float64[len(SOURCES), DEPTHS], what `grow` adds to log-odds.
    """

    def __init__(self) -> None:
        shape = len(SOURCES), DEPTHS
        self._all, self._all_known = np.zeros(shape), np.zeros(shape)
        self.offsets: NDArray[np.float64] = np.zeros(shape)
        self._known = np.zeros(shape)

    def start(self) -> None:
        """A new request."""
        self.offsets = self._all.copy()
        self._known = np.zeros_like(self._all)

    def observe(self, grown: Grown, committed: NDArray[np.int64]) -> None:
        """Learn from a step.

        Args:
            grown: what was looked at.
            committed: int64[m], what came of it.
        """
        _learn(
            grown.tokens,
            grown.parents,
            grown.chance,
            grown.mask,
            committed,
            self.offsets,
            self._known,
            self._all,
            self._all_known,
        )


@compiled
def _reached(tokens: Any, parents: Any, kept: Any, committed: Any) -> int:
    """How many of the committed tokens a path through the kept nodes spells."""
    node, at = -1, 0
    while at < len(committed):
        following = -1
        for child in kept:
            if parents[child] == node and tokens[child] == committed[at]:
                following = child
                break
        if following < 0:
            break
        node = following
        at += 1
    return at


def reached(grown: Grown, committed: NDArray[np.int64]) -> int:
    """How many tokens of a step the chosen nodes foretold; those that were not verified could have foretold them, too.

    Args:
        committed: int64[m].
    """
    found: int = _reached(grown.tokens, grown.parents, grown.order[: grown.chosen], committed)
    return found


class Worth:
    """Whether asking a source pays, by how much is expected without it.

    The tokens that the tree foretold with it and without it are compared, in seconds of decoding, less what more rows
    took: each time it was asked, and where it pays by far every 8th time. Where that is less than asking takes, it is
    asked ever more rarely, down to once in 256 steps, and at once again when it pays. A request may be of another kind
    than those before it: each asks a few times whatever they found, and goes on asking where it finds more than they
    did.
    """

    EDGES = (1.25, 1.7, 2.5)
    """Expected tokens that tell the kinds of steps apart."""

    def __init__(self, trials: int = 8, longest: int = 256) -> None:
        """Args:
        trials: times that it is asked in each kind of step before anything is concluded.
        longest: most steps of a kind between two times that a source which does not pay is asked.
        """
        self._trials, self._longest = trials, longest
        kinds = len(self.EDGES) + 1
        self._gain, self._seen = np.zeros(kinds), np.zeros(kinds, np.int64)
        self.cost = 0.0
        """Seconds that asking takes, lately."""
        self._timed = 0
        self._waited, self._pause = np.zeros(kinds, np.int64), np.full(kinds, _SHORTEST)
        self.start()

    def start(self) -> None:
        """A new request."""
        self._greetings = _GREETINGS
        self._surprise, self._found, self._known, self._sure = 0.0, 0.0, 0.0, 0
        self._waited[:], self._pause[:] = 0, _SHORTEST

    def kind(self, expected: float) -> int:
        """Which kind a step is in which so many tokens are expected without the source."""
        return int(np.searchsorted(self.EDGES, expected))

    def asks(self, kind: int) -> bool:
        """Whether to ask now."""
        if self._seen[kind] < self._trials or self._greetings > 0 or self._pays(kind):
            return True
        self._waited[kind] += 1
        if self._waited[kind] < self._pause[kind]:
            return False
        self._waited[kind] = 0
        self._pause[kind] = min(2 * self._pause[kind], self._longest)
        return True

    def sure(self) -> bool:
        """Whether it paid so well in this request that it need not be compared each time; every 8th time it is."""
        if self._known < _DOUBT or self._found < _FAR * self.cost * self._known:
            return False
        self._sure += 1
        if self._sure % _COMPARED:
            return True
        # Whatever kind of step this is: what it is sure of must be looked at.
        self._greetings = max(self._greetings, 1)
        return False

    def _pays(self, kind: int) -> bool:
        """Whether it does by what all requests found, or by how much more this one found."""
        return bool(self._gain[kind] + max(0.0, self._surprise / (self._known + _DOUBT)) > self.cost)

    def observe(self, kind: int, gain: float, seconds: float) -> None:
        """What came of asking: seconds won, and seconds it took."""
        # A pause of the machine is not the source's, and the first times there is code to be loaded.
        if self._timed < _FIRST:
            self.cost = min(self.cost, seconds) if self._timed else seconds
        else:
            self.cost += 0.1 * (min(seconds, 4 * self.cost) - self.cost)
        self._timed += 1
        self._greetings -= 1
        self._surprise = _REQUEST * self._surprise + gain - self._gain[kind]
        self._found = _REQUEST * self._found + gain
        self._known = _REQUEST * self._known + 1.0
        self._seen[kind] += 1
        self._gain[kind] += max(1.0 / self._seen[kind], _RATE) * (gain - self._gain[kind])
        if self._pays(kind):
            self._pause[kind] = _SHORTEST


# Times of which the shortest counts.
_FIRST = 4
# How fast a gain is forgotten.
_RATE = 0.03
# Steps between two times that a source which does not pay any more is asked, at first.
_SHORTEST = 8
# Times that each request asks, whatever others found.
_GREETINGS = 3
# Times that a request must have asked before what it found counts as much as what others did.
_DOUBT = 4.0
# What asking must have brought, of what it takes, not to be compared each time; and how often it is then.
_FAR, _COMPARED = 4.0, 8
