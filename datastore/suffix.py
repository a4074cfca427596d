"""The static suffix index: every occurrence of the context's last tokens in the corpus, in microseconds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specds.datastore.corpus import token_stream
from specds.datastore.manifest import Segment
from specds.datastore.mapped import map_array
from specds.datastore.store import Store, provenance, require_tokens, writing
from specds.errors import CorruptStore

_TOKEN_DTYPES = {"uint16": np.uint16, "uint32": np.uint32}
_SA_DTYPES = {"int32": np.int32, "int64": np.int64}


@dataclass(frozen=True, slots=True)
class Match:
    """Where the longest matching suffix of a context stands.

    Attributes:
        length: tokens matched; 0 for no match.
        low, high: the range of the suffix array that holds all its occurrences.
    """

    length: int
    low: int
    high: int

    @property
    def occurrences(self) -> int:
        """How often the matched tokens stand in the corpus."""
        return self.high - self.low


@dataclass(frozen=True, slots=True)
class SuffixIndex:
    """A suffix array over the corpus, memory-mapped; matches never cross a document's end.

    Attributes:
        tokens: uint16[n] or uint32[n], documents with the dtype's largest value after each.
        suffixes: int32[n] or int64[n], start positions in lexicographic order of what follows.
    """

    tokens: NDArray[Any]
    suffixes: NDArray[Any]

    @classmethod
    def open(cls, directory: Path, segment: Segment) -> SuffixIndex:
        """Map the files of a segment.

        Raises:
            CorruptStore: a dtype or length in the manifest does not fit the files.
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
        return cls(tokens, suffixes)

    def warm_up(self) -> None:
        """Compile the lookups now, not in the time of the first answer (seconds once, then from numba's cache)."""
        self.match(np.zeros(2, np.int64))
        self.continuations(Match(0, 0, 1), 1, 1)

    def match(self, context: NDArray[np.int64], max_match: int = 16, min_match: int = 2) -> Match:
        """The longest suffix of the context that stands in the corpus with something after it (REST, §3.2).

        Args:
            context: int64[m] token ids; only the last `max_match` matter.
            max_match, min_match: longest and shortest suffix looked up.
        """
        from specds.datastore.suffix_lookup import longest_match

        return Match(*longest_match(self.tokens, self.suffixes, context, max_match, min_match))

    def continuations(
        self, match: Match, max_depth: int = 10, max_nodes: int = 64
    ) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int64]]:
        """The counted tree of what follows all occurrences of a match.

        Returns:
            tokens int32[k], parents int32[k] and counts int64[k], k ≤ max_nodes, in the order of falling count,
            then rising depth, then token ids along the path. Counts are exact. Of a match with many occurrences,
            continuations that fewer than one in 256 of them take are left out.
        """
        from specds.datastore.suffix_lookup import continuation_tree

        nodes: tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int64]] = continuation_tree(
            self.tokens, self.suffixes, match.length, match.low, match.high, max_depth, max_nodes
        )
        return nodes


def build_suffix(store: Store) -> Segment:
    """Build the suffix index over the whole corpus and make it the store's only one.

    Raises:
        UsageError: the corpus is empty. StoreLocked: another process is writing. OutputError: it cannot be written.
        CorruptStore: the corpus cannot be read.
    """
    from specds.datastore.suffix_array import build_suffix_array

    with store.writer() as writer:
        store = Store(store.path, writer.manifest)
        require_tokens(store)
        stream = token_stream(store)
        suffixes = build_suffix_array(stream.tokens)
        directory = writer.segment_path("suffix")
        with writing(directory):
            stream.tokens.tofile(directory / "tokens.bin")
            suffixes.tofile(directory / "sa.bin")
        segment = Segment(
            directory=directory.relative_to(store.path).as_posix(),
            shards=[shard.file for shard in store.manifest.corpus],
            tokens=store.manifest.tokens,
            model=None,
            parameters={
                "token_dtype": str(stream.tokens.dtype),
                "suffix_dtype": str(suffixes.dtype),
                "positions": len(stream.tokens),
                "separator": stream.separator,
            },
            quality={},
            provenance=provenance(),
        )
        writer.replace_index("suffix", segment)
    return segment
