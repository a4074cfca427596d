"""What the requests of one engine have in common, for a drafter that weighs its drafts itself."""

from __future__ import annotations

from specds.decode.cost import Prices
from specds.decode.expansion import DENSE, MODEL
from specds.decode.feedback import Feedback, Worth
from specds.decode.ngrams import Followers, Rows


class Stream:
    """What the requests of one engine have in common.

    With a cost curve drafts are as large as pays, and sources that take long are asked as far as that pays. Without
    one they depend on nothing but the request: the budget is filled, and every source is asked.

    Args:
        curve: T(n) of the target.
        most: most nodes of a draft.
    """

    def __init__(self, curve: Prices | None = None, most: int | None = None) -> None:
        self.curve = curve
        limit = curve.rows[-1] - 1 if curve is not None else 127
        self.most = min(limit if most is None else most, limit)
        self.feedback = Feedback()
        self.worth = {DENSE: Worth(), MODEL: Worth()}
        self.drafts = Worth(trials=32, longest=32)
        self.session, self.rows = Followers(), Rows()
        self.drafting = 0.0
        """Seconds that drafting takes a step, lately."""

    def start(self) -> None:
        """A new request."""
        for worth in (*self.worth.values(), self.drafts):
            worth.start()
