"""A drafter driven through a text that is known, without a model."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from specds.datastore.suffix import SuffixIndex
from specds.datastore.suffix_array import build_suffix_array
from specds.datastore.suffix_parts import Parts
from specds.decode.auto.cross_request import CrossRequest
from specds.decode.auto.drafter import Auto
from specds.decode.contracts import TOP, Signal, Step
from specds.decode.draft import Draft, empty
from specds.decode.pricing.budget import Adaptive, Budget, Fixed
from specds.decode.pricing.curve import Load

from ..drafts import is_valid

Documents = list[tuple[list[int], list[int]]]


def index_of(documents: Documents) -> SuffixIndex:
    """A suffix index over documents, as a store would hold it."""
    flat = [token for prompt, answer in documents for token in (*prompt, *answer, 65535)]
    text = np.array(flat, np.uint16)
    return SuffixIndex(Parts([(text, build_suffix_array(text))]))


class Simulation:
    """Drives a drafter through a text that is known, without a model; what is likeliest is drawn at random.

    Args:
        shared: the drafter's cross-request state: with a cost curve in it drafts are cut to what pays.
    """

    def __init__(self, drafter: Auto, shared: CrossRequest, text: list[int], prompt: int) -> None:
        self.drafter, self.text, self.prompt = drafter, text, prompt
        self.random, self.vocabulary = np.random.default_rng(0), 20_000
        self.budget: Budget = Fixed(64)
        if shared.curve is not None:
            self.budget = Adaptive(shared.curve, shared.terms, shared.most)

    def signals(self, rows: int) -> dict[Signal, NDArray[np.generic]]:
        ids = self.random.integers(0, self.vocabulary, (rows, TOP)).astype(np.int32)
        gaps = np.sort(self.random.random((rows, TOP)).astype(np.float32) * 4, axis=1)
        return {Signal.TREE_TOPK: ids, Signal.TREE_GAPS: gaps - gaps[:, :1]}

    def run(self) -> list[tuple[Draft, int]]:
        """Drafts, and how many of their tokens were accepted."""
        text, drafter = self.text, self.drafter
        drafter.start(text[: self.prompt])
        allowance = self.budget.open()
        at = self.prompt
        step = Step(0, at, empty(), (), (text[at],), self.signals(1), 0.0, 0.0, 0.0, 0.0)
        at += 1
        found = []
        while at < len(text) - 1:
            drafter.observe(step)
            allowance.observe(step)
            self.budget.prepare(Load([at - 1], 0))
            (draft,) = self.budget.allocate([drafter.propose(allowance.most)])
            assert is_valid(draft)
            children, node, path = draft.children(), -1, []
            while at + len(path) < len(text) - 1 and (node, text[at + len(path)]) in children:
                node = children[node, text[at + len(path)]]
                path.append(node)
            tokens = tuple(text[at : at + len(path) + 1])
            found.append((draft, len(path)))
            step = Step(1, at, draft, tuple(path), tokens, self.signals(len(draft) + 1), 0.0, 0.0, 0.0, 0.0)
            at += len(tokens)
        return found
