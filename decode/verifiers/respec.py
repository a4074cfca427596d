"""ReSpec's relaxed verification: a near miss of a retrieved draft is let pass if the text goes on as drafted."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch

from specds.datastore.corrections import Pair
from specds.decode.contracts import Case, Rescue, Verdict, Verifier
from specds.decode.draft import Draft
from specds.decode.registry import option
from specds.decode.verifiers.walk import below, descend, follow, likeliest
from specds.errors import UsageError
from specds.sampling import Sampling, unchecked


class Relaxed(Verifier):
    """Source-aware relaxed verification with look-ahead tolerance (ReSpec, §3.4). Lossy.

    Where the target's most likely token was not drafted, a drafted one is accepted that was retrieved (copied from
    text), is among the target's k likeliest (Eq. 6), within τ of the likeliest (Eq. 7), and followed by at least m
    drafted tokens that are the target's own; of several the one that leads furthest. What a fallback drafter guessed
    is verified strictly. The paper lets an attempt that finds fewer than m matches go on behind them; here it ends the
    step, so that every token let pass is followed by m of the target's own.

    Raises:
        UsageError: the temperature is not 0 (§4.1: greedy decoding).
    """

    @dataclass(frozen=True, slots=True)
    class Options:
        """Options of relaxed verification."""

        k: int = option(3, "a token let pass is among the target's k likeliest (Eq. 6)", least=1)
        tau: float = option(
            3.0, "τ: log-probability that it may lack to the likeliest (Eq. 7; §4.3: ≤ 3); 0: strict", least=0
        )
        matches: int = option(3, "m: of the target's own tokens that must follow (§4.3: ≤ 3)", least=0)
        attempts: int = option(2, "Φ: tokens let pass in one step; 0: strict", least=0)

    lossless: ClassVar[bool] = False
    summary: ClassVar[str] = "greedy, but near misses of copied drafts pass if the copy goes on to match"

    def __init__(self, options: Options, sampling: Sampling, pair: Pair | None = None) -> None:
        if not sampling.greedy:
            raise UsageError(
                f"--verifier respec decodes greedily, and the temperature is {sampling.temperature}",
                "use --temperature 0",
            )
        self._options = options

    def verify(self, case: Case) -> Verdict:
        """See `Verifier.verify`."""
        draft, logits = case.draft, case.logits
        options, children = self._options, draft.children()
        own = cache(likeliest(logits))
        attempts = options.attempts if options.tau > 0 else 0

        def rescue(node: int, token: int, depth: int) -> Rescue | None:
            nonlocal attempts
            attempts -= 1
            best, furthest = None, options.matches - 1
            for near in self._near(draft, logits, node, token) if attempts >= 0 else []:
                matches = len(descend(children, near.node, own, 0)[0])
                if matches > furthest:
                    best, furthest = near, matches
            return best

        return follow(draft, own, rescue)

    def _near(self, draft: Draft, logits: torch.Tensor, node: int, picked: int) -> list[Rescue]:
        """The retrieved children of a node that satisfy Eq. 6 and 7, as they were proposed."""
        if draft.origin is None:
            return []
        retrieved = draft.origin.retrieved()
        candidates = [child for child in below(draft, node) if retrieved[child]]
        if not candidates:
            return []
        row = unchecked(logits[node + 1])
        found = []
        for child in candidates:
            value = row[draft.tokens[child]]
            # log p differs from the logits by the same number for all tokens.
            ratio = float(value - row[picked])
            if -ratio <= self._options.tau and int((row > value).sum()) < self._options.k:
                found.append(Rescue(child, picked, ratio))
        return found
