"""Greedy verification: a drafted token is accepted when it is the target's most likely one."""

from __future__ import annotations

from typing import ClassVar

import torch

from specds.decode.contracts import Verdict
from specds.decode.draft import Draft
from specds.decode.verifiers.walk import follow
from specds.errors import UsageError
from specds.sampling import Noise, Sampling, numbers


class Greedy:
    """Follow the argmax through the draft; the text is that of greedy decoding."""

    lossless: ClassVar[bool] = True
    summary: ClassVar[str] = "the target's most likely token at each node, followed while it was drafted"

    @classmethod
    def build(cls, sampling: Sampling, noise: Noise) -> Greedy:
        """For one request.

        Raises:
            UsageError: the temperature is not 0.
        """
        if not sampling.greedy:
            raise UsageError(
                f"--verifier greedy does not sample, and the temperature is {sampling.temperature}",
                "use --verifier sampling, or --temperature 0",
            )
        return cls()

    def verify(self, draft: Draft, logits: torch.Tensor, position: int) -> Verdict:
        """See `Verifier.verify`. From another device one transfer: the argmax of every row."""
        if logits.device.type == "cpu" and logits.dtype == torch.float32:
            # One row at a time, and torch's threads stay asleep.
            return follow(draft, lambda row, depth: int(numbers(logits[row]).argmax()))
        picks = logits.argmax(dim=-1).tolist()
        return follow(draft, lambda row, depth: picks[row])
