"""Pages of a key-value cache against a model of what stands in them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specds.decode.targets.pages import PAGE, PagedSlot, Pages
from specds.errors import PromptError

_MOST_DRAFTED = 20


class Memory:
    """What a target keeps of each token, which depends on all tokens before it."""

    def __init__(self, count: int) -> None:
        self.rows: list[int | None] = [None] * (count * PAGE)
        self.copied = 0
        self.pages = Pages(count, self._copy)

    def _copy(self, source: int, target: int, count: int) -> None:
        self.copied += 1
        begin, to = source * PAGE, target * PAGE
        assert None not in self.rows[begin : begin + count]
        self.rows[to : to + count] = self.rows[begin : begin + count]

    def write(self, slot: PagedSlot, tokens: list[int]) -> None:
        """A pass over tokens behind those that are held."""
        self.pages.reserve(slot, len(slot) + len(tokens))
        kept = states([*slot.tokens, *tokens])[len(slot) :]
        for place, state in zip(slot.places(len(slot), len(slot) + len(tokens)).tolist(), kept, strict=True):
            self.rows[place] = state

    def check(self, slots: list[PagedSlot]) -> None:
        """Each slot finds its own text, and no page that is not full is in two."""
        used: dict[int, PagedSlot] = {}
        for slot in slots:
            assert [self.rows[place] for place in slot.places(0, len(slot)).tolist()] == states(slot.tokens)
            assert self.pages.table[slot.number, : len(slot.pages)].tolist() == slot.pages
            assert (self.pages.table[slot.number, len(slot.pages) :] == -1).all()
            for page in slot.pages[len(slot) // PAGE :]:
                assert page not in used, "two write there"
                used[page] = slot
        for slot in slots:
            assert not used.keys() & set(slot.pages[: len(slot) // PAGE]), "a full page is written"
        assert len({slot.number for slot in slots}) == len(slots)


def states(tokens: Sequence[int]) -> list[int]:
    """A number for each token that says which ones came before it."""
    return list(accumulate(tokens, lambda before, token: hash((before, token))))


def common(one: list[int], other: list[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@settings(max_examples=60)
@given(st.sampled_from([3, 6, 12, 80]), st.randoms(use_true_random=False))
def test_any_requests_find_their_own_text_and_all_pages_again_in_the_end(count: int, random: Random) -> None:
    memory = Memory(count)
    pages, slots = memory.pages, list[PagedSlot]()
    lengths: dict[PagedSlot, int] = {}
    prompts: dict[PagedSlot, list[int]] = {}
    beginnings = [[random.choice((1, 2)) for _ in range(size)] for size in (0, 30, PAGE, 2 * PAGE, 150)]
    for _ in range(30):
        kind = random.choice(("open", "open", "write", "write", "write", "close"))
        if kind == "open":
            prompt = random.choice(beginnings) + [random.choice((1, 2)) for _ in range(random.randint(1, 70))]
            length = len(prompt) + random.randint(0, 100)
            if length > count * PAGE:
                with pytest.raises(PromptError):
                    pages.open(prompt, length)
                continue
            slot = pages.open(prompt, length)
            if slot is None:
                assert slots, "there is nobody to wait for"
                continue
            assert len(slot) < len(prompt)
            assert slot.tokens == prompt[: len(slot)]
            shared = max((common(prompt[:-1], other.tokens) for other in slots), default=0)
            assert len(slot) >= (shared if count == 80 else shared // PAGE * PAGE)
            slots.append(slot)
            lengths[slot], prompts[slot] = length, prompt
        elif kind == "write" and slots:
            slot = random.choice(slots)
            room = lengths[slot] - len(slot)
            if part := prompts[slot][len(slot) :][: random.choice((5, 100, 300))]:
                # Others may compute the same at the same time.
                memory.write(slot, part)
                pages.extend(slot, part)
                memory.check(slots)
                continue
            drafted = [random.choice((1, 2)) for _ in range(random.randint(0, min(room, _MOST_DRAFTED)))]
            memory.write(slot, drafted)
            memory.check(slots)
            memory.write(slot, kept := drafted[: random.randint(0, len(drafted))])
            pages.extend(slot, kept)
        elif kind == "close" and slots:
            pages.close(slots.pop(random.randrange(len(slots))))
        memory.check(slots)
    for slot in slots:  # each can become as long as it was promised
        rest = [3] * (lengths[slot] - len(slot))
        memory.write(slot, rest)
        pages.extend(slot, rest)
        memory.check(slots)
    for slot in slots:
        pages.close(slot)
    whole = pages.open([4], count * PAGE)
    assert whole is not None
    memory.write(whole, [4] * (count * PAGE))
    pages.extend(whole, [4] * (count * PAGE))
    assert sorted(whole.pages) == list(range(count))
    memory.check([whole])


def test_room_that_was_promised_is_nobody_elses() -> None:
    memory = Memory(5)
    first = memory.pages.open([1] * 10, 3 * PAGE)
    assert first is not None
    assert memory.pages.open([2], 2 * PAGE + 1) is None
    second = memory.pages.open([2], 2 * PAGE)
    assert second is not None
    assert memory.pages.open([3], 1) is None
    memory.pages.close(first)
    assert memory.pages.open([3], 3 * PAGE) is not None


def test_requests_that_begin_alike_take_pages_once() -> None:
    """What they share fits, where twice as much would not; of a page that is not full a copy is made."""
    memory = Memory(6)
    text = [1, 2] * PAGE
    first = memory.pages.open([*text, 5], 4 * PAGE)
    assert first is not None
    memory.write(first, [*text, 5, 6, 7])
    memory.pages.extend(first, [*text, 5, 6, 7])
    second = memory.pages.open([*text, 5, 6, 8], 4 * PAGE)
    assert second is not None
    assert second.tokens == [*text, 5, 6]
    assert memory.copied == 1
    assert second.pages[:2] == first.pages[:2]
    memory.write(second, [8])
    memory.pages.extend(second, [8])
    memory.check([first, second])
    # The page is still the first one's.
    memory.pages.close(second)
    memory.check([first])


def test_pages_of_one_request_after_the_other_stand_side_by_side() -> None:
    """What lies side by side is read without a copy: also behind drafts that took pages and gave them back."""
    memory = Memory(100)
    for number in range(8):
        slot = memory.pages.open([number + 3], 4 * PAGE)
        assert slot is not None
        while len(slot) < 4 * PAGE - 2 * PAGE:
            memory.write(slot, [number + 3] * (PAGE + 30))
            memory.pages.extend(slot, [number + 3] * 25)
        assert (np.diff(slot.pages) == 1).all()
        memory.pages.close(slot)
