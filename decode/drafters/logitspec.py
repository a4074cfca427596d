"""LogitSpec: the runners-up for the last token as guesses of the one after it, each continued by retrieval."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from specds.decode.contracts import NO_RESOURCES, TOP, Drafter, Resources, Signal, Step
from specds.decode.draft import Draft, Origin, Source, empty, merge
from specds.decode.registry import option
from specds.decode.text.context import Context
from specds.jit import compiled

_SOURCES = (Source("logitspec guess", retrieved=False), Source("logitspec copy", retrieved=True))
_GUESS, _COPY = range(2)


class LogitSpec(Drafter):
    """Retrieval for the next token, and for each guess of it that the last logits hold (LogitSpec, §3.2–3.3).

    What was likely in the last token's place is often what follows it.
    """

    @dataclass(frozen=True, slots=True)
    class Options:
        """Options of LogitSpec."""

        guesses: int = option(TOP, f"guesses taken from the last logits, at most {TOP}", least=0, tries=(0, 2, 4))
        max_ngram: int = option(3, "longest n-gram matched", least=1, tries=(2, 4, 6))
        length: int = option(10, "most tokens copied", least=1)

    summary: ClassVar[str] = "copies what followed the last n-gram, and what followed each runner-up of the last logits"
    source: ClassVar[str] = "LogitSpec (Liu et al., 2026)"
    needs: frozenset[Signal] = frozenset({Signal.TOPK})

    def __init__(self, options: Options, resources: Resources = NO_RESOURCES) -> None:
        self._options = options
        self._context = Context(())
        self._guesses = np.empty(0, np.int32)

    def start(self, prompt: Sequence[int]) -> None:
        """See `Drafter.start`."""
        self._context = Context(prompt)
        self._guesses = np.empty(0, np.int32)

    def observe(self, step: Step) -> None:
        """Keep the runners-up of the row that the last committed token was picked from."""
        self._context.extend(step.tokens)
        top = step.signals[Signal.TOPK][-1]
        self._guesses = top[(top != step.tokens[-1]) & (top >= 0)][: self._options.guesses]

    def propose(self, budget: int) -> Draft:
        """One tree of the n-gram's continuation and of the guesses with theirs."""
        tokens, most = self._context.tokens, min(self._options.length, budget)
        if most < 1:
            return empty()
        guesses = self._guesses.astype(np.int64)
        places, sizes = _earliest(tokens, guesses, self._options.max_ngram)
        paths, weights, origins = [], [], []
        if sizes[0]:
            copied = tokens[places[0] : places[0] + most]
            paths.append(copied)
            weights.append(float(sizes[0]))
            origins.append(_origin(len(copied), int(places[0])))
        for rank, guess in enumerate(guesses):
            # A guess that the text continues after the same token is likelier than one that it does not.
            known = sizes[rank + 1] > 1
            place = places[rank + 1]
            after = tokens[place : place + most - 1] if known else tokens[:0]
            paths.append(np.append(guess, after))
            weights.append((1.0 if known else 0.3) / (rank + 1))
            origins.append(_origin(1 + len(after), int(place), guessed=True))
        return merge(paths, weights, budget, origins)


def _origin(count: int, place: int, guessed: bool = False) -> Origin:
    """Of a path copied from a place on; its first token may be a guess instead."""
    source = np.full(count, _COPY, np.int8)
    places = np.arange(place, place + count, dtype=np.int32)
    if guessed:
        source[0] = _GUESS
        places -= 1
        places[0] = -1
    return Origin(_SOURCES, source, places)


@compiled
def _earliest(text: Any, guesses: Any, most: int) -> Any:
    """Where the text goes on after the earliest of the longest matches of its end, and of its end with each guess.

    Returns: places int64[1 + guesses], lengths of the matches, at most `most`; 0: none, with place 0.
    """
    count, end = len(guesses), len(text)
    places, sizes = np.zeros(count + 1, np.int64), np.zeros(count + 1, np.int64)
    for query in range(count + 1):
        token = text[end - 1] if query == 0 else guesses[query - 1]
        # With a guess appended the end of the text is one token to the left of it.
        left = end - 2 if query == 0 else end - 1
        for at in range(end - 1):
            if text[at] != token:
                continue
            size = 1
            while size < most and at - size >= 0 and left - size + 1 >= 0 and text[at - size] == text[left - size + 1]:
                size += 1
            if size > sizes[query]:
                places[query], sizes[query] = at + 1, size
                if size == most:
                    break
    return places, sizes
