"""Cross-request state: what the requests of one engine share, for a drafter that weighs its drafts itself."""

from __future__ import annotations

import numpy as np

from specds.decode.auto.acceptance import Acceptance, shipped
from specds.decode.auto.features import DENSE, MODEL
from specds.decode.auto.feedback import no_corrections
from specds.decode.auto.ngrams import Followers, Likeliest
from specds.decode.pricing.benefit import Gains
from specds.decode.pricing.budget import Terms
from specds.decode.pricing.curve import Prices

# Most nodes of a draft where no curve says how many.
_MOST = 127


class CrossRequest:
    """What the requests of one engine share.

    With a cost curve drafts are as large as pays, and sources that take long are asked as far as that pays. Without
    one they depend on nothing but the request: the budget is filled, and every source is asked.

    Args:
        curve: T(n) of the target.
        most: most nodes of a draft.
        acceptance: how probable it is that a node is accepted; default: what comes with specds.
    """

    def __init__(
        self, curve: Prices | None = None, most: int | None = None, acceptance: Acceptance | None = None
    ) -> None:
        self.curve = curve
        self.acceptance = acceptance or shipped()
        limit = curve.rows[-1] - 1 if curve is not None else _MOST
        self.most = min(limit if most is None else most, limit)
        self.terms = Terms(np.ones(self.most + 2))
        """On which the next pass takes drafts."""
        self.corrections = no_corrections()
        """How far sources came true in all requests."""
        self.gains = {DENSE: Gains(), MODEL: Gains()}
        """Of asking each source that takes long."""
        self.draft_gains = Gains()
        """Of drafting at all."""
        self.answers, self.likeliest = Followers(), Likeliest()
        """Counts over earlier answers, and rows of likeliest tokens of all requests."""

    def fresh(self) -> CrossRequest:
        """One that has learned nothing yet."""
        return CrossRequest(self.curve, self.most, self.acceptance)
