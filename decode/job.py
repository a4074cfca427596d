"""A job: prompts through an engine, some at once, with what is counted of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from specds.decode.answering import Answer
from specds.decode.answers import AnswerFile, answer_record, error_record, request_key
from specds.decode.counters import Counters
from specds.decode.engine import Engine
from specds.errors import SpecdsError
from specds.reading.ahead import Ahead
from specds.reading.prompts import BadRow, Prompt


@dataclass(frozen=True, slots=True)
class Done:
    """What came of one prompt.

    Attributes:
        number: which of the job's prompts it is, from 0 on.
        record: as JSON.
        answer: None where it could not be answered.
        error: why not.
    """

    number: int
    record: dict[str, Any]
    answer: Answer | None = None
    error: SpecdsError | None = None


@dataclass(slots=True)
class Job:
    """What to answer with, and what came of it.

    Attributes:
        engine, max_new_tokens: what to answer with.
        file: answers of earlier runs of the same job, which are not done again.
        parallel: most prompts answered at once.
        answered: prompts that this run was asked, those that failed too.
        failed: how many of them could not be answered.
        counters: sums over the answers.
        seconds: from the beginning to the last answer.
        first_failure: what is to be said of the first prompt that could not.
    """

    engine: Engine
    max_new_tokens: int
    file: AnswerFile | None = None
    parallel: int = 1
    answered: int = 0
    failed: int = 0
    counters: Counters = field(default_factory=Counters)
    seconds: float = 0.0
    first_failure: str = ""

    @property
    def tokens_per_second(self) -> float:
        """Of the whole job, by the clock."""
        return self.counters.tokens / self.seconds if self.seconds else 0.0

    def run(self, rows: Iterable[Prompt | BadRow], *, streamed: bool = False) -> Iterator[Done]:
        """Answer prompts; what comes of them is told in their order.

        Args:
            streamed: whether rows come when they come: each is then begun as soon as it is there, and none is waited
                for while others can be answered.

        Raises:
            InputError: the file holds an answer to another prompt, or of other options.
        """
        began = perf_counter()
        fresh = self._fresh(rows)
        held = 0 if self.file is None else len(self.file.held)
        prompts = Ahead(fresh) if streamed else fresh
        for answered in self.engine.answers(prompts, self.max_new_tokens, parallel=self.parallel):
            row, number = answered.prompt, held + answered.number
            key = request_key(self.engine, row, self.max_new_tokens)
            self.answered += 1
            self.seconds = perf_counter() - began
            if answered.answer is not None:
                self.counters = self.counters + answered.answer.counters
                yield Done(number, answer_record(self.engine, answered.answer, key), answered.answer)
                continue
            error = answered.error
            assert error is not None
            self.failed += 1
            self.first_failure = self.first_failure or f"prompt {row.id}: {error.message} — {error.hint}"
            yield Done(number, error_record(row, error, key), error=error)

    def _fresh(self, rows: Iterable[Prompt | BadRow]) -> Iterator[Prompt | BadRow]:
        """The rows that the file holds no answers to."""
        for number, row in enumerate(rows):
            if self.file is not None and number < len(self.file.held):
                self.file.check(number, row, request_key(self.engine, row, self.max_new_tokens))
            else:
                yield row
