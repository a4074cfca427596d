"""Verification against a text that was written before: what its own model would have accepted of a draft."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from specds.decode.contracts import Case, Verdict, Verifier
from specds.decode.verifiers.walk import follow


class Recorded(Verifier):
    """The recorded token at each node of the recorded text, followed while it was drafted.

    That is what a lossless verifier does, at any temperature: the text does not depend on the drafts. The logits are
    not looked at.

    Args:
        text: the prompt and the answer. A token behind its end is -1, which nobody drafts.
    """

    lossless: ClassVar[bool] = True

    def __init__(self, text: Sequence[int]) -> None:
        self._text = text

    def verify(self, case: Case) -> Verdict:
        """See `Verifier.verify`."""
        return follow(case.draft, lambda row, depth: self._at(case.position + depth))

    def _at(self, position: int) -> int:
        return self._text[position] if position < len(self._text) else -1
