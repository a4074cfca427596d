"""Verification under sampling: a drafted token is accepted when it is the one that would have been drawn."""

from __future__ import annotations

from typing import ClassVar

from specds.datastore.corrections import Pair
from specds.decode.contracts import Case, NoOptions, Verdict, Verifier
from specds.decode.verifiers.walk import follow
from specds.sampling import Sampling, known, pick, pick_rows


class PositionKeyed(Verifier):
    """Draw the target's token at each node with noise keyed by its position, and follow it if it was drafted.

    The draw does not depend on the draft, so the text is that of plain sampling with the same seed.
    """

    lossless: ClassVar[bool] = True
    summary: ClassVar[str] = "the token that plain sampling with this seed draws at each node, followed while drafted"

    def __init__(self, options: NoOptions, sampling: Sampling, pair: Pair | None = None) -> None:
        self._sampling = sampling

    def verify(self, case: Case) -> Verdict:
        """See `Verifier.verify`. On a GPU every row is drawn there, with one transfer."""
        draft, logits, position, noise = case.draft, case.logits, case.position, case.noise
        if logits.device.type != "cpu":
            depths = [0, *draft.depths().tolist()]
            picks = pick_rows(logits, self._sampling, noise, [position + depth for depth in depths])
            return follow(draft, lambda row, depth: known(picks[row]))
        return follow(draft, lambda row, depth: pick(logits[row], self._sampling, noise, position + depth))
