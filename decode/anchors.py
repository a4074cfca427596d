"""Places in the text so far whose continuation may be reused, chosen by the target's own states (AdaPLD, §3.3–3.4)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from specds.decode.arrays import with_room
from specds.decode.contracts import TOP, Embed, Signal, Signals
from specds.jit import compiled

_NONE = -1

# How often the target takes the first, second, … token copied from behind an anchor, once those before it are
# accepted: 24 prompts of three kinds, 534 anchors.
_COPIED = (0.41, 0.61, 0.78, 0.84)


def copy_scores(count: int) -> NDArray[np.float32]:
    """float32[count]: the chance of each token copied from behind an anchor, given the one before."""
    score = np.full(count, _COPIED[-1], np.float32)
    score[: len(_COPIED)] = _COPIED[:count]
    return score


class Anchors:
    """The text, where each token stood before, a layer's state at each position, and what the model expected there.

    Positions count from 0. The last token is not forwarded yet: it has no state, and nothing follows it.

    Args:
        threshold: τ, the least cosine of two embeddings for tokens to be taken as near (Eq. 4).
    """

    def __init__(self, prompt: Sequence[int], threshold: float = 0.1) -> None:
        self._threshold = threshold
        self._embed: Embed | None = None
        self._length = 0
        room = 2 * len(prompt) + 256
        self._tokens = np.empty(room, np.int32)
        self._earlier = np.empty(room, np.int32)
        self._slots = np.empty(room, np.int32)
        self._states = np.empty((0, 0), np.float32)
        self._top = np.empty((room, TOP), np.int32)
        self._known = 0
        # By token: its last position, and its slot among the embeddings. Both grow with the largest token seen.
        self._latest = np.empty(0, np.int32)
        self._slot = np.empty(0, np.int32)
        self._embeddings = np.empty((0, 0), np.float32)
        self._used = 0
        self._append(np.asarray(prompt, np.int32))

    @property
    def tokens(self) -> NDArray[np.int32]:
        """int32[length]: a view, valid until the next `observe`."""
        text: NDArray[np.int32] = self._tokens[: self._length]
        return text

    def expected(self, position: int) -> NDArray[np.int32]:
        """int32[TOP]: the likeliest tokens after a position, by the model's distribution there."""
        likeliest: NDArray[np.int32] = self._top[position]
        return likeliest

    def observe(self, tokens: Sequence[int], signals: Signals) -> None:
        """Take in the signals of the tokens that were forwarded (LAYER, CONTEXT_TOPK, EMBEDDING), then new tokens."""
        states = signals[Signal.LAYER]
        at = slice(self._known, self._known + len(states))
        if not self._known:
            self._states = np.empty((len(self._tokens), states.shape[1]), np.float32)
        self._states = with_room(self._states, self._known, at.stop)
        _unit(states, self._states[at])
        if Signal.CONTEXT_TOPK in signals:
            self._top[at] = signals[Signal.CONTEXT_TOPK]
        self._known += len(states)
        if Signal.EMBEDDING in signals:
            self._embed = signals[Signal.EMBEDDING]
            self._slots[: self._length] = self._place(self.tokens)
        self._append(np.asarray(tokens, np.int32))

    def lexical(self) -> int:
        """The earlier position of the last token whose state before it is most similar (Eq. 3, 6, 7); -1: none."""
        token = int(self._tokens[self._length - 1])
        end = self._length - 1
        return int(_best_of(self._first_before(token), self._earlier, self._states, self._states[end - 1]))

    def semantic(self) -> int:
        """The same among positions whose token is near the last one by embedding (Eq. 4); -1: none."""
        end = self._length - 1
        near = self._near(self._tokens[end : end + 1])
        return int(_best_near(near[0], self._slots, end, self._states, self._states[end - 1]))

    def successors(self, branches: NDArray[np.int32], anchor: int, semantic: bool = True) -> NDArray[np.int32]:
        """For each branch token the position to read its successor behind (Eq. 13–15); -1: none.

        Lexical first, then near ones; the state before the position is compared with the anchor's own.
        """
        found = np.full(len(branches), _NONE, np.int32)
        reference = self._states[anchor]
        missing = []
        for place, token in enumerate(branches.tolist()):
            first = self._first_before(token)
            if first >= 0:
                found[place] = _best_of(first, self._earlier, self._states, reference)
            else:
                missing.append(place)
        if missing and semantic:
            near = self._near(branches[missing])
            found[missing] = _best_near_each(near, self._slots, self._length - 1, self._states, reference)
        return found

    def _first_before(self, token: int) -> int:
        """The last position of a token that something follows; -1: none."""
        if token >= len(self._latest):
            return _NONE
        place = int(self._latest[token])
        return int(self._earlier[place]) if place == self._length - 1 else place

    def _near(self, tokens: NDArray[np.int32]) -> NDArray[np.bool_]:
        """bool[m, slots]: which embeddings are near those of m tokens."""
        slots = self._place(tokens)
        near: NDArray[np.bool_] = _similar(self._embeddings, self._used, slots, self._threshold)
        return near

    def _place(self, tokens: NDArray[np.int32]) -> NDArray[np.int32]:
        """int32[m]: slots of tokens; those new get one, with their embedding."""
        self._reach(int(tokens.max()))
        new = np.unique(tokens[self._slot[tokens] < 0])
        if len(new):
            assert self._embed is not None
            rows = self._embed(new)
            used = self._used + len(new)
            if not self._used:
                self._embeddings = np.empty((0, rows.shape[1]), np.float32)
            self._embeddings = with_room(self._embeddings, self._used, used)
            _unit(rows, self._embeddings[self._used : used])
            self._slot[new] = np.arange(self._used, used, dtype=np.int32)
            self._used = used
        found: NDArray[np.int32] = self._slot[tokens]
        return found

    def _append(self, tokens: NDArray[np.int32]) -> None:
        if not len(tokens):
            return
        self._reach(int(tokens.max()))
        end = self._length + len(tokens)
        for name in ("_tokens", "_earlier", "_slots", "_top"):
            setattr(self, name, with_room(getattr(self, name), self._length, end))
        self._tokens[self._length : end] = tokens
        if self._embed is not None:
            self._slots[self._length : end] = self._place(tokens)
        _link(tokens, self._length, self._latest, self._earlier)
        self._length = end

    def _reach(self, largest: int) -> None:
        for name in ("_latest", "_slot"):
            setattr(self, name, with_room(getattr(self, name), len(getattr(self, name)), largest + 1, fill=_NONE))


