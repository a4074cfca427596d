"""Lossy rules that CSD is compared with: the confidence gate alone, recurrence alone, and FLy's deferred window."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

from specds.datastore.corrections import FREQUENCY, Pair
from specds.decode.contracts import Case, Rescue, Verdict, Verifier
from specds.decode.registry import option
from specds.decode.top import entropies
from specds.decode.verifiers.csd import Csd
from specds.decode.verifiers.walk import below, descend, follow, likeliest
from specds.errors import UsageError
from specds.sampling import Sampling, unchecked


class Lossy(Verifier):
    """CSD's confidence gate alone (its Table 1: lossy SD; Table 3: SD with SCG). Lossy."""

    @dataclass(frozen=True, slots=True)
    class Options:
        """Options of the gate."""

        tau: float = option(
            0.6, "τ: least ratio of the drafted token's probability to the target's (§5.1: 0.6)", least=0
        )

    independent: ClassVar[bool] = True
    lossless: ClassVar[bool] = False
    summary: ClassVar[str] = "rejected tokens pass that the target finds nearly as likely as its own"

    def __init__(self, options: Options, sampling: Sampling, pair: Pair | None = None) -> None:
        # Without a memory every divergence has been seen often enough.
        self._csd = Csd(Csd.Options(frequency=0, tau=options.tau, update=False), sampling)

    def verify(self, case: Case) -> Verdict:
        """See `Verifier.verify`."""
        return self._csd.verify(case)


class Recurring(Verifier):
    """CSD's correction memory alone (its Table 3: SD with OCM). Lossy."""

    @dataclass(frozen=True, slots=True)
    class Options:
        """Options of the memory."""

        table: str = option("", "the correction table (Parquet); none: begin with no counts")
        frequency: int = option(FREQUENCY, "λ: how often a divergence must have been seen (§5.1: 6)", least=0)
        update: bool = option(True, "count the divergences of this run too")
        any_draft: bool = option(False, "take a table of another drafter or draft model of the same target")

    independent: ClassVar[bool] = True
    lossless: ClassVar[bool] = False
    summary: ClassVar[str] = "rejected tokens pass that recur, by a correction table, whatever the target thinks"

    def __init__(self, options: Options, sampling: Sampling, pair: Pair | None = None) -> None:
        same = Csd.Options(options.table, options.frequency, 0.0, options.update, options.any_draft)
        self._csd = Csd(same, sampling, pair)
        self.memory = self._csd.memory

    def verify(self, case: Case) -> Verdict:
        """See `Verifier.verify`."""
        return self._csd.verify(case)


class Fly(Verifier):
    """FLy (Li et al., 2025): where the target is unsure, a mismatch passes if the draft goes on to match. Lossy.

    A mismatch at a position whose entropy, as a share of the largest possible, is at most θ is rejected. Otherwise it
    is let pass if the next W drafted tokens are the target's own; where the draft ends before that, it is not.

    Raises:
        UsageError: the temperature is not 0.
    """

    @dataclass(frozen=True, slots=True)
    class Options:
        """Options of FLy."""

        entropy: float = option(
            0.05, "θ: least entropy over log(vocabulary) for a mismatch to pass (CSD, §5.1: 0.05)", least=0
        )
        window: int = option(6, "W: of the target's own tokens that must follow (CSD, §5.1: 6)", least=0)

    lossless: ClassVar[bool] = False
    summary: ClassVar[str] = "mismatches pass where the target is unsure and the draft goes on to match"

    def __init__(self, options: Options, sampling: Sampling, pair: Pair | None = None) -> None:
        if not sampling.greedy:
            raise UsageError(
                f"--verifier fly decodes greedily, and the temperature is {sampling.temperature}", "use --temperature 0"
            )
        self._options = options

    def verify(self, case: Case) -> Verdict:
        """See `Verifier.verify`."""
        draft, logits = case.draft, case.logits
        own, children = cache(likeliest(logits)), draft.children()
        largest = math.log(logits.shape[-1])

        def rescue(node: int, token: int, depth: int) -> Rescue | None:
            candidates = below(draft, node)
            if not candidates or float(entropies(logits, [node + 1])[0]) <= self._options.entropy * largest:
                return None
            row = unchecked(logits[node + 1])
            following = {child: len(descend(children, child, own, 0)[0]) for child in candidates}
            best = max(candidates, key=lambda child: (following[child], float(draft.score[child]), -child))
            if following[best] < self._options.window:
                return None
            return Rescue(best, token, float(row[draft.tokens[best]] - row[token]))

        return follow(draft, own, rescue)
