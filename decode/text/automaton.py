"""A suffix automaton over the running text, grown token by token: where the end of the text stood before."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import int64, uint64
from numpy.typing import NDArray

from specds.jit import compiled

# Columns of a state. LENGTH: of its longest string. LINK: suffix link. END: where it first ends (exclusive).
# EDGES: its first edge. CHILD, NEXT, PREVIOUS: the tree of suffix links, as lists of siblings.
LENGTH, LINK, END, EDGES, CHILD, NEXT, PREVIOUS = range(7)
_FIELDS = 8  # a power of two: half a cache line
# Columns of an edge. The table finds it by (state, token).
TOKEN, TARGET, FOLLOWING, SOURCE = range(4)
# Entries of the counts.
STATES, EDGE_COUNT, LAST, TOKENS = range(4)

_NONE = -1
_START = 1 << 10


@compiled
def _slot(table: Any, edges: Any, state: int, token: int) -> Any:
    """Where the edge (state, token) is in the table, or would be."""
    mask = len(table) - 1
    key = (uint64(state) << uint64(32)) ^ uint64(token)
    place = int64((key * uint64(0x9E3779B97F4A7C15)) >> uint64(32)) & mask
    while True:
        edge = table[place]
        if edge < 0 or (edges[edge, SOURCE] == state and edges[edge, TOKEN] == token):
            return place
        place = (place + 1) & mask


@compiled
def _add_edge(states: Any, edges: Any, table: Any, counts: Any, place: int, state: int, token: int, to: int) -> None:
    edge = counts[EDGE_COUNT]
    counts[EDGE_COUNT] = edge + 1
    edges[edge, TOKEN] = token
    edges[edge, TARGET] = to
    edges[edge, SOURCE] = state
    edges[edge, FOLLOWING] = states[state, EDGES]
    states[state, EDGES] = edge
    table[place] = edge


@compiled
def _hang(states: Any, child: int, parent: int) -> None:
    """Make `parent` the suffix link of `child`."""
    first = states[parent, CHILD]
    states[child, LINK] = parent
    states[child, NEXT] = first
    states[child, PREVIOUS] = _NONE
    if first >= 0:
        states[first, PREVIOUS] = child
    states[parent, CHILD] = child


@compiled
def _unhang(states: Any, child: int) -> None:
    before, after = states[child, PREVIOUS], states[child, NEXT]
    if before >= 0:
        states[before, NEXT] = after
    else:
        states[states[child, LINK], CHILD] = after
    if after >= 0:
        states[after, PREVIOUS] = before


@compiled
def _new_state(states: Any, counts: Any, length: int, end: int) -> Any:
    state = counts[STATES]
    counts[STATES] = state + 1
    states[state, LENGTH] = length
    states[state, END] = end
    states[state, LINK] = _NONE
    states[state, EDGES] = _NONE
    states[state, CHILD] = _NONE
    states[state, NEXT] = _NONE
    states[state, PREVIOUS] = _NONE
    return state


@compiled
def _extend(states: Any, edges: Any, table: Any, counts: Any, tokens: Any) -> None:
    """Append tokens, one after another (Blumer et al., 1985); the arrays have room."""
    for index in range(len(tokens)):
        token = tokens[index]
        end = counts[TOKENS] + 1
        counts[TOKENS] = end
        state = counts[LAST]
        last = _new_state(states, counts, end, end)
        counts[LAST] = last
        place = 0
        while state >= 0:
            place = _slot(table, edges, state, token)
            if table[place] >= 0:
                break
            _add_edge(states, edges, table, counts, place, state, token, last)
            state = states[state, LINK]
        if state < 0:
            _hang(states, last, 0)
            continue
        target = edges[table[place], TARGET]
        if states[target, LENGTH] == states[state, LENGTH] + 1:
            _hang(states, last, target)
            continue
        clone = _new_state(states, counts, states[state, LENGTH] + 1, states[target, END])
        edge = states[target, EDGES]
        while edge >= 0:
            place = _slot(table, edges, clone, edges[edge, TOKEN])
            _add_edge(states, edges, table, counts, place, clone, edges[edge, TOKEN], edges[edge, TARGET])
            edge = edges[edge, FOLLOWING]
        parent = states[target, LINK]
        _unhang(states, target)
        _hang(states, clone, parent)
        _hang(states, target, clone)
        _hang(states, last, clone)
        while state >= 0:
            edge = table[_slot(table, edges, state, token)]
            if edge < 0 or edges[edge, TARGET] != target:
                break
            edges[edge, TARGET] = clone
            state = states[state, LINK]


@compiled
def _refill(table: Any, edges: Any, count: int) -> None:
    table[:] = _NONE
    for edge in range(count):
        table[_slot(table, edges, edges[edge, SOURCE], edges[edge, TOKEN])] = edge


@compiled
def _suffix(states: Any, counts: Any, length: int) -> Any:
    """The state of the text's last `length` tokens; -1 if they stand nowhere else."""
    state = states[counts[LAST], LINK]
    if state < 0 or length <= 0 or states[state, LENGTH] < length:
        return _NONE
    while states[state, LINK] >= 0 and states[states[state, LINK], LENGTH] >= length:
        state = states[state, LINK]
    return state


