"""The probability that a drafted token is accepted, by what its sources say: a fitted model, kept as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from specds.decode.auto.features import FEATURES
from specds.decode.auto.probability import Ensemble
from specds.errors import InputError, OutputError
from specds.files import write_atomically

FORMAT = "specds acceptance 1"
_MOST_BYTES = 4 << 20
_MOST_TREES, _MOST_NODES, _DEEPEST = 1024, 1 << 16, 64
_FIELDS = ("roots", "feature", "threshold", "left", "right")


@dataclass(frozen=True, slots=True)
class Reliability:
    """How right probabilities are, on answers that were not used to fit them.

    Attributes:
        edges: of the bins of probability, one more than there are bins.
        counts: nodes in each bin.
        promised, accepted: in each bin the mean probability, and the share of nodes that were right.
        error: the expected calibration error: the mean over nodes of their bin's |promised - accepted|.
        likely: the same over nodes of probability 0.1 and more, those that decide what is drafted.
    """

    edges: tuple[float, ...]
    counts: tuple[int, ...]
    promised: tuple[float, ...]
    accepted: tuple[float, ...]
    error: float
    likely: float

    def record(self) -> dict[str, Any]:
        """As JSON."""
        return {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def of(cls, record: Any) -> Reliability:
        """What `record` gave.

        Raises:
            ValueError, KeyError, TypeError: it did not.
        """
        lists = {name: tuple(map(float, record[name])) for name in ("edges", "promised", "accepted")}
        counts = tuple(map(int, record["counts"]))
        error, likely = float(record["error"]), float(record["likely"])
        sizes = {len(counts), len(lists["promised"]), len(lists["accepted"]), len(lists["edges"]) - 1}
        numbers = [error, likely, *counts, *(value for values in lists.values() for value in values)]
        if len(sizes) != 1 or len(counts) > 100 or not all(map(math.isfinite, numbers)) or min(numbers) < 0:
            raise ValueError("no reliability table")
        return cls(lists["edges"], counts, lists["promised"], lists["accepted"], error, likely)


@dataclass(frozen=True, slots=True)
class Acceptance:
    """A fitted model.

    Attributes:
        ensemble: trees over FEATURES.
        reliability: on held-out answers; None if nobody measured it.
        about: what it was fitted on: `model` and `fingerprint` of the target, `nodes`, `prompts`, and so on.
    """

    ensemble: Ensemble
    reliability: Reliability | None = None
    about: Mapping[str, Any] = field(default_factory=dict)

    def record(self) -> dict[str, Any]:
        """What it was fitted on and how right it is, as JSON; without the trees."""
        return {**self.about, "reliability": None if self.reliability is None else self.reliability.record()}

    def save(self, path: Path) -> None:
        """Write it, whole or not at all.

        Raises:
            OutputError: it cannot be written.
        """
        base, *arrays = self.ensemble
        record = {
            "format": FORMAT,
            "features": FEATURES,
            "about": dict(self.about),
            "reliability": None if self.reliability is None else self.reliability.record(),
            "base": base,
            **{
                name: [round(float(one), 5) for one in values] if name == "threshold" else values.tolist()
                for name, values in zip(_FIELDS, arrays, strict=True)
            },
        }
        try:
            write_atomically(path, (json.dumps(record, separators=(",", ":")) + "\n").encode())
        except OSError as error:
            raise OutputError(f"cannot write {path}: {error.strerror or error}", "choose another --output") from error


def load_acceptance(path: Path) -> Acceptance:
    """Read a fitted model.

    Raises:
        InputError: it cannot be read, or is none.
    """
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ValueError("it is too large")
        return _parse(path.read_bytes())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise InputError(
            f"{path} is not a calibration of drafts: {str(why)[:200]}", "`specds calibrate-drafts` writes one"
        ) from error


@cache
def shipped() -> Acceptance:
    """The model that comes with the package."""
    return _parse(files("specds.decode.auto").joinpath("acceptance.json").read_bytes())


def calibration_path(store: Path) -> Path:
    """Where the calibration of drafts for a store is kept: beside it."""
    return store.with_name(store.name.rstrip("/") + ".drafts.json")


def choose_acceptance(calibration: str, stores: Sequence[Path], fingerprint: str) -> Acceptance:
    """The model named, or what lies beside the first store that has one of this target, or what comes with specds.

    Raises:
        InputError: what is named, or lies there, is no calibration.
    """
    if calibration:
        return load_acceptance(Path(calibration))
    for store in stores:
        path = calibration_path(store)
        if path.is_file():
            found = load_acceptance(path)
            if found.about.get("fingerprint") == fingerprint:
                return found
    return shipped()


def _parse(content: bytes) -> Acceptance:
    record = json.loads(content)
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise ValueError(f"its format is not {FORMAT!r}")
    if record["features"] != list(FEATURES):
        raise ValueError("it was fitted to other features")
    arrays = {name: _numbers(record[name], name) for name in _FIELDS}
    roots, size = arrays["roots"], len(arrays["feature"])
    if len(roots) > _MOST_TREES or size > _MOST_NODES or any(len(arrays[name]) != size for name in _FIELDS[1:]):
        raise ValueError("its arrays do not fit each other")
    own = np.arange(size)
    inner = arrays["feature"] >= 0
    # A child stands behind its node, so that every way down ends.
    for name in ("left", "right"):
        child = arrays[name][inner]
        if ((child <= own[inner]) | (child >= size)).any():
            raise ValueError("its trees are no trees")
    if ((roots < 0) | (roots >= size)).any() or (arrays["feature"] >= len(FEATURES)).any():
        raise ValueError("its arrays do not fit each other")
    base = float(record["base"])
    if not math.isfinite(base) or abs(base) > 1e3 or (np.abs(arrays["threshold"]) > 1e6).any():
        raise ValueError("its numbers are too large")
    about, measured = record.get("about") or {}, record.get("reliability")
    if not isinstance(about, dict):
        raise ValueError("it does not say what it is about")
    whole = {name: arrays[name].astype(np.int32) for name in ("roots", "feature", "left", "right")}
    ensemble = Ensemble(
        base,
        whole["roots"],
        whole["feature"],
        arrays["threshold"].astype(np.float32),
        whole["left"],
        whole["right"],
    )
    return Acceptance(ensemble, None if measured is None else Reliability.of(measured), about)


def _numbers(values: Any, name: str) -> Any:
    kinds = (int, float) if name == "threshold" else (int,)
    if not isinstance(values, list) or not all(type(one) in kinds for one in values):
        raise ValueError(f"its {name} are no numbers")
    found = np.array(values, np.float64)
    if not np.isfinite(found).all() or (name != "threshold" and (np.abs(found) > _MOST_NODES).any()):
        raise ValueError(f"its {name} are no numbers")
    return found
