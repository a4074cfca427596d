"""Is a datastore any good? What it would have given for answers that are known."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specds.calibration.answers import Recorded
from specds.calibration.replay import Replay, Replayed, Summary, summarise
from specds.datastore.corpus import read_documents
from specds.datastore.manifest import Segment
from specds.datastore.store import Store
from specds.datastore.suffix import SuffixIndex
from specds.decode.drafters.rest import Rest
from specds.decode.method import Method
from specds.decode.pricing.curve import CostCurve
from specds.errors import CorruptStore, UsageError
from specds.model import LanguageModel
from specds.tokenizer import Tokenizer

BUDGETS = (4, 8, 16, 32, 64)
NGRAM = 13

_DRAFTERS = {"suffix": "rest", "dense": "dresd"}
# Continuations that fewer occurrences take are not drafted, so fewer need not be looked at.
_PLACES = 256
_BASE = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True)
class Hits:
    """Positions of the answers where the longest match has one length.

    Attributes:
        length: tokens matched; 0 for no match.
        positions: how many.
        first: at how many the most frequent continuation is the token that followed.
        anywhere: at how many that token is among the continuations.
    """

    length: int
    positions: int
    first: int
    anywhere: int


@dataclass(frozen=True, slots=True)
class Overlap:
    """What the evaluation shares with the store, by n-grams: a store that holds the questions flatters itself.

    Attributes:
        texts: prompts, or answers, of at least n tokens; the chat template's own beginning and end do not count.
        touched: those that share an n-gram with the corpus.
        ngrams: all n-grams of theirs.
        shared: those that stand in the corpus.
        same: texts that are a document's prompt, or response, as a whole.
    """

    texts: int
    touched: int
    ngrams: int
    shared: int
    same: int


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


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What was found.

    Attributes:
        answers, tokens: evaluated.
        hits: by length of the match; empty without a suffix index.
        predictions: (`suffix` or `dense`, budget, what decoding would count).
        ngram: n of the overlaps.
        prompts, responses: overlap of prompts and of answers with the store.
        sources, parts: by source and by corpus file, in the store's order.
    """

    answers: int
    tokens: int
    hits: tuple[Hits, ...]
    predictions: tuple[tuple[str, int, Summary], ...]
    ngram: int
    prompts: Overlap
    responses: Overlap
    sources: tuple[Share, ...]
    parts: tuple[Share, ...]

    def record(self) -> dict[str, Any]:
        """As JSON."""
        predictions = [
            {"index": index, "budget": budget, **{k: v for k, v in summary.row().items() if k != "method"}}
            for index, budget, summary in self.predictions
        ]
        shares = {
            name: [{**dataclasses.asdict(one), "dead": one.dead} for one in part]
            for name, part in (("sources", self.sources), ("parts", self.parts))
        }
        return {
            "answers": self.answers,
            "tokens": self.tokens,
            "hits": [dataclasses.asdict(one) for one in self.hits],
            "predictions": predictions,
            "overlap": {
                "ngram": self.ngram,
                "prompts": dataclasses.asdict(self.prompts),
                "answers": dataclasses.asdict(self.responses),
            },
            **shares,
        }


def evaluate(
    store: Store,
    answers: Sequence[Recorded],
    model: LanguageModel,
    *,
    indexes: Sequence[str] = ("suffix", "dense"),
    budgets: Sequence[int] = BUDGETS,
    ngram: int = NGRAM,
    curve: CostCurve | None = None,
    runtime: str = "auto",
    progress: Callable[[int], None] = lambda done: None,
) -> Evaluation:
    """Look up every position of some answers, replay them from the store, and see what the corpus has to do with them.

    Args:
        answers: of the model, or of whoever writes what is to be drafted.
        model: its weights are read only if there is a dense index to ask.
        indexes: kinds to look at.
        budgets: draft tokens a step to replay at.
        ngram: length of the n-grams that overlap is measured by.
        progress: called with the number of answers done.

    Raises:
        UsageError: the store has none of the indexes, or there is no budget.
        ForeignModel, CorruptStore: a part of it that cannot be read.
    """
    kinds = [kind for kind in indexes if getattr(store.manifest, kind)]
    if not kinds or not budgets:
        raise UsageError(
            f"{store.path} has no {' or '.join(indexes)} index" if budgets else "no budget to replay at",
            f"run `specds build-suffix {store.path}`" if budgets else "give at least one",
        )
    index = store.suffix_index() if "suffix" in kinds else None
    names = {
        f"{kind} {budget}": Method(_DRAFTERS[kind], stores=(store,), budget=budget, word=f"{kind} {budget}")
        for kind in kinds
        for budget in sorted(set(budgets))
    }
    made = Replay(model, list(names.values()), curve=curve, runtime=runtime)
    tally, credit, rows = _Tally(), _Credit(index), list[Replayed]()
    for number, answer in enumerate(answers, 1):
        found = made.of(answer)
        rows += [dataclasses.replace(row, steps=()) for row in found]
        if index is not None:
            tally.add(index, answer)
            credit.add(next(row for row in found if row.method == f"suffix {max(budgets)}"))
        progress(number)
    corpus = _Corpus(store, store.manifest.suffix if index is not None else [])
    prompts, responses = corpus.read(answers, ngram, template(model.tokenizer))
    sources, parts = corpus.shares(credit)
    return Evaluation(
        len(answers),
        sum(len(answer.tokens) for answer in answers),
        tally.hits(),
        tuple((kind, int(budget), one) for one in summarise(rows) for kind, budget in [one.method.split()]),
        ngram,
        prompts,
        responses,
        sources,
        parts,
    )


