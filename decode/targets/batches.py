"""Items of a pass side by side: which of them share a call, and where their rows and what these look at stand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specds.decode.contracts import Item
from specds.decode.targets.pages import PAGE, PagedSlot
from specds.jit import compiled


@dataclass(frozen=True, slots=True)
class Pass:
    """The m rows of all items of a pass, those of an item side by side.

    Attributes:
        items: of which each has another slot.
        slots: theirs.
        starts: int64[items]: the position of each item's first rows.
        first: int64[items + 1], ascending from 0: the rows of item i are first[i] … first[i + 1] - 1.
        tokens: int64[m].
        parents: int64[m], of each row its parent among the item's rows, or -1.
    """

    items: Sequence[Item]
    slots: Sequence[PagedSlot]
    starts: NDArray[np.int64]
    first: NDArray[np.int64]
    tokens: NDArray[np.int64]
    parents: NDArray[np.int64]

    @classmethod
    def of(cls, items: Sequence[Item], starts: Sequence[int]) -> Pass:
        """The pass over some items, each from its own position on."""
        first = np.cumsum([0, *(len(item.tokens) for item in items)])
        tokens = np.concatenate([item.tokens for item in items], dtype=np.int64)
        parents = np.arange(-1, len(tokens) - 1)
        for item, begin in zip(items, first.tolist(), strict=False):
            end = begin + len(item.tokens)
            if item.parents is None:
                parents[begin:end] -= begin
            else:
                parents[begin:end] = item.parents
        slots = [item.slot for item in items if isinstance(item.slot, PagedSlot)]
        assert len(slots) == len(items), "a slot comes from the target's own pages"
        return cls(items, slots, np.array(starts, np.int64), first, tokens, parents)

    @property
    def sizes(self) -> NDArray[np.int64]:
        """int64[items]: rows of each."""
        return np.diff(self.first)

    @property
    def ends(self) -> NDArray[np.int64]:
        """int64[items]: how many positions each item's rows and what its slot holds take together."""
        return self.starts + self.sizes


@dataclass(frozen=True, slots=True)
class Batch:
    """Some items of a pass as lines of equally many cells, which look at equally many positions.

    The rows of an item stand at the end of its line. The cells before them look at the item's first token, so that they
    are numbers; nobody asks for them. Of positions behind a line's end the first token is read again, and not seen:
    what another request left behind in the same page is never read, be it a number or not.

    Attributes:
        items: their numbers in the pass, ascending.
        chosen: int64[k]: their rows in the pass, line by line.
        cells: int64[k]: where these stand: line · cells of a line + column.
        positions: int64[lines, n].
        writes: int64[k]: rows of the pool where each row's key and value go.
        reads: int64[lines, span]: rows of the pool that a line looks at.
        seen: bool[kinds, lines, n, span]: what each cell looks at; the second kind is that of sliding windows.
    """

    items: Sequence[int]
    chosen: NDArray[np.int64]
    cells: NDArray[np.int64]
    positions: NDArray[np.int64]
    writes: NDArray[np.int64]
    reads: NDArray[np.int64]
    seen: NDArray[np.bool_]


