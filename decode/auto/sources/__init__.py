"""The sources by name: one file each, and a line in `ask_sources`. Their features stand in `auto/features.py`."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from specds.decode.auto.features import ALTERNATIVES, CONTEXT, DENSE, MODEL, RECYCLING, SESSION, SUFFIX
from specds.decode.auto.ngrams import LikeliestRows
from specds.decode.auto.sources.alternatives import from_alternatives
from specds.decode.auto.sources.counts import from_counts
from specds.decode.auto.sources.dense import from_dense
from specds.decode.auto.sources.model import from_model
from specds.decode.auto.sources.recycling import from_recycling
from specds.decode.auto.sources.suffix import from_suffix
from specds.decode.auto.tries import Trees
from specds.jit import compiled_inside


class Picked(NamedTuple):
    """The distribution that the text's last token was picked from, by its TOP likeliest tokens.

    Attributes:
        tokens: int32[m]: the alternatives, likeliest first; the picked one is not among them.
        gaps: float32[m]: by how much the logit of each is below the largest.
        margin: between the largest logit and the second.
        entropy: in nats.
    """

    tokens: NDArray[np.int32]
    gaps: NDArray[np.float32]
    margin: float
    entropy: float


class Known(NamedTuple):
    """What the sources know at one step.

    Attributes:
        active: the sources that are asked, as bits.
        context, session: int32[n, 16]: counts over the text, and over earlier answers: `Followers.rows`.
        likeliest: rows of likeliest tokens.
        picked: of the text's last token.
        trees: what stores and a draft model were asked for.
        similarity, margin: of the dense index's best neighbour, and by how much the second is less similar.
    """

    active: int
    context: NDArray[np.int32]
    session: NDArray[np.int32]
    likeliest: LikeliestRows
    picked: Picked
    trees: Trees
    similarity: float = 0.0
    margin: float = 0.0


@compiled_inside
def ask_sources(known: Any, tries: Any, position: Any, candidates: Any) -> None:
    """Let every active source propose what follows a node; where room runs out, those asked first count.

    Args:
        known: `Known`, whose trees are `tries`.
        position: `Position`.
        candidates: `Candidates`, cleared.
    """
    active = known.active
    if active >> CONTEXT & 1:
        from_counts(known.context, CONTEXT, position, candidates)
    if active >> SESSION & 1:
        from_counts(known.session, SESSION, position, candidates)
    if active >> SUFFIX & 1:
        from_suffix(tries, position, candidates)
    if active >> DENSE & 1:
        from_dense(tries, position, candidates)
    if active >> MODEL & 1:
        from_model(tries, position, candidates)
    if active >> RECYCLING & 1:
        from_recycling(known.likeliest, position, candidates)
    if active >> ALTERNATIVES & 1:
        from_alternatives(known.picked, position, candidates)
