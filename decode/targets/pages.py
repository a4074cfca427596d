"""Pages of a key-value cache: who holds which, and which of them others have computed already.

A page is room for PAGE consecutive tokens of one text. A page that is full is never written again; requests that begin
alike share such pages, also those of requests that are done, as long as there is room. Of a page that is not full a
copy is made. Nothing here knows what a page holds: a target keeps that, page by page.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from specds.decode.contracts import Slot
from specds.decode.draft import common_prefix
from specds.errors import PromptError

PAGE = 64
"""Tokens of a page."""
_KEPT = 64
"""Pages of requests that are done which are kept for those to come, at most: some thousand tokens."""


class Kept:
    """A page whose tokens others may share: full, or the unfinished last page of a request that is done.

    Attributes:
        number: which page.
        tokens: of a full page PAGE of them.
        children: full pages that follow it, by their tokens.
        tails: unfinished ones that do.
        live: requests that are being answered whose last full page this is.
        holders: how many requests that are being answered hold it.
    """

    __slots__ = ("children", "holders", "live", "number", "parent", "tails", "tokens")

    def __init__(self, number: int, tokens: tuple[int, ...], parent: Kept | None) -> None:
        self.number, self.tokens, self.parent = number, tokens, parent
        self.children: dict[tuple[int, ...], Kept] = {}
        self.tails: dict[int, Kept] = {}
        self.live: dict[int, PagedSlot] = {}
        self.holders = 0


class PagedSlot:
    """A request's place: the tokens that it holds, and the pages that these lie in, in order.

    Attributes:
        number: its line in the table of pages.
        tokens: committed ones, which it holds.
        pages: of these, and behind them of what a pass puts there.
        staged: what the last pass put behind them.
    """

    __slots__ = ("_own", "_path", "_promised", "number", "pages", "staged", "tokens")

    def __init__(self, number: int, path: list[Kept], promised: int) -> None:
        self.number = number
        self.tokens: list[int] = []
        self.pages: list[int] = [kept.number for kept in path]
        self.staged: NDArray[np.int32] = np.empty(0, np.int32)
        # Full pages in order, as others find them; pages that are nobody else's though full: another computed the same
        # at the same time; and how many pages it may hold in all.
        self._path, self._own, self._promised = path, list[int](), promised

    def __len__(self) -> int:
        return len(self.tokens)

    def places(self, start: int, end: int) -> NDArray[np.int64]:
        """int64[end - start]: where the tokens from `start` on lie, counted over all pages."""
        positions = np.arange(start, end)
        places: NDArray[np.int64] = np.array(self.pages, np.int64)[positions // PAGE] * PAGE + positions % PAGE
        return places


def paged(slot: Slot) -> PagedSlot:
    """A slot of a target whose cache is made of pages."""
    assert isinstance(slot, PagedSlot)
    return slot


class Pages:
    """Gives pages to requests.

    Args:
        count: how many pages there may be.
        copy: (from page, to page, count): copy what stands for a page's first tokens.

    Attributes:
        table: int32[slots, m]: each slot's pages, in order; -1 behind the last.
        used: pages that were ever given out; all of them are below this number.
    """

    def __init__(self, count: int, copy: Callable[[int, int, int], None]) -> None:
        self.count, self._copy = count, copy
        self.table = np.full((1, 1), -1, np.int32)
        self.used = 0
        self._free: list[int] = []
        self._root = Kept(-1, (), None)
        # Pages that nobody holds any more, longest unused first.
        self._idle: OrderedDict[int, Kept] = OrderedDict()
        self._promised = 0
        self._slots: list[int] = []
        self._lines = 0

    def open(self, prompt: Sequence[int], length: int) -> PagedSlot | None:
        """See `Target.open`."""
        whole = -(-length // PAGE)
        if whole > self.count:
            raise PromptError(
                f"{length:,} tokens need {whole:,} pages of the key-value cache, and there are {self.count:,}",
                "a larger --kv-memory, a shorter prompt or a smaller --max-new-tokens",
            )
        path = self._known(prompt)
        held = len(path) * PAGE
        idle = sum(kept.holders == 0 for kept in path)
        if whole - len(path) > self._available() - idle:
            return None
        source, same = self._begins_like(path, prompt[held : len(prompt) - 1])
        if source in self._idle and whole - len(path) > self._available() - idle - 1:
            same = 0  # that very page is needed
        for kept in path:
            self._hold(kept)
        slot = PagedSlot(self._line(), path, whole)
        self._promised += whole - len(path)
        slot.tokens = list(prompt[: held + same])
        self._show(slot, 0)
        (path[-1] if path else self._root).live[slot.number] = slot
        if same:
            spared = self._idle.pop(source, None)  # it must not be the page that is given
            self.reserve(slot, len(slot))
            if spared is not None:
                self._idle[source] = spared
            self._copy(source, slot.pages[-1], same)
        return slot

    def close(self, slot: PagedSlot, *, keep: bool = True) -> None:
        """See `Target.close`."""
        path = slot._path
        above = path[-1] if path else self._root
        del above.live[slot.number]
        self._drop(slot, len(slot))
        self._promised -= slot._promised - len(slot.pages)
        rest = slot.tokens[len(path) * PAGE :]
        if rest and not keep:
            self._free.append(slot.pages[-1])
        elif rest:
            tail = Kept(slot.pages[-1], tuple(rest), above)
            above.tails[tail.number] = tail
            self._idle[tail.number] = tail
        self._free += reversed(slot._own)
        for kept in reversed(path):
            kept.holders -= 1
            if not kept.holders and not keep and not kept.children and not kept.tails:
                self._remove(kept)
                self._free.append(kept.number)
            elif not kept.holders:
                self._idle[kept.number] = kept
        self.table[slot.number] = -1
        self._slots.append(slot.number)
        while len(self._idle) > _KEPT:
            self._free.append(self._evict())

    def forget(self) -> None:
        """See `Target.forget`."""
        while self._idle:
            self._free.append(self._evict())

    def reserve(self, slot: PagedSlot, length: int) -> None:
        """Pages for so many tokens; what a slot was opened for there always is."""
        first = len(slot.pages)
        for _ in range(first, -(-length // PAGE)):
            slot.pages.append(self._take())
            self._promised -= 1
        if len(slot.pages) > first:
            self._show(slot, first)

    def extend(self, slot: PagedSlot, tokens: Sequence[int]) -> None:
        """Tokens are committed that stand behind those that the slot holds; pages behind them are given back."""
        slot.tokens += tokens
        self._drop(slot, len(slot))
        while len(slot.tokens) >= PAGE * (len(slot._path) + 1):
            self._share(slot)

    def _share(self, slot: PagedSlot) -> None:
        """One more full page, which others may share from now on."""
        path = slot._path
        above, place = (path[-1] if path else self._root), len(path)
        key = tuple(slot.tokens[place * PAGE : (place + 1) * PAGE])
        kept = above.children.get(key)
        if kept is None:
            kept = above.children[key] = Kept(slot.pages[place], key, above)
            kept.holders = 1
        else:
            self._hold(kept)
            slot._own.append(slot.pages[place])
        path.append(kept)
        del above.live[slot.number]
        kept.live[slot.number] = slot

    def _drop(self, slot: PagedSlot, length: int) -> None:
        """Give back pages behind so many tokens."""
        keep = -(-length // PAGE)
        if len(slot.pages) > keep:
            # In order they are given again, side by side where they were.
            self._free += reversed(slot.pages[keep:])
            self._promised += len(slot.pages) - keep
            self.table[slot.number, keep : len(slot.pages)] = -1
            del slot.pages[keep:]

    def _known(self, prompt: Sequence[int]) -> list[Kept]:
        """The full pages of a prompt that are there, without its last token."""
        path: list[Kept] = []
        kept = self._root
        for start in range(0, (len(prompt) - 1) // PAGE * PAGE, PAGE):
            child = kept.children.get(tuple(prompt[start : start + PAGE]))
            if child is None:
                break
            path.append(child)
            kept = child
        return path

    def _begins_like(self, path: list[Kept], tokens: Sequence[int]) -> tuple[int, int]:
        """The page behind a path that begins with most of some tokens, and with how many."""
        above, start = path[-1] if path else self._root, len(path) * PAGE
        others: list[tuple[int, Sequence[int]]] = [
            (kept.number, kept.tokens) for kept in (*above.children.values(), *above.tails.values())
        ]
        others += [
            (slot.pages[len(path)], slot.tokens[start:]) for slot in above.live.values() if len(slot.tokens) > start
        ]
        best, most = -1, 0
        for number, held in others:
            if tokens and held[0] == tokens[0]:
                same = common_prefix(held, tokens)
                if same > most:
                    best, most = number, same
        return best, most

    def _hold(self, kept: Kept) -> None:
        kept.holders += 1
        self._idle.pop(kept.number, None)

    def _available(self) -> int:
        return len(self._free) + self.count - self.used + len(self._idle) - self._promised

    def _take(self) -> int:
        if self._free:
            return self._free.pop()
        if self.used < self.count:
            self.used += 1
            return self.used - 1
        return self._evict()

    def _evict(self) -> int:
        """The page that nobody has used for longest and that none follows which is kept."""
        number = next(number for number, kept in self._idle.items() if not kept.children and not kept.tails)
        self._remove(self._idle.pop(number))
        return number

    def _remove(self, kept: Kept) -> None:
        """Nobody finds a page any more."""
        assert kept.parent is not None  # the root is nobody's
        if len(kept.tokens) == PAGE and kept.parent.children.get(kept.tokens) is kept:
            del kept.parent.children[kept.tokens]
        else:
            del kept.parent.tails[kept.number]

    def _line(self) -> int:
        if self._slots:
            return self._slots.pop()
        self._lines += 1
        return self._lines - 1

    def _show(self, slot: PagedSlot, first: int) -> None:
        """Write the pages of a slot from number `first` on into the table."""
        lines, width = self.table.shape
        if slot.number >= lines or len(slot.pages) > width:
            larger = np.full((max(lines, 2 * slot.number + 1), max(width, 2 * len(slot.pages))), -1, np.int32)
            larger[:lines, :width] = self.table
            self.table = larger
        self.table[slot.number, first : len(slot.pages)] = slot.pages[first:]
