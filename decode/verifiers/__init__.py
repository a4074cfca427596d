"""Verifiers by name. A new one is a file here and a line below."""

from __future__ import annotations

from collections.abc import Mapping

from specds.datastore.corrections import Pair
from specds.decode.contracts import Verifier
from specds.decode.registry import load, parse_options
from specds.sampling import Sampling

VERIFIERS = {
    "greedy": "specds.decode.verifiers.greedy:Greedy",
    "sampling": "specds.decode.verifiers.sampling:PositionKeyed",
    "rejection": "specds.decode.verifiers.rejection:Rejection",
    "respec": "specds.decode.verifiers.respec:Relaxed",
    "csd": "specds.decode.verifiers.csd:Csd",
    "lossy": "specds.decode.verifiers.gates:Lossy",
    "ocm": "specds.decode.verifiers.gates:Recurring",
    "fly": "specds.decode.verifiers.gates:Fly",
}


def verifier_name(name: str, sampling: Sampling) -> str:
    """A verifier's name; for `auto` greedy at temperature 0 and sampling above it."""
    return name if name != "auto" else "greedy" if sampling.greedy else "sampling"


def verifier_class(name: str, sampling: Sampling) -> type[Verifier]:
    """A registered verifier; for `auto` the lossless one that fits the temperature.

    Raises:
        UsageError: there is none of that name.
    """
    kind: type[Verifier] = load(VERIFIERS, verifier_name(name, sampling), "verifier")
    return kind


def make_verifier(
    name: str, sampling: Sampling, settings: Mapping[str, str] | None = None, pair: Pair | None = None
) -> Verifier:
    """A verifier for all requests of an engine.

    Args:
        settings: its options, as text.
        pair: who drafts for whom; a correction table of another pair is refused.

    Raises:
        UsageError: no such verifier or option, or it does not fit the temperature.
        InputError, CorruptTable, ForeignTable: the correction table that it reads.
    """
    name = verifier_name(name, sampling)
    kind = verifier_class(name, sampling)
    options = parse_options(kind.Options, settings or {}, f"verifier {name}")
    return kind(options, sampling, pair)
