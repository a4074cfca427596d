"""Which n-grams of some texts a corpus holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specds.tokenizer import Tokenizer

NGRAM = 13
_BASE = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True)
class Overlap:
    """What the evaluation shares with the store, by n-grams: a store that holds the questions flatters itself.

    Attributes:
        texts: prompts, or answers, of at least n tokens; the chat template's own beginning and end do not count.
        touched: those that share an n-gram with the corpus.
        ngrams: all n-grams of theirs.
        shared: those that stand in the corpus.
        same: texts that are a document's prompt, or response, as a whole.
    """

    texts: int
    touched: int
    ngrams: int
    shared: int
    same: int


def template(tokenizer: Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What the chat template puts before and after a single question, as token ids."""
    first, second = (tokenizer.chat([{"role": "user", "content": text}]) for text in ("a 1 a", "b 2 b"))
    before = next((at for at, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1]), 0)
    backwards = enumerate(zip(first[::-1], second[::-1], strict=False))
    after = next((at for at, pair in backwards if pair[0] != pair[1]), 0)
    return tuple(first[:before]), tuple(first[len(first) - after :])


def bare(prompt: tuple[int, ...], around: tuple[tuple[int, ...], tuple[int, ...]]) -> NDArray[np.int64]:
    """A prompt's tokens, int64[m], without what the chat template puts before and after it."""
    before, after = around
    start = len(before) if prompt[: len(before)] == before else 0
    end = len(prompt) - len(after) if prompt[len(prompt) - len(after) :] == after else len(prompt)
    return np.array(prompt[start:end], np.int64)


def grams_of(text: NDArray[np.int64], n: int) -> NDArray[np.uint64]:
    """uint64[m - n + 1]: a hash of each n-gram of m tokens."""
    if len(text) < n:
        return np.empty(0, np.uint64)
    mixed = (text.astype(np.uint64) + np.uint64(1)) * _BASE
    mixed ^= mixed >> np.uint64(29)
    count = len(text) - n + 1
    hashes = np.zeros(count, np.uint64)
    for offset in range(n):
        hashes = hashes * _BASE + mixed[offset : offset + count]
        hashes ^= hashes >> np.uint64(32)
    return hashes


def overlap_of(texts: Sequence[NDArray[np.uint64]], held: NDArray[np.uint64], same: int) -> Overlap:
    """What texts share with a corpus.

    Args:
        texts: the n-grams of each text.
        held: those of all of them that stand in the corpus.
        same: texts that are a document's as a whole.
    """
    shared = [int(np.isin(grams, held).sum()) for grams in texts]
    return Overlap(
        sum(len(grams) > 0 for grams in texts),
        sum(count > 0 for count in shared),
        sum(map(len, texts)),
        sum(shared),
        same,
    )