@compiled
def _collect(states: Any, counts: Any, state: int, ends: Any, stack: Any) -> int:
    """The ends of a state's occurrences but the text's own end, as many as there is room for; returns how many."""
    found, depth = 0, 1
    stack[0] = state
    while depth > 0 and found < len(ends):
        depth -= 1
        here = stack[depth]
        # A state made for a prefix of the text ends where it is as long as; a clone ends where its children do.
        if states[here, LENGTH] == states[here, END] and here != counts[LAST]:
            ends[found] = states[here, END]
            found += 1
        child = states[here, CHILD]
        while child >= 0:
            if depth == len(stack):
                return -1
            stack[depth] = child
            depth += 1
            child = states[child, NEXT]
    return found


class SuffixAutomaton:
    """Of a growing text: the longest end of it that stood before, and where the last k tokens stood.

    One array for states, one for edges, one hash table; memory grows geometrically, about 170 bytes a token.
    Appending costs O(1) amortised.
    """

    def __init__(self) -> None:
        self._counts = np.zeros(4, np.int64)
        self._states = np.empty((2 * _START, _FIELDS), np.int32)
        self._edges = np.empty((4 * _START, 4), np.int32)
        self._table = np.full(8 * _START, _NONE, np.int32)
        self._room = _START - 1
        _new_state(self._states, self._counts, 0, 0)

    def __len__(self) -> int:
        return int(self._counts[TOKENS])

    def extend(self, tokens: NDArray[np.int64]) -> None:
        """Append tokens, int64[k], each at least 0 and below 2**31."""
        if self._counts[TOKENS] + len(tokens) > self._room:
            self._grow(int(self._counts[TOKENS]) + len(tokens))
        _extend(self._states, self._edges, self._table, self._counts, tokens)

    def longest(self) -> tuple[int, int]:
        """Length of the longest suffix of the text that stood before, and where its first occurrence ends.

        (0, 0) if not even the last token did.
        """
        state = self._states[self._counts[LAST], LINK]
        if state <= 0:
            return 0, 0
        return int(self._states[state, LENGTH]), int(self._states[state, END])

    def ends(self, length: int, most: int = 1 << 16) -> NDArray[np.int64]:
        """Where earlier occurrences of the last `length` tokens end (exclusive), ascending; at most `most` of them.

        Occurrences may overlap the text's end; the last tokens themselves are not among them.
        """
        state = _suffix(self._states, self._counts, length)
        if state < 0:
            return np.empty(0, np.int64)
        ends, room = np.empty(min(most, len(self)), np.int64), 256
        while (found := _collect(self._states, self._counts, state, ends, np.empty(room, np.int64))) < 0:
            room *= 4
        return np.sort(ends[:found])

    def _grow(self, tokens: int) -> None:
        room = max(tokens, 2 * self._room)
        states, edges, count = self._states, self._edges, int(self._counts[EDGE_COUNT])
        # A text of n tokens has at most 2n states and 3n edges.
        self._states = np.empty((2 * room + 2, _FIELDS), np.int32)
        self._states[: self._counts[STATES]] = states[: self._counts[STATES]]
        self._edges = np.empty((3 * room + 2, 4), np.int32)
        self._edges[:count] = edges[:count]
        self._table = np.empty(1 << (4 * room).bit_length(), np.int32)
        _refill(self._table, self._edges, count)
        self._room = room