def side_by_side(
    work: Pass,
    items: Sequence[int],
    table: NDArray[np.int32],
    *,
    window: int = 0,
    lines: int = 0,
    rows: int = 0,
    span: int = 0,
    spare: int = 0,
) -> Batch:
    """Some items of a pass in one batch.

    Args:
        items: their numbers, ascending.
        table: pages of each slot, as `Pages.table`; they are there.
        window: how many positions a sliding window holds; 0: there is none.
        lines, rows, span: at least so many of each.
        spare: the row of the pool that lines of no item look at.
    """
    chosen_items = list(items)
    numbers = np.array([work.slots[item].number for item in chosen_items])
    starts, sizes, ends = work.starts[chosen_items], work.sizes[chosen_items], work.ends[chosen_items]
    lines, rows = max(lines, len(numbers)), max(rows, int(sizes.max()))
    span = max(span, int(ends.max()))
    first = np.concatenate([[0], np.cumsum(sizes)])
    within = np.arange(first[-1]) - np.repeat(first[:-1], sizes)
    chosen = np.repeat(work.first[chosen_items], sizes) + within
    own = np.repeat(np.arange(len(numbers)), sizes)
    cells = own * rows + np.repeat(rows - sizes, sizes) + within
    at = np.repeat(starts, sizes) + within
    writes = table[numbers[own], at // PAGE].astype(np.int64) * PAGE + at % PAGE
    columns = np.arange(span)[None]
    columns = np.where(columns < ends[:, None], columns, 0)
    reads = np.full((lines, span), spare, np.int64)
    reads[: len(numbers)] = table[numbers[:, None], columns // PAGE].astype(np.int64) * PAGE + columns % PAGE
    seen = np.zeros((2 if window else 1, lines, rows, span), np.bool_)
    positions = np.zeros((lines, rows), np.int64)
    _look(work.parents[chosen], first, starts, window, seen, positions)
    return Batch(chosen_items, chosen, cells, positions, writes, reads, seen)


@compiled
def _look(parents: Any, first: Any, starts: Any, window: int, seen: Any, positions: Any) -> None:
    """Fill in the positions of a batch's cells, and what they see.

    Args:
        parents: int64[k], as in `Pass`, of the batch's rows.
        first: int64[items + 1], where items begin.
        starts: int64[items].
        window: 0: there is no second kind.
        seen: bool[kinds, lines, n, span], all False.
        positions: int64[lines, n], all 0.
    """
    items, rows = len(starts), positions.shape[1]
    for line in range(len(positions)):
        begin, size = (first[line], first[line + 1] - first[line]) if line < items else (0, 0)
        padding = rows - size
        seen[:, line, :padding, 0] = True
        for row in range(size):
            cell, start, parent = padding + row, starts[line], parents[begin + row]
            position = start if parent < 0 else positions[line, padding + parent] + 1
            positions[line, cell] = position
            seen[0, line, cell, :start] = True
            above = row
            while above >= 0:
                seen[0, line, cell, start + above] = True
                above = parents[begin + above]
            if window:
                low = max(0, position - window + 1)
                seen[1, line, cell, low:start] = True
                above = row
                while above >= 0 and positions[line, padding + above] >= low:
                    seen[1, line, cell, start + above] = True
                    above = parents[begin + above]


def calls_of(work: Pass, *, alone: int, row_price: float, position_price: float) -> list[list[int]]:
    """Which items of a pass go side by side, each call's by number, ascending.

    Args:
        alone: an item of so many rows is by itself.
        row_price, position_price: what a row more, or a position looked at, costs of each item in a call; a call itself
            costs 1.
    """
    sizes = work.sizes
    calls = [[item] for item in np.flatnonzero(sizes >= alone).tolist()]
    short = np.flatnonzero(sizes < alone)
    if len(short):
        # Contexts of about one length are as good as equal: fewer ways to share them out are looked at.
        spans = -(-work.ends // PAGE) * PAGE
        for similar in shared_calls(sizes[short], row_price):
            several = short[similar]
            calls += [several[part].tolist() for part in shared_calls(spans[several], position_price)]
    return calls


def shared_calls(sizes: Sequence[int] | NDArray[np.int64], price: float) -> list[list[int]]:
    """Which items go together into a call that pads all of them to the largest, so that all calls cost least.

    Args:
        sizes: of each item.
        price: what a unit of size costs, of each item in a call; a call itself costs 1.

    Returns:
        The items of each call by number, ascending.
    """
    of_size: dict[int, list[int]] = {}
    for item, size in enumerate(sizes):
        of_size.setdefault(int(size), []).append(item)
    ascending = sorted(of_size)
    # What the smaller sizes cost at least, and with which size the call of each begins then.
    costs, begins = [0.0], [0]
    for number, size in enumerate(ascending):
        least, count = float("inf"), 0
        begins.append(number)
        for begin in range(number, -1, -1):
            count += len(of_size[ascending[begin]])
            cost = costs[begin] + 1.0 + price * size * count
            if cost < least:
                least, begins[-1] = cost, begin
        costs.append(least)
    calls = []
    end = len(ascending)
    while end:
        begin = begins[end]
        calls.append(sorted(item for size in ascending[begin:end] for item in of_size[size]))
        end = begin
    return calls[::-1]