def _fast(function: Any) -> Any:
    """Compiled with sums in any order: what is compared here are similarities, and no text depends on them."""
    return numba.njit(cache=True, nogil=True, fastmath=True, inline="never")(function)


@_fast
def _dot(one: Any, other: Any) -> float:
    total = np.float32(0.0)
    for column in range(len(one)):
        total += one[column] * other[column]
    return total  # type: ignore[return-value]


@_fast
def _unit(rows: Any, out: Any) -> None:
    """Rows of length 1; a row of zeros stays one."""
    for row in range(len(rows)):
        norm = np.sqrt(_dot(rows[row], rows[row]))
        factor = np.float32(1.0) / norm if norm > 0 else np.float32(0.0)
        for column in range(rows.shape[1]):
            out[row, column] = rows[row, column] * factor


@compiled
def _link(tokens: Any, start: int, latest: Any, earlier: Any) -> None:
    for at in range(len(tokens)):
        earlier[start + at] = latest[tokens[at]]
        latest[tokens[at]] = start + at


# A position's prefix is the state one before it; the first position has none, and loses to any that has. Of equally
# similar ones the latest is taken.


@_fast
def _best_of(first: int, earlier: Any, states: Any, reference: Any) -> int:
    """The best of a token's positions, from `first` back along the links."""
    best, highest, place = -1, np.float32(-2.0), first
    while place >= 0:
        similarity = _dot(states[place - 1], reference) if place > 0 else np.float32(-1.5)
        if similarity > highest:
            best, highest = place, similarity
        place = earlier[place]
    return best


@_fast
def _best_near(near: Any, slots: Any, end: int, states: Any, reference: Any) -> int:
    """The best position before `end` whose token is near."""
    best, highest = -1, np.float32(-2.0)
    for place in range(end - 1, -1, -1):
        if near[slots[place]]:
            similarity = _dot(states[place - 1], reference) if place > 0 else np.float32(-1.5)
            if similarity > highest:
                best, highest = place, similarity
    return best


@_fast
def _best_near_each(near: Any, slots: Any, end: int, states: Any, reference: Any) -> Any:
    """The same for each row of `near`; a state is read once for all."""
    queries = len(near)
    best, highest = np.full(queries, -1, np.int32), np.full(queries, -2.0, np.float32)
    for place in range(end - 1, -1, -1):
        wanted = False
        for query in range(queries):
            wanted |= near[query, slots[place]]
        if not wanted:
            continue
        similarity = _dot(states[place - 1], reference) if place > 0 else np.float32(-1.5)
        for query in range(queries):
            if near[query, slots[place]] and similarity > highest[query]:
                best[query], highest[query] = place, similarity
    return best


@_fast
def _similar(embeddings: Any, used: int, slots: Any, threshold: float) -> Any:
    """bool[m, used]: whose cosine with each of m slots reaches the threshold."""
    near = np.empty((len(slots), used), np.bool_)
    for other in range(used):
        for query in range(len(slots)):
            near[query, other] = _dot(embeddings[slots[query]], embeddings[other]) >= threshold
    return near
