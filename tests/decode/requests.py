"""Requests that come as they like, and a target that notes what its passes are made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from specds.decode.contracts import Forward, Item, Slot, Step, Target
from specds.decode.engine import Engine
from specds.decode.request import Request
from specds.decode.targets.counted import Counted
from specds.errors import SpecdsError
from specds.model import LanguageModel


class Watched(Counted):
    """A target whose passes and slots are noted.

    Attributes:
        rows: of each pass the query tokens of each item.
        slots: those that are open.
        most: how many were open at once.
    """

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self.rows: list[list[int]] = []
        self.slots: list[Slot] = []
        self.most = 0

    def open(self, prompt: Sequence[int], length: int) -> Slot | None:
        slot = super().open(prompt, length)
        if slot is not None:
            self.slots.append(slot)
            self.most = max(self.most, len(self.slots))
        return slot

    def close(self, slot: Slot, *, keep: bool = True) -> None:
        self.slots.remove(slot)
        super().close(slot, keep=keep)

    def forward(self, items: Sequence[Item]) -> Forward:
        assert len({id(item.slot) for item in items}) == len(items), "a slot is twice in one pass"
        self.rows.append([len(item.tokens) for item in items])
        return super().forward(items)

    @property
    def computed(self) -> int:
        """Query tokens of all passes."""
        return sum(map(sum, self.rows))


def watch(engine: Engine) -> Watched:
    """Note what an engine's passes are made of from now on."""
    watched = engine._target = Watched(engine._target)
    return watched


def memory_of(model: LanguageModel, pages: int) -> int:
    """Bytes of so many pages of a model's key-value cache."""
    plenty = 1 << 24
    return plenty // Engine(model, runtime="cpu", kv_memory=plenty)._target._pages.count * pages  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Asked:
    """One request: a prompt, or with `after` the text of an earlier one, its answer, and these tokens."""

    tokens: tuple[int, ...]
    length: int
    sample: int = 0
    after: int | None = None


@dataclass
class Arriving:
    """A source whose requests come now and then; one that follows another comes when that is answered.

    Attributes:
        engine: whose requests they are.
        asked: what is asked, in order of arrival.
        late: at each time that somebody looks without waiting, whether nothing has come yet.
        steps: of each request.
        errors: why requests could not be answered.
    """

    engine: Engine
    asked: Sequence[Asked]
    late: Callable[[], bool] = field(default=lambda: False)
    steps: dict[int, list[Step]] = field(default_factory=dict)
    prompts: dict[int, tuple[int, ...]] = field(default_factory=dict)
    errors: dict[int, SpecdsError] = field(default_factory=dict)
    _numbers: dict[Request, int] = field(default_factory=dict)
    _done: set[int] = field(default_factory=set)

    def take(self, wait: bool) -> Request | None:
        if not wait and self.late():
            return None
        for number, asked in enumerate(self.asked):
            if number in self.prompts or (asked.after is not None and asked.after not in self._done):
                continue
            before = () if asked.after is None else (*self.prompts[asked.after], *self.text(asked.after))
            self.prompts[number] = (*before, *asked.tokens)
            self.steps[number] = []
            request = self.engine.request(self.prompts[number], asked.length, sample=asked.sample)
            self._numbers[request] = number
            return request
        return None

    def text(self, number: int) -> tuple[int, ...]:
        return tuple(token for step in self.steps[number] for token in step.tokens)

    def run(self, parallel: int) -> None:
        """Answer them all."""
        for request in self.engine.decode(self, parallel):
            number = self._numbers[request]
            if request.error is not None:
                self.errors[number] = request.error
            else:
                assert request.step is not None
                self.steps[number].append(request.step)
            if request.done:
                self._done.add(number)
