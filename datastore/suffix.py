"""The static suffix index: every occurrence of the context's last tokens in the corpus, in microseconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from specds.datastore.manifest import Segment
from specds.datastore.mapped import map_array
from specds.errors import CorruptStore

if TYPE_CHECKING:
    from specds.datastore.suffix_parts import Parts

_TOKEN_DTYPES = {"uint16": np.uint16, "uint32": np.uint32}
_SA_DTYPES = {"int32": np.int32, "int64": np.int64}


@dataclass(frozen=True, slots=True, eq=False)
class Match:
    """Where the longest matching suffix of a context stands.

    Attributes:
        length: tokens matched; 0 for no match.
        ranges: int64[S, 2], for each segment the range of its suffix array that holds all occurrences.
    """

    length: int
    ranges: NDArray[np.int64]

    @property
    def occurrences(self) -> int:
        """How often the matched tokens stand in the corpus."""
        return sum(high - low for low, high in self.ranges.tolist())


@dataclass(frozen=True, slots=True)
class SuffixIndex:
    """Suffix arrays over all segments of the corpus, memory-mapped; matches never cross a document's end.

    What is answered does not depend on how the documents are spread over segments.

    Attributes:
        parts: for each segment its tokens, documents with the dtype's largest value after each, and their suffix
            array: start positions in lexicographic order of what follows.
    """

    parts: Parts

    @classmethod
    def open(cls, root: Path, segments: Sequence[Segment]) -> SuffixIndex:
        """Map the files of segments.

        Args:
            root: the store's directory.
            segments: as the manifest lists them.

        Raises:
            CorruptStore: a dtype or length in the manifest does not fit the files.
        """
        from specds.datastore.suffix_parts import Parts

        return cls(Parts([map_segment(root / segment.directory, segment) for segment in segments]))

    def warm_up(self) -> None:
        """Compile the lookups now, not in the time of the first answer (seconds once, then from numba's cache)."""
        match = self.match(np.zeros(2, np.int64))
        self.continuations(Match(0, np.zeros_like(match.ranges)), 1, 1)

    def match(self, context: NDArray[np.int64], max_match: int = 16, min_match: int = 2) -> Match:
        """The longest suffix of the context that stands in the corpus with something after it (REST, §3.2).

        Args:
            context: int64[m] token ids; only the last `max_match` matter.
            max_match, min_match: longest and shortest suffix looked up.
        """
        from specds.datastore.suffix_match import longest_match

        return Match(*longest_match(self.parts, context, max_match, min_match))

    def continuations(
        self, match: Match, max_depth: int = 10, max_nodes: int = 64
    ) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int64]]:
        """The counted tree of what follows all occurrences of a match.

        Returns:
            tokens int32[k], parents int32[k] and counts int64[k], k ≤ max_nodes, in the order of falling count,
            then rising depth, then token ids along the path. Counts are exact. Of a match with many occurrences,
            continuations that fewer than one in 256 of them take are left out.
        """
        from specds.datastore.continuations import continuation_tree

        nodes: tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int64]] = continuation_tree(
            self.parts, match.length, match.ranges, max_depth, max_nodes
        )
        return nodes

    def backoff(
        self, context: NDArray[np.int64], max_depths: NDArray[np.int64], max_nodes: NDArray[np.int64]
    ) -> list[tuple[int, int, tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int64]]]]:
        """Of contexts of three lengths, the longest match first, the counted trees of what follows, in one call.

        Returns:
            length, occurrences and tree of each, the tree as from `continuations`; `continuations.backoff_trees` says
            which contexts they are.
        """
        from specds.datastore.continuations import backoff_trees

        return backoff_trees(self.parts, context, max_depths, max_nodes)

    def places(self, match: Match, most: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Some of a match's occurrences, spread evenly over all of them in the order of segments and ranks.

        Args:
            most: how many at most; all where there are no more.

        Returns:
            segments int64[k], indexes into the segments opened, and positions int64[k] in their tokens, where the
            matched tokens start. Entries of a forged suffix array that point outside the tokens are left out.
        """
        total = match.occurrences
        count = max(0, min(most, total))
        picks = (2 * np.arange(count, dtype=np.int64) + 1) * total // (2 * max(count, 1))
        ends = np.cumsum(match.ranges[:, 1] - match.ranges[:, 0])
        segments = np.searchsorted(ends, picks, "right")
        ranks = match.ranges[segments, 1] - (ends[segments] - picks)
        pairs = zip(segments.tolist(), ranks.tolist(), strict=True)
        positions = np.array([int(self.parts.suffixes[s][rank]) for s, rank in pairs], np.int64)
        sizes = np.array([tokens.size for tokens in self.parts.tokens], np.int64)
        inside = (positions >= 0) & (positions < sizes[segments])
        return segments[inside].astype(np.int64), positions[inside]


def map_segment(directory: Path, segment: Segment) -> tuple[NDArray[Any], NDArray[Any]]:
    """A segment's tokens and suffix array, memory-mapped.

    Raises:
        CorruptStore: they are not what the manifest describes.
    """
    parameters = segment.parameters
    try:
        count = int(parameters["positions"])
        tokens = map_array(directory / "tokens.bin", _TOKEN_DTYPES[parameters["token_dtype"]], count)
        suffixes = map_array(directory / "sa.bin", _SA_DTYPES[parameters["suffix_dtype"]], count)
    except (KeyError, TypeError, ValueError, OverflowError, OSError) as error:
        raise CorruptStore(
            f"{directory} is not the suffix index that the manifest describes: {error!r}",
            "run `specds build-suffix` again",
        ) from error
    return tokens, suffixes
