"""The dense index: hidden states, normalised and reduced, to the corpus positions they were computed at."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specds.datastore import ann
from specds.datastore.manifest import Segment
from specds.datastore.mapped import map_array
from specds.datastore.normalizer import Normalizer
from specds.errors import CorruptStore

_TOKEN_DTYPES = {"uint16": np.uint16, "uint32": np.uint32}
_POSITION_DTYPES = {"uint32": np.uint32, "uint64": np.uint64}


@dataclass(frozen=True, slots=True)
class DenseIndex:
    """Nearest hidden states, and what followed them (DReSD §3.5: keys are states, values the next tokens).

    Attributes:
        normalizer: hidden state → key.
        searcher: the ANN index over the keys.
        positions: uint32[n] or uint64[n], for each key where its continuation starts in `tokens`.
        tokens: uint16[m] or uint32[m], documents with the dtype's largest value after each; memory-mapped.
    """

    normalizer: Normalizer
    searcher: ann.Searcher
    positions: NDArray[Any]
    tokens: NDArray[Any]

    @classmethod
    def open(cls, directory: Path, segment: Segment) -> DenseIndex:
        """Open the files of a segment.

        Raises:
            CorruptStore: they are not what the manifest describes.
        """
        parameters = segment.parameters
        try:
            positions = map_array(
                directory / "positions.bin", _POSITION_DTYPES[parameters["position_dtype"]], int(parameters["keys"])
            )
            tokens = map_array(
                directory / "tokens.bin", _TOKEN_DTYPES[parameters["token_dtype"]], int(parameters["positions"])
            )
            normalizer = Normalizer.load(directory / "normalizer.safetensors")
            if normalizer.components.shape != (parameters["dims"], parameters["hidden_size"]):
                raise ValueError(f"the normalizer's components are {normalizer.components.shape}")
            if not all(np.isfinite(part).all() for part in (normalizer.mean, normalizer.scale, normalizer.components)):
                raise ValueError("the normalizer holds what is no number")
        except (KeyError, TypeError, ValueError, OverflowError, OSError) as error:
            raise CorruptStore(
                f"{directory} is not the dense index that the manifest describes: {error!r}",
                "run `specds build-dense` again",
            ) from error
        searcher = ann.load(directory / "keys", parameters, len(normalizer.components))
        return cls(normalizer, searcher, positions, tokens)

    def search(self, hidden: NDArray[np.float32], k: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """The k most similar positions to a hidden state.

        Args:
            hidden: float32[d], the last layer's final-normed hidden state.

        Returns:
            similarity float32[≤ k] (cosine, falling), and where each continuation starts in `tokens` int64[≤ k].
        """
        similarity, rows = self.searcher.search(self.normalizer.keys(hidden[None])[0], min(k, len(self.positions)))
        # A damaged index may name rows that are not there.
        real = (rows >= 0) & (rows < len(self.positions))
        return similarity[real], self.positions[rows[real]].astype(np.int64)

    def starting_with(self, positions: NDArray[np.int64], token: int) -> NDArray[np.int64]:
        """Indices of the positions at which a token stands."""
        return np.flatnonzero(self.tokens[np.clip(positions, 0, len(self.tokens) - 1)] == token)

    def continuations(self, positions: NDArray[np.int64], length: int) -> list[NDArray[np.int64]]:
        """Up to `length` tokens from each position on, cut at the document's end."""
        at = positions[:, None] + np.arange(length)
        block = self.tokens[np.clip(at, 0, len(self.tokens) - 1)].astype(np.int64)
        ended = (block == np.iinfo(self.tokens.dtype).max) | (at >= len(self.tokens)) | (at < 0)
        ends = np.where(ended.any(axis=1), ended.argmax(axis=1), length)
        return [row[:end] for row, end in zip(block, ends, strict=True)]
