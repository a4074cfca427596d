"""Verifiers by name. A new one is a file here and a line below."""

from __future__ import annotations

from collections.abc import Sequence

from specds.decode.contracts import Verifier
from specds.decode.registry import load
from specds.sampling import Noise, Sampling

VERIFIERS = {
    "greedy": "specds.decode.verifiers.greedy:Greedy",
    "sampling": "specds.decode.verifiers.sampling:PositionKeyed",
}


def make_verifier(name: str, sampling: Sampling, prompt: Sequence[int], sample: int = 0) -> Verifier:
    """The verifier of one request; `auto` is greedy at temperature 0 and sampling above it.

    Raises:
        UsageError: no such verifier, or it does not fit the temperature.
    """
    if name == "auto":
        name = "greedy" if sampling.greedy else "sampling"
    verifier: Verifier = load(VERIFIERS, name, "verifier").build(sampling, Noise.of(sampling.seed, prompt, sample))
    return verifier
