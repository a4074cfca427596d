"""The dense index: hidden states, normalised and reduced, to the corpus positions they were computed at."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specds.datastore import ann
from specds.datastore.by_token import MOST_NUMBERS, ByToken
from specds.datastore.manifest import Segment
from specds.datastore.mapped import map_array
from specds.datastore.normalizer import Normalizer
from specds.errors import CorruptStore

_TOKEN_DTYPES = {"uint16": np.uint16, "uint32": np.uint32}
_POSITION_DTYPES = {"uint32": np.uint32, "uint64": np.uint64}


@dataclass(frozen=True, slots=True)
class DensePart:
    """One segment of a dense index.

    Attributes:
        normalizer: hidden state → key.
        searcher: the ANN index over the keys.
        positions: uint32[n] or uint64[n], for each key where its continuation starts in `tokens`; the dtype's largest
            value for keys of documents that are gone.
        tokens: uint16[m] or uint32[m], documents with the dtype's largest value after each; memory-mapped.
        removed: how many keys are of documents that are gone.
        by_token: gives the keys once more, by the token that follows, made when it is first called; None if there are
            too many, or they are not kept. Raises CorruptStore.
    """

    normalizer: Normalizer
    searcher: ann.Searcher
    positions: NDArray[Any]
    tokens: NDArray[Any]
    removed: int
    by_token: Callable[[], ByToken | None]

    @classmethod
    def open(cls, directory: Path, segment: Segment) -> DensePart:
        """Open the files of a segment.

        Raises:
            CorruptStore: they are not what the manifest describes.
        """
        parameters = segment.parameters
        try:
            positions, tokens = map_values(directory, parameters)
            normalizer = Normalizer.load(directory / "normalizer.safetensors")
            if normalizer.components.shape != (parameters["dims"], parameters["hidden_size"]):
                raise ValueError(f"the normalizer's components are {normalizer.components.shape}")
            if not all(np.isfinite(part).all() for part in (normalizer.mean, normalizer.scale, normalizer.components)):
                raise ValueError("the normalizer holds a value that is not a number")
            removed = int(parameters["removed"])
        except (KeyError, TypeError, ValueError, OverflowError, OSError) as error:
            raise CorruptStore(
                f"{directory} is not the dense index that the manifest describes: {error!r}",
                "run `specds rebuild`",
            ) from error
        searcher = ann.load(directory / "keys", parameters, len(normalizer.components))

        @cache
        def by_token() -> ByToken | None:
            shape = len(positions), len(normalizer.components)
            if math.prod(shape) > MOST_NUMBERS:
                return None
            keys = ann.stored_keys(directory / "keys", parameters)
            return None if keys is None else ByToken(keys, positions, tokens)

        return cls(normalizer, searcher, positions, tokens, removed, by_token)

    def search(self, key: NDArray[np.float32], k: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """The k nearest keys that are not of removed documents: similarity, and positions in `tokens`."""
        wanted = k
        while True:
            similarity, rows = self.searcher.search(key, min(wanted, len(self.positions)))
            # A damaged index may name rows that are not there.
            real = (rows >= 0) & (rows < len(self.positions))
            similarity, positions = similarity[real], self.positions[rows[real]]
            if not self.removed:
                return similarity, positions.astype(np.int64)
            there = positions != np.iinfo(self.positions.dtype).max
            # Removed ones took the place of others: ask for more of them.
            if there.sum() >= k or len(rows) < wanted:
                return similarity[there][:k], positions[there][:k].astype(np.int64)
            wanted *= 2

    def search_followed_by(
        self, key: NDArray[np.float32], token: int, k: int
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """As `search`, of keys that a token follows: k of these, or those among the 2 k nearest of all."""
        by_token = self.by_token()
        neighbours = None if by_token is None else by_token.search(key, token, k)
        if neighbours is not None:
            return neighbours
        similarity, positions = self.search(key, 2 * k)
        right = np.flatnonzero(_tokens(self.tokens, positions) == token)[:k]
        return similarity[right], positions[right]


def map_values(directory: Path, parameters: dict[str, Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """A segment's positions and tokens, memory-mapped.

    Raises:
        KeyError, TypeError, ValueError, OverflowError, OSError: they are not what the parameters say.
    """
    return (
        map_array(directory / "positions.bin", _POSITION_DTYPES[parameters["position_dtype"]], int(parameters["keys"])),
        map_array(directory / "tokens.bin", _TOKEN_DTYPES[parameters["token_dtype"]], int(parameters["positions"])),
    )


@dataclass(frozen=True, slots=True)
class DenseIndex:
    """Nearest hidden states, and what followed them (DReSD §3.5: keys are states, values the next tokens).

    Attributes:
        parts: the segments, concatenated: a position counts through all their tokens.
        starts: int64[parts], where each part's tokens start.
    """

    parts: tuple[DensePart, ...]
    starts: NDArray[np.int64]

    @classmethod
    def open(cls, root: Path, segments: Sequence[Segment]) -> DenseIndex:
        """Open segments of one kind of hidden state.

        Raises:
            CorruptStore: they are not what the manifest describes.
        """
        parts: list[DensePart] = []
        for segment in segments:
            part = DensePart.open(root / segment.directory, segment)
            # Segments that grew from one another have equal normalizers; a query passes each one once.
            twin = next((one.normalizer for one in parts if one.normalizer.same(part.normalizer)), part.normalizer)
            parts.append(dataclasses.replace(part, normalizer=twin))
        lengths = [len(part.tokens) for part in parts]
        return cls(tuple(parts), np.cumsum([0, *lengths[:-1]]).astype(np.int64))

    def search(self, hidden: NDArray[np.float32], k: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """The k most similar positions to a hidden state.

        Args:
            hidden: float32[d], the last layer's final-normed hidden state.

        Returns:
            similarity float32[≤ k] (cosine, falling), and where each continuation starts, int64[≤ k].
        """
        return self._search(hidden, k, None)

    def search_followed_by(
        self, hidden: NDArray[np.float32], token: int, k: int
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """The most similar positions to a hidden state of those where a token stands.

        All keys that the token follows are compared. In a segment where an approximate search is cheaper than comparing
        these, or where keys are not kept as numbers, it is those among the 2 k nearest keys.

        Returns:
            similarity float32[≤ k] (to within 0.01, falling), and where each continuation starts, int64[≤ k].
        """
        return self._search(hidden, k, token)

    def _search(
        self, hidden: NDArray[np.float32], k: int, token: int | None
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        candidates = []
        keys: dict[int, NDArray[np.float32]] = {}
        for part, start in zip(self.parts, self.starts, strict=True):
            if id(part.normalizer) not in keys:
                keys[id(part.normalizer)] = part.normalizer.key(hidden)
            key = keys[id(part.normalizer)]
            similarity, positions = part.search(key, k) if token is None else part.search_followed_by(key, token, k)
            if len(self.parts) == 1:
                return similarity, positions
            candidates.append((similarity, positions + start))
        similarity, positions = (np.concatenate(column) for column in zip(*candidates, strict=True))
        best = np.argsort(-similarity, kind="stable")[:k]
        return similarity[best], positions[best]

    def alone(self, token: int) -> tuple[DensePart, ByToken] | None:
        """The index's only segment, if all its keys that a token follows can be compared; else None."""
        part = self.parts[0]
        by_token = part.by_token() if len(self.parts) == 1 else None
        return None if by_token is None or not by_token.compares(token) else (part, by_token)

    def starting_with(self, positions: NDArray[np.int64], token: int) -> NDArray[np.int64]:
        """Indices of the positions at which a token stands."""
        return np.flatnonzero(self._tokens(positions) == token)

    def continuations(self, positions: NDArray[np.int64], length: int) -> list[NDArray[np.int64]]:
        """Up to `length` tokens from each position on, cut at the document's end."""
        block = self.following(positions, length)
        ended = block < 0
        ends = np.where(ended.any(axis=1), ended.argmax(axis=1), length)
        return [row[:end] for row, end in zip(block, ends, strict=True)]

    def following(self, positions: NDArray[np.int64], length: int) -> NDArray[np.int64]:
        """int64[n, length]: the tokens from each position on; -1 where its document ends, and after that others'."""
        return self._tokens(positions[:, None] + np.arange(length))

    def _tokens(self, at: NDArray[np.int64]) -> NDArray[np.int64]:
        """The tokens at these places; -1 where a document ends, or past the end of all."""
        if len(self.parts) == 1:
            return _tokens(self.parts[0].tokens, at)
        owner = np.searchsorted(self.starts, at, side="right") - 1
        tokens = np.full(at.shape, -1, np.int64)
        for number in np.unique(owner[owner >= 0]):
            mine = owner == number
            tokens[mine] = _tokens(self.parts[number].tokens, at[mine] - self.starts[number])
        return tokens


def _tokens(tokens: NDArray[Any], at: NDArray[np.int64]) -> NDArray[np.int64]:
    followers = tokens[np.clip(at, 0, len(tokens) - 1)].astype(np.int64)
    followers[(followers == np.iinfo(tokens.dtype).max) | (at < 0) | (at >= len(tokens))] = -1
    return followers
