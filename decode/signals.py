"""What drafters ask for of a pass besides tokens, for all requests at once where that is faster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specds.decode.contracts import TOP, Forward, Signal, Signals, Target, Verdict
from specds.decode.request import Request
from specds.decode.top import entropies, rows_of, top_gaps, top_ids

_TREE = frozenset({Signal.TREE_TOPK, Signal.TREE_GAPS})
_KEPT = frozenset({Signal.LAYER, Signal.CONTEXT_TOPK})


class Observed:
    """The results of one pass.

    Args:
        needs: of each item what its drafter asks for.
    """

    def __init__(self, forward: Forward, needs: Sequence[frozenset[Signal]]) -> None:
        self._forward = forward
        self._ids: Any = None
        self._gaps: Any = None
        asked = frozenset[Signal]().union(*needs)
        if Signal.TREE_GAPS in asked:
            self._ids, self._gaps = top_gaps(forward.logits, TOP)
        elif asked & _TREE:
            self._ids = top_ids(forward.logits, TOP)

    def of(self, item: int, request: Request, verdict: Verdict, committed: int, target: Target) -> Signals:
        """What the drafter of one request, whose item's rows were committed, asks for.

        Args:
            committed: how many tokens.
        """
        needs = request.drafting.needs
        if not needs:
            return {}
        signals: dict[Signal, Any] = {}
        first, end = self._forward.ends[item], self._forward.ends[item + 1]
        begins = request.produced == 0
        if begins:
            first = end - 1  # of a prompt only what its last token says
        if needs & _TREE:
            signals[Signal.TREE_TOPK] = self._ids[first:end]
            if Signal.TREE_GAPS in needs:
                signals[Signal.TREE_GAPS] = self._gaps[first:end]
        # Token i of the step was predicted by row 0 and then by the row of the i-th accepted node.
        rows = [first, *(first + node + 1 for node in verdict.path)][:committed]
        if Signal.HIDDEN in needs and self._forward.hidden is not None:
            signals[Signal.HIDDEN] = rows_of(self._forward.hidden, rows)
        if Signal.TOPK in needs:
            signals[Signal.TOPK] = top_ids(self._forward.logits, TOP, rows)
        if Signal.ENTROPY in needs:
            signals[Signal.ENTROPY] = entropies(self._forward.logits, rows)
        if needs & _KEPT:
            assert request.slot is not None
            kept = target.activations(request.slot, 0 if begins else len(request.slot.tokens) - 1 - len(verdict.path))
            if kept.layer is not None:
                signals[Signal.LAYER] = kept.layer
            if kept.top is not None:
                signals[Signal.CONTEXT_TOPK] = kept.top
        if begins and Signal.EMBEDDING in needs:
            signals[Signal.EMBEDDING] = target.embed
        return signals
