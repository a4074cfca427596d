"""One prompt that is being answered: what it asks of the next pass, and what came of the last."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import NamedTuple, Protocol

from specds.decode.contracts import Case, Drafter, Forward, Item, Slot, Step
from specds.decode.draft import EMPTY, Draft
from specds.decode.pricing.budget import Allowance
from specds.errors import ModelError, PromptError, SpecdsError
from specds.sampling import Noise


def _nothing() -> None: ...


def _no_drafter(slot: Slot) -> Drafter:
    raise AssertionError("a request that has failed drafts nothing")


@dataclass(slots=True, eq=False)
class Request:
    """A prompt to be answered, and how far that has come.

    Attributes:
        prompt: at least one token id.
        max_new_tokens: at least 1.
        drafter: made when the request begins, for its slot.
        noise: of its sampling.
        stop_tokens: ids that end the text; the one that does is committed.
        end: called when the request is done, or given up.
        slot: None before it has begun.
        step: the last one.
        produced: committed tokens, the prompt's not counted.
        error: why it could not be answered, if so.
    """

    prompt: Sequence[int]
    max_new_tokens: int
    drafter: Callable[[Slot], Drafter]
    noise: Noise
    stop_tokens: Collection[int] = ()
    end: Callable[[], None] = _nothing
    slot: Slot | None = None
    step: Step | None = None
    produced: int = 0
    error: SpecdsError | None = None
    # While it runs: its own drafter, and its part in the budget; its shares of drafting and passes since the last
    # step, and the query tokens of these passes.
    drafting: Drafter = field(init=False)
    allowance: Allowance = field(init=False)
    draft_seconds: float = 0.0
    forward_seconds: float = 0.0
    pass_tokens: int = 0

    @classmethod
    def failed(cls, error: SpecdsError) -> Request:
        """One that cannot even begin."""
        return cls((), 0, _no_drafter, Noise((0, 0)), error=error)

    @property
    def done(self) -> bool:
        """Whether nothing is left to do."""
        if self.error is not None:
            return True
        return self.step is not None and (
            self.produced >= self.max_new_tokens or self.step.tokens[-1] in self.stop_tokens
        )

    @property
    def position(self) -> int:
        """How many tokens are committed, the prompt's included."""
        return len(self.prompt) + self.produced

    @property
    def unread(self) -> int:
        """Tokens of the prompt that no pass has taken in yet."""
        return 0 if self.slot is None or self.produced else len(self.prompt) - len(self.slot.tokens)

    def read(self, most: int) -> Part:
        """The next tokens of the prompt, at most so many."""
        assert self.slot is not None
        held = len(self.slot.tokens)
        tokens = self.prompt[held : held + most]
        answers = held + len(tokens) == len(self.prompt)
        return Part(self, Item.chain(self.slot, tokens, int(answers)), EMPTY, reads=True, answers=answers)

    def propose(self) -> Draft:
        """Its drafter's draft, no deeper than the answer may go; where a draft model fails, so does the request."""
        assert self.step is not None
        began = perf_counter()
        self.drafting.observe(self.step)
        self.allowance.observe(self.step)
        most = self.allowance.most
        # The target adds a token of its own, so a draft deeper than what is left less one cannot be used.
        try:
            draft = self.drafting.propose(most).trim(most, depth=self.max_new_tokens - self.produced - 1)
        except (ModelError, PromptError) as error:
            self.error, draft = error, EMPTY
        self.draft_seconds = perf_counter() - began
        return draft

    def write(self, draft: Draft) -> Part:
        """The last committed token, and a draft behind it."""
        assert self.slot is not None
        assert self.step is not None
        return Part(self, Item.draft(self.slot, self.step.tokens[-1], draft), draft, reads=False, answers=True)


class Part(NamedTuple):
    """A request's part of one pass.

    Attributes:
        request, item: whose, and what.
        draft: of which the item is made; empty where part of the prompt is read.
        reads: whether it is part of the prompt.
        answers: whether a token is committed after it.
    """

    request: Request
    item: Item
    draft: Draft
    reads: bool
    answers: bool

    def case(self, forward: Forward) -> Case:
        """What is to be verified, by the rows of its item."""
        logits = forward.logits[-1:] if self.reads else forward.logits
        return Case(self.draft, logits, self.request.position, self.request.noise)


class Source(Protocol):
    """Where requests come from."""

    def take(self, wait: bool) -> Request | None:
        """The next one.

        Args:
            wait: whether to wait until there is one.

        Returns:
            None: none now; if waited for, none ever.
        """


class Listed:
    """Requests that are all there."""

    def __init__(self, requests: Iterable[Request]) -> None:
        self._requests = iter(requests)

    def take(self, wait: bool) -> Request | None:
        """See `Source.take`."""
        return next(self._requests, None)
