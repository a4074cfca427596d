"""Calibrated Speculative Decoding: rejected drafts that recur and that the target finds plausible are let pass."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from numpy.typing import NDArray

from specds.datastore.corrections import FREQUENCY, Pair, Table, check_pair, key_of, read_table
from specds.decode.contracts import Case, Rescue, Verdict, Verifier
from specds.decode.draft import Draft
from specds.decode.registry import option
from specds.decode.verifiers.rejection import Picking
from specds.decode.verifiers.walk import below, follow
from specds.sampling import Sampling, unchecked


@dataclass(slots=True)
class Memory:
    """Counts of divergences: those of a table, and what this process has added (CSD, §4.2).

    Attributes:
        counts: by `key_of`, all of them.
        new: those that no table has yet.
        least: λ, from which count on a draft is accepted.
    """

    counts: dict[int, int] = field(default_factory=dict)
    new: dict[int, int] = field(default_factory=dict)
    least: int = FREQUENCY

    @classmethod
    def of(cls, table: Table, least: int = FREQUENCY) -> Memory:
        """What a table holds."""
        keys = map(key_of, table.drafted.tolist(), table.picked.tolist())
        return cls(dict(zip(keys, table.count.tolist(), strict=True)), least=least)

    def add(self, key: int) -> None:
        """One more divergence of a pair."""
        self.counts[key] = self.counts.get(key, 0) + 1
        self.new[key] = self.new.get(key, 0) + 1

    def take_new(self) -> Mapping[int, int]:
        """What no table has yet, once."""
        new, self.new = self.new, {}
        return new


class Csd(Verifier):
    """Algorithm 1 of CSD, over any drafter's chains and trees. Lossy.

    Tokens are verified by rejection sampling (at temperature 0 by exact matching). Where the target's token was not
    drafted, a child is rescued whose divergence from it was seen at least λ times, counted before this one, and whose
    logit is at least log τ above it, whatever the temperature (Eq. 3); of several children the one of the best score,
    of equals the first. Decoding goes on behind it. Every child of the node counts as a divergence.
    """

    @dataclass(frozen=True, slots=True)
    class Options:
        """Options of CSD."""

        table: str = option("", "the correction table (Parquet); none: begin with no counts")
        frequency: int = option(FREQUENCY, "λ: how often a divergence must have been seen (§5.1: 6)", least=0)
        tau: float = option(
            0.01,
            "τ: least ratio of the drafted token's probability to the target's (§5.1: 0.01); above 1: none",
            least=0,
        )
        update: bool = option(True, "count the divergences of this run too (Algorithm 1, line 18)")
        any_draft: bool = option(False, "take a table of another drafter or draft model of the same target")

    independent: ClassVar[bool] = True
    lossless: ClassVar[bool] = False
    summary: ClassVar[str] = "rejected tokens pass that recur (a correction table) and that the target finds plausible"

    def __init__(self, options: Options, sampling: Sampling, pair: Pair | None = None) -> None:
        self._options = options
        self._picking = Picking(sampling)
        self._gate = gate(options.tau)
        self.memory: Memory = recall(options.table, pair, any_draft=options.any_draft, least=options.frequency)

    def verify(self, case: Case) -> Verdict:
        """See `Verifier.verify`."""
        draft, logits = case.draft, case.logits

        def rescue(node: int, token: int, depth: int) -> Rescue | None:
            children = below(draft, node)
            if not children:
                return None
            keys = [key_of(int(draft.tokens[child]), token) for child in children]
            counts = [self.memory.counts.get(key, 0) for key in keys]
            if self._options.update:
                for key in keys:
                    self.memory.add(key)
            if max(counts) < self._options.frequency:
                return None  # mostly so; the row is not read for nothing
            row = unchecked(logits[node + 1])
            return best_child(draft, children, row, token, self._gate, counts, self._options.frequency)

        return follow(draft, self._picking.over(case), rescue)


def gate(tau: float) -> float:
    """log τ; above 1 nothing passes, not even a token likelier than the one that was drawn instead of it."""
    return -math.inf if tau <= 0 else math.inf if tau > 1 else math.log(tau)


def recall(table: str, pair: Pair | None, *, any_draft: bool = False, least: int = FREQUENCY) -> Memory:
    """The memory of a table, or an empty one.

    Raises:
        InputError, CorruptTable, ForeignTable: what `read_table` and `check_pair` raise.
    """
    if not table:
        return Memory(least=least)
    read = read_table(Path(table))
    if pair is not None:
        draft = read.pair.draft if any_draft else pair.draft
        check_pair(read, Pair(pair.target, draft, pair.tokenizer, pair.vocabulary), table)
    return Memory.of(read, least)


def best_child(
    draft: Draft,
    children: list[int],
    row: NDArray,  # type: ignore[type-arg]
    token: int,
    gate: float,
    counts: list[int],
    least: int,
) -> Rescue | None:
    """Of the children that were seen often enough and that pass the gate the one of the best score."""
    best: Rescue | None = None
    for child, count in zip(children, counts, strict=True):
        ratio = float(row[draft.tokens[child]] - row[token])
        passes = count >= least and ratio >= gate
        if passes and (best is None or draft.score[child] > draft.score[best.node]):
            best = Rescue(child, token, ratio, count)
    return best
