"""Places in the text so far whose continuation may be reused, chosen by the target's own states (AdaPLD, §3.3–3.4)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specds.decode.arrays import with_room
from specds.decode.contracts import TOP, Embed, Signal, Signals
from specds.jit import compiled, compiled_loosely

_NONE = -1

# How often the target takes the first, second, … token copied from behind an anchor, once those before it are
# accepted: 24 prompts of three kinds, 534 anchors.
COPIED = (0.41, 0.61, 0.78, 0.84)


def copy_scores(count: int) -> NDArray[np.float32]:
    """float32[count]: the chance of each token copied from behind an anchor, given the one before."""
    score = np.full(count, COPIED[-1], np.float32)
    score[: len(COPIED)] = COPIED[:count]
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
        # By token that neighbours were sought of: its row, and which slots are near, as far as they are compared.
        self._rows: dict[int, int] = {}
        self._vectors = np.empty((0, 0), np.float32)
        self._masks = np.empty((0, 0), np.bool_)
        self._compared = np.empty(0, np.int32)
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
            width = self._embed(self.tokens[:1]).shape[1]
            self._embeddings, self._vectors = (np.empty((0, width), np.float32) for _ in range(2))
            self._slots[: self._length] = self._place(self.tokens)
        self._append(np.asarray(tokens, np.int32))

    def lexical(self) -> int:
        """The earlier position of the last token whose state before it is most similar (Eq. 3, 6, 7); -1: none."""
        end = self._length - 1
        token = self._tokens[end : end + 1]
        return int(_best_of_each(token, end, self._latest, self._earlier, self._states, self._states[end - 1])[0])

    def semantic(self) -> int:
        """The same among positions whose token is near the last one by embedding (Eq. 4); -1: none."""
        end = self._length - 1
        row = self._near([int(self._tokens[end])])
        return int(_best_near(self._masks, row, self._slots, end, self._states, self._states[end - 1])[0])

    def successors(self, branches: NDArray[np.int32], anchor: int, semantic: bool = True) -> NDArray[np.int32]:
        """For each branch token the position to read its successor behind (Eq. 13–15); -1: none.

        Lexical first, then near ones; the state before the position is compared with the anchor's own.
        """
        reference, end = self._states[anchor], self._length - 1
        found: NDArray[np.int32] = _best_of_each(branches, end, self._latest, self._earlier, self._states, reference)
        if semantic and len(missing := np.flatnonzero(found < 0)):
            rows = self._near(branches[missing].tolist())
            found[missing] = _best_near(self._masks, rows, self._slots, end, self._states, reference)
        return found

    def _near(self, tokens: Sequence[int]) -> NDArray[np.int32]:
        """int32[m]: rows of `_masks` that say which of the text's tokens are near each of m tokens."""
        new = [token for token in tokens if token not in self._rows]
        if new:
            assert self._embed is not None
            rows = self._embed(np.array(new))
            first, end = len(self._rows), len(self._rows) + len(new)
            self._vectors = with_room(self._vectors, first, end)
            self._masks = with_room(self._masks, first, end)
            self._compared = with_room(self._compared, first, end)
            _unit(rows, self._vectors[first:end])
            self._compared[first:end] = 0
            self._rows.update(zip(new, range(first, end), strict=True))
        if self._used > self._masks.shape[1]:
            wider = np.empty((len(self._masks), 2 * self._used), np.bool_)
            wider[:, : self._masks.shape[1]] = self._masks
            self._masks = wider
        asked = np.array([self._rows[token] for token in tokens], np.int32)
        _compare(self._vectors, asked, self._embeddings, self._used, self._threshold, self._masks, self._compared)
        return asked

    def _place(self, tokens: NDArray[np.int32]) -> NDArray[np.int32]:
        """int32[m]: slots of the text's tokens; those new get one, with their embedding."""
        found: NDArray[np.int32] = self._slot[tokens]
        if len(found) and found.min() >= 0:
            return found
        assert self._embed is not None
        new = np.unique(tokens[found < 0])
        used = self._used + len(new)
        self._embeddings = with_room(self._embeddings, self._used, used)
        _unit(self._embed(new), self._embeddings[self._used : used])
        self._slot[new] = np.arange(self._used, used, dtype=np.int32)
        self._used = used
        found = self._slot[tokens]
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


@compiled_loosely
def _dot(one: Any, other: Any) -> float:
    total = np.float32(0.0)
    for column in range(len(one)):
        total += one[column] * other[column]
    return total  # type: ignore[return-value]


@compiled_loosely
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


@compiled_loosely
def _best_of_each(tokens: Any, end: int, latest: Any, earlier: Any, states: Any, reference: Any) -> Any:
    """The best position before `end` of each token, back along the links; -1: it stands nowhere."""
    best = np.full(len(tokens), -1, np.int32)
    for query in range(len(tokens)):
        place = latest[tokens[query]] if tokens[query] < len(latest) else -1
        if place == end:
            place = earlier[place]
        highest = -2.0
        while place >= 0:
            similarity = _dot(states[place - 1], reference) if place > 0 else -1.5
            if similarity > highest:
                best[query], highest = place, similarity
            place = earlier[place]
    return best


@compiled_loosely
def _best_near(masks: Any, rows: Any, slots: Any, end: int, states: Any, reference: Any) -> Any:
    """For each row of the masks the best position before `end` whose token is near; a state is read once for all."""
    queries = len(rows)
    best, highest = np.full(queries, -1, np.int32), np.full(queries, -2.0, np.float32)
    for place in range(end - 1, -1, -1):
        wanted = False
        for query in range(queries):
            wanted |= masks[rows[query], slots[place]]
        if not wanted:
            continue
        similarity = _dot(states[place - 1], reference) if place > 0 else -1.5
        for query in range(queries):
            if masks[rows[query], slots[place]] and similarity > highest[query]:
                best[query], highest[query] = place, similarity
    return best


@compiled_loosely
def _compare(vectors: Any, rows: Any, embeddings: Any, used: int, threshold: float, masks: Any, compared: Any) -> None:
    """Go on marking the slots whose cosine with a row's vector reaches the threshold."""
    for row in rows:
        for slot in range(compared[row], used):
            masks[row, slot] = _dot(vectors[row], embeddings[slot]) >= threshold
        compared[row] = used
