"""Drafters that know or do not know the answer, and hypothesis strategies for drafts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from specds.decode.contracts import Drafter, Step
from specds.decode.draft import Draft, chain, tree


def build(shape: Sequence[tuple[int, int]]) -> Draft:
    """A draft of (parent, token) nodes; a node that repeats a sibling is left out."""
    tokens: list[int] = []
    parents: list[int] = []
    place: dict[int, int] = {-1: -1}
    seen: dict[tuple[int, int], int] = {}
    for number, (parent, token) in enumerate(shape):
        key = (place[parent], token)
        if key in seen:
            place[number] = seen[key]
            continue
        seen[key] = place[number] = len(tokens)
        parents.append(place[parent])
        tokens.append(token)
    weights = np.ones(len(tokens))
    return tree(np.array(tokens, np.int32), np.array(parents, np.int32), weights, 1.0)


@st.composite
def drafts(draw: st.DrawFn, vocabulary: int = 8, most: int = 24) -> Draft:
    """Any valid tree over a small vocabulary."""
    size = draw(st.integers(0, most))
    shape = [(draw(st.integers(-1, node - 1)), draw(st.integers(0, vocabulary - 1))) for node in range(size)]
    return build(shape)


class Scripted(Drafter):
    """Base of drafters that know what plain decoding gives and draft around it."""

    def __init__(self, text: Sequence[int], vocabulary: int, seed: int = 0) -> None:
        self.text = list(text)
        self.vocabulary = vocabulary
        self.random = np.random.default_rng(seed)
        self.done = 0
        self.observed: list[Step] = []

    def start(self, prompt: Sequence[int]) -> None:
        self.done = 0

    def observe(self, step: Step) -> None:
        self.observed.append(step)
        self.done += len(step.tokens)

    def rest(self) -> list[int]:
        return self.text[self.done :]


class Oracle(Scripted):
    """Always right."""

    def propose(self, budget: int) -> Draft:
        right = self.rest()[:budget]
        return chain(right, [0.9] * len(right))


class Wrong(Scripted):
    """Always wrong, at full budget."""

    def propose(self, budget: int) -> Draft:
        right = self.rest()[0] if self.rest() else 0
        return chain([(right + 1 + i) % self.vocabulary for i in range(budget)], [0.9] * budget)


class Mixed(Scripted):
    """A random tree with the right text, cut at a random place, hidden among wrong branches."""

    def propose(self, budget: int) -> Draft:
        right = self.rest()[: int(self.random.integers(0, 8))]
        nodes: list[tuple[int, int]] = []
        here = -1
        for token in right:
            for _ in range(int(self.random.integers(0, 3))):
                nodes.append((here, int(self.random.integers(self.vocabulary))))
            nodes.append((here, token))
            here = len(nodes) - 1
        while len(nodes) < budget and self.random.random() < 0.8:
            parent = int(self.random.integers(-1, len(nodes))) if nodes else -1
            nodes.append((parent, int(self.random.integers(self.vocabulary))))
        return build(nodes)


def path_to(draft: Draft, node: int) -> tuple[int, ...]:
    path: list[int] = []
    while node >= 0:
        path.append(int(draft.tokens[node]))
        node = int(draft.parents[node])
    return tuple(reversed(path))


def paths(draft: Draft) -> set[tuple[int, ...]]:
    return {path_to(draft, node) for node in range(len(draft))}


def is_valid(draft: Draft) -> bool:
    ordered = all(-1 <= parent < node for node, parent in enumerate(draft.parents))
    siblings = set(zip(draft.parents.tolist(), draft.tokens.tolist(), strict=True))
    return ordered and len(siblings) == len(draft)