class _Tally:
    """Matches of every position after an answer's first token, which nobody drafts."""

    def __init__(self) -> None:
        self._positions: Counter[int] = Counter()
        self._first: Counter[int] = Counter()
        self._anywhere: Counter[int] = Counter()

    def add(self, index: SuffixIndex, answer: Recorded) -> None:
        text = np.array(answer.text, np.int64)
        longest = Rest.Options().max_match
        for at in range(len(answer.prompt) + 1, len(text)):
            match = index.match(text[max(0, at - longest) : at], longest, 1)
            self._positions[match.length] += 1
            if match.length:
                tokens, _, _ = index.continuations(match, 1, _PLACES)
                self._first[match.length] += bool(tokens[:1] == text[at]) if len(tokens) else 0
                self._anywhere[match.length] += bool((tokens == text[at]).any())

    def hits(self) -> tuple[Hits, ...]:
        return tuple(
            Hits(length, count, self._first[length], self._anywhere[length])
            for length, count in sorted(self._positions.items())
        )


class _Credit:
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
            segments, positions = self._index.places(match, _PLACES)
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
class _Corpus:
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
        prompts = [_bare(answer.prompt, around) for answer in last.values()]
        responses = [np.array(answer.tokens, np.int64) for answer in answers]
        looked = [_grams(text, ngram) for text in (*prompts, *responses)]
        wanted = np.unique(np.concatenate([*looked, np.empty(0, np.uint64)]))
        seen = np.zeros(len(wanted), np.bool_)
        whole = [{np.array(one.prompt, np.int32).tobytes() for one in last.values()}]
        whole.append({np.array(one.tokens, np.int32).tobytes() for one in answers})
        same: list[set[bytes]] = [set(), set()]
        for shard in self.store.manifest.corpus:
            lengths, sources = self.lengths.setdefault(shard.file, []), self.sources.setdefault(shard.file, [])
            for document in read_documents(self.store, [shard.file]):
                text = np.concatenate([document.prompt, document.response]).astype(np.int64)
                lengths.append(len(text))
                sources.append(document.source)
                grams = _grams(text, ngram)
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
            sum(np.array(one.prompt, np.int32).tobytes() in same[0] for one in last.values()),
            sum(np.array(one.tokens, np.int32).tobytes() in same[1] for one in answers),
        ]
        return _overlap(looked[:ends], held, counts[0]), _overlap(looked[ends:], held, counts[1])

    def shares(self, credit: _Credit) -> tuple[tuple[Share, ...], tuple[Share, ...]]:
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
            found = {documents[segment].at(place) for segment, place in places.tolist()}
            useful |= found
            for shares, names in (
                (parts, {file for file, _ in found}),
                (sources, {self.sources[file][number] for file, number in found}),
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


def template(tokenizer: Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What the chat template puts before and after a single question, as token ids."""
    first, second = (tokenizer.chat([{"role": "user", "content": text}]) for text in ("a 1 a", "b 2 b"))
    before = next((at for at, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1]), 0)
    backwards = enumerate(zip(first[::-1], second[::-1], strict=False))
    after = next((at for at, pair in backwards if pair[0] != pair[1]), 0)
    return tuple(first[:before]), tuple(first[len(first) - after :])


def _bare(prompt: tuple[int, ...], around: tuple[tuple[int, ...], tuple[int, ...]]) -> NDArray[np.int64]:
    before, after = around
    start = len(before) if prompt[: len(before)] == before else 0
    end = len(prompt) - len(after) if prompt[len(prompt) - len(after) :] == after else len(prompt)
    return np.array(prompt[start:end], np.int64)


def _grams(text: NDArray[np.int64], n: int) -> NDArray[np.uint64]:
    """uint64[m - n + 1]: a hash of each n-gram of m tokens."""
    if len(text) < n:
        return np.empty(0, np.uint64)
    mixed = (text.astype(np.uint64) + np.uint64(1)) * _BASE
    mixed ^= mixed >> np.uint64(29)
    count = len(text) - n + 1
    found = np.zeros(count, np.uint64)
    for offset in range(n):
        found = found * _BASE + mixed[offset : offset + count]
        found ^= found >> np.uint64(32)
    return found


def _overlap(looked: Sequence[NDArray[np.uint64]], held: NDArray[np.uint64], same: int) -> Overlap:
    shared = [int(np.isin(grams, held).sum()) for grams in looked]
    return Overlap(
        sum(len(grams) > 0 for grams in looked),
        sum(count > 0 for count in shared),
        sum(map(len, looked)),
        sum(shared),
        same,
    )
