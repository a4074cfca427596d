"""Answers: prompts become requests, turn by turn, and their steps become answers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from specds.decode.contracts import Step
from specds.decode.counters import Counters
from specds.decode.request import Request
from specds.errors import PromptError, SpecdsError
from specds.reading.ahead import Ahead
from specds.reading.conversation import Conversation
from specds.reading.prompts import BadRow, Prompt

if TYPE_CHECKING:
    from specds.decode.engine import Engine


@dataclass(frozen=True, slots=True)
class Turn:
    """The model's answer to one turn of a conversation.

    Attributes:
        text: without special tokens.
        tokens: every committed token id, a stop token included.
        finish_reason: `stop` (a stop token), `length` (max_new_tokens) or `context` (the model's context is full).
        prompt: the token ids that were answered, template and history included.
        steps: the trace, without signals: those were the drafter's, and an answer may wait long for its turn.
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: str
    prompt: tuple[int, ...]
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """The model's answers to all turns of one prompt."""

    id: str
    turns: tuple[Turn, ...]

    @property
    def text(self) -> str:
        """The last turn's text."""
        return self.turns[-1].text

    @property
    def counters(self) -> Counters:
        """What the steps of all turns add up to."""
        return Counters.of(step for turn in self.turns for step in turn.steps)


@dataclass(frozen=True, slots=True)
class Answered:
    """What came of one prompt.

    Attributes:
        number: which of the prompts it is, from 0 on.
        prompt: itself.
        answer: None where it could not be answered.
        error: why not.
    """

    number: int
    prompt: Prompt | BadRow
    answer: Answer | None = None
    error: SpecdsError | None = None


@dataclass(slots=True, eq=False)
class _Open:
    """A prompt that is being answered."""

    number: int
    prompt: Prompt | BadRow
    conversation: Conversation | None
    turns: list[Turn] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    tokens: int = 0


class Answering:
    """Turns prompts into requests (a `Source`), and the requests' steps into answers.

    The next turn of a prompt goes before other prompts.

    Args:
        encode: the token ids of a conversation's next turn; default: all of them.
        sample: of the prompt of a number, from 0 on, which sample of its text is wanted; default: the first.

    Attributes:
        tokens: committed so far.
        under_way: those of them that belong to prompts which are not done.
    """

    def __init__(
        self,
        engine: Engine,
        prompts: Iterable[Prompt | BadRow],
        max_new_tokens: int,
        *,
        encode: Callable[[Conversation], list[int]] | None = None,
        sample: Callable[[int], int] = lambda number: 0,
    ) -> None:
        self._engine, self._max_new_tokens = engine, max_new_tokens
        self._encode = encode or (lambda conversation: conversation.tokens(engine.model.tokenizer))
        self._sample = sample
        self.tokens = self.under_way = 0
        self._ahead = prompts if isinstance(prompts, Ahead) else None
        self._prompts = iter(prompts)
        self._begun = 0
        self._broken: Exception | None = None
        self._turns: deque[_Open] = deque()
        self._open: dict[Request, _Open] = {}
        self._finished: list[Answered] = []

    def take(self, wait: bool) -> Request | None:
        """See `Source.take`."""
        opened = self._turns.popleft() if self._turns else self._next(wait)
        if opened is None:
            return None
        try:
            if isinstance(opened.prompt, BadRow):
                raise opened.prompt.error
            assert opened.conversation is not None
            tokens = self._encode(opened.conversation)
            request = self._engine.request(tokens, self._max_new_tokens, sample=self._sample(opened.number))
        except PromptError as error:
            request = Request.failed(error)
        self._open[request] = opened
        return request

    def observe(self, request: Request) -> None:
        """A request has made a step, or failed."""
        opened = self._open[request]
        if request.error is not None:
            del self._open[request]
            self._finish(opened, Answered(opened.number, opened.prompt, error=request.error))
            return
        assert request.step is not None
        opened.steps.append(request.step)
        opened.tokens += len(request.step.tokens)
        self.tokens += len(request.step.tokens)
        self.under_way += len(request.step.tokens)
        if not request.done:
            return
        del self._open[request]
        steps = tuple(replace(step, signals={}) for step in opened.steps)
        opened.turns.append(self._turn(request, steps))
        opened.steps = []
        assert opened.conversation is not None
        opened.conversation.answered(opened.turns[-1].text)
        if opened.conversation.done:
            answer = Answer(opened.prompt.id, tuple(opened.turns))
            self._finish(opened, Answered(opened.number, opened.prompt, answer))
        else:
            self._turns.append(opened)

    def finished(self) -> Iterator[Answered]:
        """What is done since this was last asked."""
        finished, self._finished = self._finished, []
        return iter(finished)

    def _finish(self, opened: _Open, answered: Answered) -> None:
        self.under_way -= opened.tokens
        self._finished.append(answered)

    def _next(self, wait: bool) -> _Open | None:
        row = None
        if self._broken is None:
            try:
                row = next(self._prompts, None) if self._ahead is None else self._ahead.take(wait)
            except Exception as error:  # what was begun is answered before
                self._broken = error
        if self._broken is not None and wait:
            raise self._broken
        if row is None:
            return None
        self._begun += 1
        return _Open(self._begun - 1, row, Conversation(row) if isinstance(row, Prompt) else None)

    def _turn(self, request: Request, steps: tuple[Step, ...]) -> Turn:
        tokens = tuple(token for step in steps for token in step.tokens)
        if tokens[-1] in request.stop_tokens:
            reason = "stop"
        elif len(tokens) < self._max_new_tokens:
            reason = "context"
        else:
            reason = "length"
        return Turn(self._engine.model.tokenizer.decode(tokens), tokens, reason, tuple(request.prompt), steps)
