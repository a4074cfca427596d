"""Rejection sampling: accept a drafted token by how likely the target finds it, else draw from what is left over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from specds.datastore.corrections import Pair
from specds.decode.contracts import Case, NoOptions, Verdict, Verifier
from specds.decode.draft import Draft
from specds.decode.verifiers.walk import Pick, follow, likeliest
from specds.sampling import Sampling, warp

# Token ids from here on are none of a model's: their noise decides acceptance, a model's own the draw.
_BEYOND = 1 << 40


class Rejection(Verifier):
    """Speculative sampling (Leviathan et al., 2023; Chen et al., 2023), on trees child by child.

    A drafted token is accepted with probability min(1, p / q); after a rejection p becomes the normalised positive
    part of p - q, from which the next child is judged and in the end a token is drawn (CSD, Eq. 2 and Algorithm 1,
    lines 8-14). The outputs are distributed as the target's, but are not those of plain sampling with the same seed.
    At temperature 0 this is exact matching.
    """

    independent: ClassVar[bool] = True
    lossless: ClassVar[bool] = True
    summary: ClassVar[str] = "speculative sampling: the target's distribution, though not the text of plain sampling"

    def __init__(self, options: NoOptions, sampling: Sampling, pair: Pair | None = None) -> None:
        self._picking = Picking(sampling)

    def verify(self, case: Case) -> Verdict:
        """See `Verifier.verify`."""
        return follow(case.draft, self._picking.over(case))


class Picking:
    """The target's token at each node under rejection sampling: the first accepted child, or a draw from the rest."""

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling

    def over(self, case: Case) -> Pick:
        """For one draft."""
        draft, logits = case.draft, case.logits
        if self._sampling.greedy:
            return likeliest(logits)
        below: dict[int, list[int]] = {}
        for node, parent in enumerate(draft.parents.tolist()):
            below.setdefault(parent, []).append(node)
        return lambda row, depth: self._token(case, below, row - 1, case.position + depth)

    def _token(self, case: Case, below: Mapping[int, list[int]], node: int, position: int) -> int:
        draft = case.draft
        kept, scaled = warp(case.logits[node + 1], self._sampling)
        p = np.exp(scaled - scaled.max())
        p /= p.sum()
        drafted = below.get(node, [])
        draws = np.exp(-np.exp(-case.noise.gumbel(position, _BEYOND + np.arange(len(drafted)))))  # uniform
        for draw, child in zip(draws, drafted, strict=True):
            token = int(draft.tokens[child])
            q = _proposed(draft, child, kept, token)
            place = int(np.searchsorted(kept, token))
            likely = p[place] if place < len(kept) and kept[place] == token else 0.0
            own = q[place] if likely else 1.0
            if draw * own < likely:
                return token
            p = np.maximum(p - q, 0.0)
            total = p.sum()
            if total <= 0.0:  # p and q agree but for rounding: nothing is left over, and nothing could be rejected
                return token
            p /= total
        with np.errstate(divide="ignore"):
            return int(kept[(np.log(p) + case.noise.gumbel(position, kept)).argmax()])


def _proposed(draft: Draft, child: int, kept: NDArray[np.int64], token: int) -> NDArray[np.float64]:
    """What the child was drawn from, on the kept tokens; of a deterministic draft all of it is on the token itself."""
    q: NDArray[np.float64]
    q = (kept == token).astype(np.float64) if draft.q is None else draft.q[child][kept].astype(np.float64)
    return q
