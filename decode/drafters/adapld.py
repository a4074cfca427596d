"""AdaPLD: the best anchor in the text, its continuation copied, and branches from what the model expected there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from specds.decode.anchors import Anchors, copy_scores
from specds.decode.contracts import TOP, Signal, Step
from specds.decode.draft import Draft, Origin, Source, empty
from specds.decode.registry import option

_SOURCES = (
    Source("main", retrieved=True),
    Source("branch", retrieved=False),
    Source("successor", retrieved=True),
    Source("semantic branch", retrieved=False),
    Source("semantic successor", retrieved=True),
)
_BRANCH, _SUCCESSOR, _FURTHER = 1, 2, 2  # a semantic branch or successor stands so much further

# How often the target takes a branch by its rank, and a successor once its branch is accepted: 24 prompts of three
# kinds, 534 anchors found lexically and 272 found semantically.
_LEXICAL = (0.082, 0.058, 0.034, 0.026, 0.015, 0.015, 0.015, 0.015)
_SEMANTIC = (0.059, 0.048, 0.015, 0.012, 0.012, 0.012, 0.01, 0.01)
_LEXICAL_NEXT, _SEMANTIC_NEXT = 0.32, 0.22


class AdaPld:
    """Adaptive retrieval and reuse of the context (AdaPLD, §3.3–3.5).

    Where Algorithm 1 and §3.5 disagree, §3.5 is followed, which the paper's ablation measures: branches get
    successors after a lexical hit too.
    """

    @dataclass(frozen=True, slots=True)
    class Options:
        """Options of AdaPLD."""

        layer: float = option(
            0.3, "layer whose states choose the anchor: its number, or below 1 a share of all layers", least=0.001
        )
        length: int = option(30, "most tokens copied (§4.3.2: 30)", least=1)
        branches: int = option(TOP, f"K, branch tokens (§4.3.2: 8), at most {TOP}", least=1)
        threshold: float = option(
            0.1, "τ, least cosine of embeddings for the semantic fallback (§4.3.2: 0.1)", least=-1
        )
        no_branch: bool = option(False, "ablation: neither branches nor successors")
        no_successor: bool = option(False, "ablation: no successors")
        lexical_only: bool = option(False, "ablation: no semantic fallback")

    summary: ClassVar[str] = "copies from the best place by hidden state, branches by what the model expected there"
    source: ClassVar[str] = "AdaPLD"
    index: ClassVar[str | None] = None
    store_required: ClassVar[bool] = False
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.LAYER, Signal.CONTEXT_TOPK, Signal.EMBEDDING})

    def __init__(self, options: Options, indexes: Sequence[object] = ()) -> None:
        self._options = options
        self.layer = options.layer
        self._anchors: Anchors | None = None

    def start(self, prompt: Sequence[int]) -> None:
        """See `Drafter.start`."""
        self._anchors = Anchors(prompt, self._options.threshold)

    def observe(self, step: Step) -> None:
        """See `Drafter.observe`."""
        if self._anchors is not None:
            self._anchors.observe(step.tokens, step.signals)

    def propose(self, budget: int) -> Draft:
        """The main path of a lexical anchor, then branches, then their successors."""
        if self._anchors is None:
            return empty()
        anchors, options = self._anchors, self._options
        anchor = anchors.lexical()
        lexical = anchor >= 0
        if not lexical and not options.lexical_only:
            anchor = anchors.semantic()
        if anchor < 0:
            return empty()
        tokens = anchors.tokens
        main = tokens[anchor + 1 : anchor + 1 + options.length] if lexical else tokens[:0]
        branches, after = main[:0], main[:0]
        if not options.no_branch:
            branches = anchors.expected(anchor)[: options.branches]
            branches = branches[(branches >= 0) & (branches != main[0])] if lexical else branches[branches >= 0]
            after = np.full(len(branches), -1, np.int32)
            if not options.no_successor:
                after = anchors.successors(branches, anchor, semantic=not options.lexical_only)
        return _woven(tokens, anchor, main, branches, after, lexical)


def _woven(
    tokens: NDArray[np.int32],
    anchor: int,
    main: NDArray[np.int32],
    branches: NDArray[np.int32],
    after: NDArray[np.int32],
    lexical: bool,
) -> Draft:
    """The draft: main path, branches, and the tokens that stand behind the positions `after`, -1 for none."""
    extended = np.flatnonzero(after >= 0)
    m, b, s = len(main), len(branches), len(extended)
    parents = np.full(m + b + s, -1, np.int32)
    parents[1:m] = np.arange(m - 1)
    parents[m + b :] = m + extended
    score = np.full(m + b + s, _LEXICAL_NEXT if lexical else _SEMANTIC_NEXT, np.float32)
    score[:m] = copy_scores(m)
    score[m : m + b] = (_LEXICAL if lexical else _SEMANTIC)[:b]
    source = np.zeros(m + b + s, np.int8)
    source[m : m + b] = _BRANCH
    source[m + b :] = _SUCCESSOR
    if not lexical:
        source[m:] += _FURTHER
    places = np.concatenate([np.arange(anchor + 1, anchor + 1 + m), np.full(b, -1), after[extended] + 1])
    drafted = np.concatenate([main, branches, tokens[after[extended] + 1]])
    return Draft(drafted, parents, score, origin=Origin(_SOURCES, source, places.astype(np.int32)))
