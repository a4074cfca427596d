"""What a manifest says of an ANN index."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

KINDS = ("scann", "faiss")
KEYS = ("float32", "half", "int8", "none")
"""How keys are kept: as they are, in two bytes, in one, or only as the codes that a first look needs."""


@dataclass(frozen=True, slots=True)
class IndexShape:
    """What a manifest says of an index.

    Attributes:
        kind, kept: of KINDS and KEYS.
        keys, dims: float32[keys, dims] was indexed.
        leaves: cells of the partition; 0: none.
        searched: cells looked into for one query.
        search: as many as were asked for.
    """

    kind: str
    kept: str
    keys: int
    dims: int
    leaves: int
    searched: int
    search: int

    @classmethod
    def of(cls, parameters: dict[str, Any]) -> IndexShape:
        """Of the parameters in a manifest.

        Raises:
            ValueError: no index that `ann.build` makes has these.
        """
        kind, kept = parameters.get("ann"), parameters.get("kept")
        if kind not in KINDS:
            raise ValueError(f"no index kind {str(kind)[:40]!r}")
        if kept not in KEYS:
            raise ValueError(f"no way to keep keys called {str(kept)[:40]!r}")
        numbers = []
        for name in ("keys", "dims", "leaves", "leaves_searched", "search"):
            value = parameters.get(name)
            if type(value) is not int or not 0 <= value < 1 << 62:
                raise ValueError(f"{name} is {str(value)[:40]!r}")
            numbers.append(value)
        shape = cls(kind, kept, *numbers)
        if not shape.keys or not shape.dims:
            raise ValueError(f"{shape.keys} keys of {shape.dims} numbers")
        if (
            shape.leaves > shape.keys
            or shape.searched != min(shape.search, shape.leaves)
            or bool(shape.leaves) != bool(shape.searched)
        ):
            raise ValueError(f"{shape.searched:,} of {shape.leaves:,} cells are searched, of {shape.keys:,} keys")
        if kept == "none" and not shape.leaves:
            raise ValueError("there is neither a partition nor a key")
        return shape
