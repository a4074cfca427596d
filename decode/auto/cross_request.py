"""Cross-request state: what the requests of one engine share, for a drafter that weighs its drafts itself."""

from __future__ import annotations

from specds.decode.auto.acceptance import Acceptance, shipped
from specds.decode.auto.features import DENSE, MODEL
from specds.decode.auto.feedback import Feedback
from specds.decode.auto.ngrams import Followers, Likeliest
from specds.decode.pricing.benefit import Benefit
from specds.decode.pricing.curve import Prices

# Most nodes of a draft where no curve says how many.
_MOST = 127
# Trials and longest pause of drafting itself, which is cheap to try.
DRAFTING_TRIALS, DRAFTING_PAUSE = 32, 32


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
        self.feedback = Feedback()
        self.benefit = {DENSE: Benefit(), MODEL: Benefit()}
        """Of asking each source that takes long."""
        self.draft_benefit = Benefit(DRAFTING_TRIALS, DRAFTING_PAUSE)
        """Of drafting at all."""
        self.answers, self.likeliest = Followers(), Likeliest()
        """Counts over earlier answers, and rows of likeliest tokens of all requests."""
        self.drafting = 0.0
        """Seconds that drafting takes a step, lately."""

    def fresh(self) -> CrossRequest:
        """One that has learned nothing yet."""
        return CrossRequest(self.curve, self.most, self.acceptance)

    def start(self) -> None:
        """A new request."""
        for benefit in (*self.benefit.values(), self.draft_benefit):
            benefit.start()
