"""AdaPLD: the best anchor in the text, its continuation copied, and branches from what the model expected there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from specds.decode.contracts import NO_RESOURCES, TOP, Drafter, Resources, Signal, Step
from specds.decode.draft import Draft, Origin, Source, empty
from specds.decode.registry import option
from specds.decode.text.anchors import COPIED, Anchors
from specds.jit import compiled

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


class AdaPld(Drafter):
    """Adaptive retrieval and reuse of the context (AdaPLD, §3.3–3.5).

    Where Algorithm 1 and §3.5 disagree, §3.5 is followed, which the paper's ablation measures: branches get
    successors after a lexical hit too.
    """

    @dataclass(frozen=True, slots=True)
    class Options:
        """Options of AdaPLD."""

        layer: float = option(
            0.8,
            "layer whose states choose the anchor: its number, or below 1 a share of all layers",
            least=0.001,
            tries=(0.5, 0.65, 0.9),
        )
        length: int = option(30, "most tokens copied (§4.3.2: 30)", least=1)
        branches: int = option(TOP, f"K, branch tokens (§4.3.2: 8), at most {TOP}", least=1, tries=(2, 4))
        threshold: float = option(
            0.1, "τ, least cosine of embeddings for the semantic fallback (§4.3.2: 0.1)", least=-1
        )
        no_branch: bool = option(False, "ablation: neither branches nor successors")
        no_successor: bool = option(False, "ablation: no successors")
        lexical_only: bool = option(False, "ablation: no semantic fallback")

    summary: ClassVar[str] = "copies from the best place by hidden state, branches by what the model expected there"
    source: ClassVar[str] = "AdaPLD"
    needs: frozenset[Signal] = frozenset({Signal.LAYER, Signal.CONTEXT_TOPK, Signal.EMBEDDING})

    def __init__(self, options: Options, resources: Resources = NO_RESOURCES) -> None:
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
        branches, after = tokens[:0], tokens[:0]
        if not options.no_branch:
            branches = anchors.expected(anchor)[: options.branches]
            branches = branches[(branches >= 0) & (branches != main[0])] if lexical else branches[branches >= 0]
            if not options.no_successor:
                after = anchors.successors(branches, anchor, semantic=not options.lexical_only)
        drafted, parents, score, source, place = _woven(tokens, anchor, len(main), branches, after, lexical)
        return Draft(drafted, parents, score, origin=Origin(_SOURCES, source, place))


@compiled
def _woven(tokens: Any, anchor: int, copied: int, branches: Any, after: Any, lexical: bool) -> Any:
    """The draft's arrays: main path, branches, and the tokens behind the positions `after`, where there is one."""
    most = copied + 2 * len(branches)
    drafted, parents, score = np.empty(most, np.int32), np.full(most, -1, np.int32), np.empty(most, np.float32)
    source, place = np.zeros(most, np.int8), np.full(most, -1, np.int32)
    further = 0 if lexical else _FURTHER
    for node in range(copied):
        drafted[node], parents[node], place[node] = tokens[anchor + 1 + node], node - 1, anchor + 1 + node
        score[node] = COPIED[min(node, len(COPIED) - 1)]
    node = copied
    for rank in range(len(branches)):
        drafted[node], source[node] = branches[rank], _BRANCH + further
        score[node] = _LEXICAL[rank] if lexical else _SEMANTIC[rank]
        node += 1
    for rank in range(len(after)):
        if after[rank] >= 0:
            drafted[node], source[node], place[node] = tokens[after[rank] + 1], _SUCCESSOR + further, after[rank] + 1
            parents[node] = copied + rank
            score[node] = _LEXICAL_NEXT if lexical else _SEMANTIC_NEXT
            node += 1
    return drafted[:node], parents[:node], score[:node], source[:node], place[:node]
