"""The sources of tokens that drafter auto merges, and the features of a node that its probability is told by.

How to add a source stands in CONTRIBUTING.md: a line in the table here, a function in `sources/`.
"""

from __future__ import annotations

from typing import NamedTuple

from specds.decode.draft import Source


class _Listed(NamedTuple):
    """A source in the table.

    Attributes:
        name: as traces, options and messages show it.
        retrieved: its tokens are copied from text, not guessed by a model.
        features: what it says of a node. These names stand in files of calibrations.
    """

    name: str
    retrieved: bool
    features: tuple[str, ...]


_TABLE = (
    _Listed(
        "context", True, ("context order", "context own order", "context share", "context count", "context recent")
    ),
    _Listed("session", True, ("session order", "session own order", "session share", "session count")),
    _Listed(
        "suffix", True, ("suffix length", "suffix share", "suffix count", "suffix second share", "suffix third share")
    ),
    _Listed("recycling", False, ("recycling order", "recycling rank", "recycling gap", "recycling lead")),
    _Listed("alternatives", False, ("runner-up rank", "runner-up gap")),
    _Listed("dense", True, ("dense share", "dense weight", "dense similarity", "dense margin")),
    _Listed("model", False, ("model score",)),
)
SOURCES = tuple(source.name for source in _TABLE)
"""What proposes tokens; a node's source is the set of those that proposed it, as bits."""
CONTEXT, SESSION, SUFFIX, RECYCLING, ALTERNATIVES, DENSE, MODEL = range(len(SOURCES))

ORIGINS = tuple(
    Source(
        "+".join(name for bit, name in enumerate(SOURCES) if mask >> bit & 1),
        # What a text and the model agree on was copied, whoever else guessed it.
        retrieved=any(source.retrieved for bit, source in enumerate(_TABLE) if mask >> bit & 1),
    )
    for mask in range(1 << len(SOURCES))
)
"""The sources of nodes, by their bits."""

_OF_EVERY_NODE = ("depth", "lead", "entropy")
FEATURES = (*_OF_EVERY_NODE, *(name for source in _TABLE for name in source.features), "agreement")
"""What a node's probability is made of, a column each. Depth counts from 1. Lead (the margin between the two largest
logits) and entropy are those of the distribution that the last token was picked from, by its TOP likeliest tokens.
Orders are numbers of last tokens by which the source knows the node's parent, or the node; shares are of the times that
it did; -1: the source does not know the parent. Agreement is how many sources proposed the node."""
DEPTH, MARGIN, ENTROPY = range(len(_OF_EVERY_NODE))
AGREEMENT = len(FEATURES) - 1


def columns(source: int) -> tuple[int, ...]:
    """The columns of a source's features, in the table's order."""
    return tuple(FEATURES.index(name) for name in _TABLE[source].features)
