"""Verifiers by name. A new one is a file here and a line below."""

from __future__ import annotations

from collections.abc import Mapping

from specds.decode.contracts import Verifier
from specds.decode.registry import load, parse_options
from specds.sampling import Sampling

VERIFIERS = {
    "greedy": "specds.decode.verifiers.greedy:Greedy",
    "sampling": "specds.decode.verifiers.sampling:PositionKeyed",
    "respec": "specds.decode.verifiers.respec:Relaxed",
}


def verifier_name(name: str, sampling: Sampling) -> str:
    """A verifier's name; for `auto` greedy at temperature 0 and sampling above it."""
    return name if name != "auto" else "greedy" if sampling.greedy else "sampling"


def make_verifier(name: str, sampling: Sampling, settings: Mapping[str, str] | None = None) -> Verifier:
    """A verifier for all requests of an engine.

    Args:
        settings: its options, as text.

    Raises:
        UsageError: no such verifier or option, or it does not fit the temperature.
    """
    name = verifier_name(name, sampling)
    found = load(VERIFIERS, name, "verifier")
    verifier: Verifier = found(parse_options(found.Options, settings or {}, f"verifier {name}"), sampling)
    return verifier
