"""Which sources and parts of a corpus the tokens that were accepted had come from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from specds.calibration.answers import Recorded
from specds.calibration.overlap import Overlap, bare, grams_of, overlap_of
from specds.calibration.replay import Replayed
from specds.datastore.corpus import read_documents
from specds.datastore.manifest import Segment
from specds.datastore.store import Store
from specds.datastore.suffix import SuffixIndex
from specds.decode.drafters.rest import Rest
from specds.errors import CorruptStore

# Continuations that fewer occurrences take are not drafted, so fewer need not be looked at.
PLACES = 256


@dataclass(slots=True)
class Share:
    """What one source, or one corpus file, is and gave.

    Attributes:
        name: of the source or the file.
        documents, tokens: how much there is.
        oldest, newest: when its corpus files were written, as ISO dates.
        indexed: documents that the suffix index covers.
        gave: accepted tokens, at the largest budget, that the match found here, perhaps among others.
        alone: those of them that it found nowhere else.
        useful: documents that gave any.
    """

    name: str
    documents: int = 0
    tokens: int = 0
    oldest: str = ""
    newest: str = ""
    indexed: int = 0
    gave: int = 0
    alone: int = 0
    useful: int = 0

    @property
    def dead(self) -> bool:
        """It is indexed, and no accepted token came from it."""
        return bool(self.indexed) and not self.gave


class Credit:
    """Where in the index the accepted tokens stood."""

    def __init__(self, index: SuffixIndex | None) -> None:
        self._index = index
        self.tokens: list[NDArray[np.int64]] = []
        """For each accepted token int64[k, 2]: the segments and positions at which it was found."""

    @property
    def sizes(self) -> list[int]:
        """Tokens and separators of each segment."""
        return [] if self._index is None else [len(tokens) for tokens in self._index.parts.tokens]

    def add(self, row: Replayed) -> None:
        assert self._index is not None
        text = np.array(row.answer.text, np.int64)
        options = Rest.Options()
        for step in row.steps:
            if not step.accepted:
                continue
            tail = text[max(0, step.position - options.max_match) : step.position]
            match = self._index.match(tail, options.max_match, options.min_match)
            segments, positions = self._index.places(match, PLACES)
            places = np.stack([segments, positions + match.length], axis=1)
            for token in step.tokens[: step.accepted]:
                stands = [int(self._token(segment, place)) == token for segment, place in places.tolist()]
                places = places[np.array(stands, np.bool_)]
                self.tokens.append(places.copy())
                places[:, 1] += 1

    def _token(self, segment: int, place: int) -> int:
        assert self._index is not None
        tokens = self._index.parts.tokens[segment]
        return int(tokens[place]) if place < len(tokens) else -1


@dataclass(slots=True)
class CorpusReading:
    """One reading of a store's documents."""

    store: Store
    segments: Sequence[Segment]
    lengths: dict[str, list[int]] = field(default_factory=dict)
    sources: dict[str, list[str]] = field(default_factory=dict)

    def read(
        self, answers: Sequence[Recorded], ngram: int, around: tuple[tuple[int, ...], tuple[int, ...]]
    ) -> tuple[Overlap, Overlap]:
        """How prompts and answers overlap with the documents. Of a conversation the last turn's prompt has it all."""
        last = {answer.id: answer for answer in answers}
        prompts = [bare(answer.prompt, around) for answer in last.values()]
        responses = [np.array(answer.tokens, np.int64) for answer in answers]
        grams_of_each = [grams_of(text, ngram) for text in (*prompts, *responses)]
        wanted = np.unique(np.concatenate([*grams_of_each, np.empty(0, np.uint64)]))
        seen = np.zeros(len(wanted), np.bool_)
        whole = [{np.array(answer.prompt, np.int32).tobytes() for answer in last.values()}]
        whole.append({np.array(answer.tokens, np.int32).tobytes() for answer in answers})
        same: list[set[bytes]] = [set(), set()]
        for shard in self.store.manifest.corpus:
            lengths, sources = self.lengths.setdefault(shard.file, []), self.sources.setdefault(shard.file, [])
            for document in read_documents(self.store, [shard.file]):
                text = np.concatenate([document.prompt, document.response]).astype(np.int64)
                lengths.append(len(text))
                sources.append(document.source)
                grams = grams_of(text, ngram)
                at = np.minimum(np.searchsorted(wanted, grams), max(len(wanted) - 1, 0))
                if len(wanted):
                    seen[at[wanted[at] == grams]] = True
                for place, part in enumerate((document.prompt, document.response)):
                    key = part.astype(np.int32).tobytes()
                    if key in whole[place]:
                        same[place].add(key)
        held = wanted[seen]
        ends = len(prompts)
        counts = [
            sum(np.array(answer.prompt, np.int32).tobytes() in same[0] for answer in last.values()),
            sum(np.array(answer.tokens, np.int32).tobytes() in same[1] for answer in answers),
        ]
        return overlap_of(grams_of_each[:ends], held, counts[0]), overlap_of(grams_of_each[ends:], held, counts[1])

    def shares(self, credit: Credit) -> tuple[tuple[Share, ...], tuple[Share, ...]]:
        """What each source and each corpus file gave."""
        sources: dict[str, Share] = {}
        parts: dict[str, Share] = {}
        indexed = {name for segment in self.segments for name in segment.shards}
        for shard in self.store.manifest.corpus:
            date = shard.provenance.date
            part = parts.setdefault(shard.file, Share(shard.file))
            for name, length in zip(self.sources[shard.file], self.lengths[shard.file], strict=True):
                for share in (part, sources.setdefault(name, Share(name))):
                    share.documents += 1
                    share.tokens += length
                    share.indexed += shard.file in indexed
                    share.oldest = min(share.oldest or date, date)
                    share.newest = max(share.newest, date)
        documents = [self._documents(segment, size) for segment, size in zip(self.segments, credit.sizes, strict=True)]
        useful: set[tuple[str, int]] = set()
        for places in credit.tokens:
            standing = {documents[segment].at(place) for segment, place in places.tolist()}
            useful |= standing
            for shares, names in (
                (parts, {file for file, _ in standing}),
                (sources, {self.sources[file][number] for file, number in standing}),
            ):
                for name in names:
                    shares[name].gave += 1
                    shares[name].alone += len(names) == 1
        for file, number in useful:
            parts[file].useful += 1
            sources[self.sources[file][number]].useful += 1
        return tuple(sources.values()), tuple(parts.values())

    def _documents(self, segment: Segment, size: int) -> _Documents:
        files = [shard.file for shard in self.store.manifest.corpus if shard.file in segment.shards]
        names = [(file, number) for file in files for number in range(len(self.lengths[file]))]
        sizes = [length + 1 for file in files for length in self.lengths[file]]
        if sum(sizes) != size:
            raise CorruptStore(
                f"{self.store.path}: {segment.directory} holds other documents than its corpus files",
                f"run `specds build-suffix {self.store.path}` again",
            )
        return _Documents(names, np.cumsum(sizes))


@dataclass(frozen=True, slots=True)
class _Documents:
    """Which document stands where in a segment's tokens: (corpus file, number in it), and where each ends."""

    names: list[tuple[str, int]]
    ends: NDArray[np.int64]

    def at(self, place: int) -> tuple[str, int]:
        return self.names[int(np.searchsorted(self.ends, place, "right"))]
