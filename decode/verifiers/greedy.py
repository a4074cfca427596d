"""Greedy verification: a drafted token is accepted when it is the target's most likely one."""

from __future__ import annotations

from typing import ClassVar

from specds.datastore.corrections import Pair
from specds.decode.contracts import Case, NoOptions, Verdict, Verifier
from specds.decode.verifiers.walk import follow, likeliest
from specds.errors import UsageError
from specds.sampling import Sampling


class Greedy(Verifier):
    """Follow the argmax through the draft; the text is that of greedy decoding.

    Raises:
        UsageError: the temperature is not 0.
    """

    lossless: ClassVar[bool] = True
    summary: ClassVar[str] = "the target's most likely token at each node, followed while it was drafted"

    def __init__(self, options: NoOptions, sampling: Sampling, pair: Pair | None = None) -> None:
        if not sampling.greedy:
            raise UsageError(
                f"--verifier greedy does not sample, and the temperature is {sampling.temperature}",
                "use --verifier sampling, or --temperature 0",
            )

    def verify(self, case: Case) -> Verdict:
        """See `Verifier.verify`. From another device one transfer: the argmax of every row."""
        return follow(case.draft, likeliest(case.logits))
