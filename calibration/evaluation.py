"""Is a datastore any good? What it would have given for answers that are known."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from specds.calibration.answers import Recorded
from specds.calibration.overlap import NGRAM, Overlap, template
from specds.calibration.replay import Replay, Replayed, Summary, summarise
from specds.calibration.shares import PLACES, CorpusReading, Credit, Share
from specds.datastore.store import Store
from specds.datastore.suffix import SuffixIndex
from specds.decode.drafters.rest import Rest
from specds.decode.method import Method
from specds.decode.pricing.curve import CostCurve
from specds.errors import UsageError
from specds.model import LanguageModel

BUDGETS = (4, 8, 16, 32, 64)

_DRAFTERS = {"suffix": "rest", "dense": "dresd"}


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
            name: [{**dataclasses.asdict(share), "dead": share.dead} for share in part]
            for name, part in (("sources", self.sources), ("parts", self.parts))
        }
        return {
            "answers": self.answers,
            "tokens": self.tokens,
            "hits": [dataclasses.asdict(hits) for hits in self.hits],
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
    replay = Replay(model, list(names.values()), curve=curve, runtime=runtime)
    tally, credit, rows = _Tally(), Credit(index), list[Replayed]()
    for number, answer in enumerate(answers, 1):
        replayed = replay.of(answer)
        rows += [dataclasses.replace(row, steps=()) for row in replayed]
        if index is not None:
            tally.add(index, answer)
            credit.add(next(row for row in replayed if row.method == f"suffix {max(budgets)}"))
        progress(number)
    corpus = CorpusReading(store, store.manifest.suffix if index is not None else [])
    prompts, responses = corpus.read(answers, ngram, template(model.tokenizer))
    sources, parts = corpus.shares(credit)
    return Evaluation(
        len(answers),
        sum(len(answer.tokens) for answer in answers),
        tally.hits(),
        tuple((kind, int(budget), summary) for summary in summarise(rows) for kind, budget in [summary.method.split()]),
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
                tokens, _, _ = index.continuations(match, 1, PLACES)
                self._first[match.length] += bool(tokens[:1] == text[at]) if len(tokens) else 0
                self._anywhere[match.length] += bool((tokens == text[at]).any())

    def hits(self) -> tuple[Hits, ...]:
        return tuple(
            Hits(length, count, self._first[length], self._anywhere[length])
            for length, count in sorted(self._positions.items())
        )
