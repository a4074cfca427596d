"""A job: prompts one after another through an engine, with what is counted of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from specds.decode.answering import Answer
from specds.decode.answers import AnswerFile, answer_record, error_record, request_key
from specds.decode.counters import Counters
from specds.decode.engine import Engine
from specds.errors import PromptError
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
    error: PromptError | None = None


@dataclass(slots=True)
class Job:
    """What to answer with, and what came of it.

    Attributes:
        engine, max_new_tokens: what to answer with.
        file: answers of earlier runs of the same job, which are not done again.
        answered: prompts that this run was asked, those that failed too.
        failed: how many of them could not be answered.
        counters: sums over the answers.
        first_failure: what is to be said of the first prompt that could not.
    """

    engine: Engine
    max_new_tokens: int
    file: AnswerFile | None = None
    answered: int = 0
    failed: int = 0
    counters: Counters = field(default_factory=Counters)
    first_failure: str = ""

    def run(self, rows: Iterable[Prompt | BadRow]) -> Iterator[Done]:
        """Answer prompts in their order.

        Raises:
            InputError: the file holds an answer to another prompt, or of other options.
        """
        for number, row in enumerate(rows):
            key = request_key(self.engine, row, self.max_new_tokens)
            if self.file is not None and number < len(self.file.held):
                self.file.check(number, row, key)
                continue
            self.answered += 1
            try:
                if isinstance(row, BadRow):
                    raise row.error
                answer = self.engine.answer(row, self.max_new_tokens)
            except PromptError as error:
                self.failed += 1
                self.first_failure = self.first_failure or f"prompt {row.id}: {error.message} — {error.hint}"
                yield Done(number, error_record(row, error, key), error=error)
                continue
            self.counters = self.counters + answer.counters
            yield Done(number, answer_record(self.engine, answer, key), answer)
