"""DReSD: what followed the most similar hidden states in a datastore."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from specds.decode.contracts import NO_RESOURCES, Drafter, Resources, Signal, Step
from specds.decode.draft import Draft, Origin, Source, empty, merge
from specds.decode.registry import option

_SOURCE = Source("dresd", retrieved=True)


class Dresd(Drafter):
    """Dense retrieval with the last hidden state, filtered by the token just picked (DReSD, Algorithm 1, §3.5)."""

    @dataclass(frozen=True, slots=True)
    class Options:
        """Options of DReSD."""

        drafts: int = option(10, "most drafts k (§5.4: 3 for greedy decoding, 10 for sampling)", least=1)
        length: int = option(10, "tokens N of a draft (§5.4: 20 for greedy decoding, 10 for sampling)", least=1)
        neighbours: int = option(100, "neighbours fetched before filtering by the token just picked", least=1)

    summary: ClassVar[str] = "nearest hidden states in a store's dense index, their continuations as a tree"
    source: ClassVar[str] = "DReSD"
    indexes: ClassVar[tuple[str, ...]] = ("dense",)
    store_required: ClassVar[bool] = True
    needs: frozenset[Signal] = frozenset({Signal.HIDDEN})

    def __init__(self, options: Options, resources: Resources = NO_RESOURCES) -> None:
        self._options = options
        self._indexes = resources.dense
        self._hidden: NDArray[np.float32] | None = None
        self._picked = -1

    def start(self, prompt: Sequence[int]) -> None:
        """See `Drafter.start`."""
        self._hidden = None

    def observe(self, step: Step) -> None:
        """Keep v, the state of the last forwarded token, and x_{t+1}, the token picked from it (§3.1)."""
        self._hidden = step.signals[Signal.HIDDEN][-1]
        self._picked = step.tokens[-1]

    def propose(self, budget: int) -> Draft:
        """Up to k drafts of N tokens that followed x_{t+1} where the state was most similar, merged into a tree."""
        if self._hidden is None:
            return empty()
        found: list[tuple[float, NDArray[np.int64]]] = []
        for index in self._indexes:
            similarity, positions = index.search(self._hidden, self._options.neighbours)
            right = index.starting_with(positions, self._picked)
            follows = index.continuations(positions[right], self._options.length + 1)
            found += [
                (float(sim), tokens[1:])
                for sim, tokens in zip(similarity[right], follows, strict=True)
                if len(tokens) > 1
            ]
        if len(self._indexes) > 1:
            found.sort(key=lambda one: -one[0])
        paths = _distinct([tokens for _, tokens in found], self._options.drafts)
        origins = [Origin.of(_SOURCE, len(path)) for path, _ in paths]
        return merge([path for path, _ in paths], [weight for _, weight in paths], budget, origins)


def _distinct(found: list[NDArray[np.int64]], most: int) -> list[tuple[NDArray[np.int64], float]]:
    """The first `most` different drafts; each weighs the sum of 1 / rank over the neighbours that propose it."""
    weights: dict[bytes, float] = {}
    drafts: list[NDArray[np.int64]] = []
    for rank, tokens in enumerate(found, 1):
        key = tokens.tobytes()
        if key not in weights and len(weights) < most:
            drafts.append(tokens)
            weights[key] = 0.0
        if key in weights:
            weights[key] += 1.0 / rank
    return [(draft, weights[draft.tobytes()]) for draft in drafts]
