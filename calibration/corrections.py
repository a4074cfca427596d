"""Calibrating CSD: decode prompts strictly, and count where the target picked another token than was drafted."""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from specds.datastore.corrections import add_to_table, calibrating, check_pair, key_of, read_table
from specds.datastore.provenance import provenance
from specds.decode.contracts import Step
from specds.decode.engine import Engine
from specds.decode.verifiers.walk import below
from specds.errors import SpecdsError
from specds.reading.prompts import BadRow, Prompt

# Above 1 nothing passes the gate; what is counted is what the steps say (CSD, Phase 1).
STRICT = {"tau": "2", "update": "no"}
_SECONDS = 10.0
# Prompts after which divergences of a run go into a table that learns from it.
_PROMPTS_A_PART = 32


@dataclass(slots=True)
class Calibration:
    """What a calibration did.

    Attributes:
        prompts, tokens: decoded and counted in this run.
        known: prompts that the table had counted before.
        failed: rows that are not prompts, or that the model cannot take, with the reason.
    """

    prompts: int = 0
    tokens: int = 0
    known: int = 0
    failed: list[tuple[str, SpecdsError]] = field(default_factory=list)


def calibrate(
    engine: Engine,
    prompts: Iterable[Prompt | BadRow],
    out: Path,
    max_new_tokens: int,
    progress: Callable[[Calibration], None] = lambda state: None,
    *,
    parallel: int = 1,
) -> Calibration:
    """Count divergences over prompts into the table at `out`, which is begun, added to, or gone on with.

    Counts and the digests of the prompts they are of are written together every few seconds, so that a run that dies
    loses some work and counts nothing twice. Prompts that the table has counted under the same conditions are skipped.
    What is counted of a prompt does not depend on the others, so that the table is the same however many are answered
    at once; but for drafters that are told to let requests learn from each other (`session=yes` of auto).

    Args:
        engine: one whose verifier accepts nothing lossily: `csd` with `STRICT`, and a fixed budget, because what is
            drafted decides what is counted.
        parallel: most prompts answered at once.

    Raises:
        CorruptTable, ForeignTable: what `out` holds.
        StoreLocked: another calibration is counting into it.
        OutputError: it cannot be written.
    """
    with calibrating(out):
        return _calibrate(engine, prompts, out, max_new_tokens, progress, parallel)


def _calibrate(
    engine: Engine,
    prompts: Iterable[Prompt | BadRow],
    out: Path,
    max_new_tokens: int,
    progress: Callable[[Calibration], None],
    parallel: int,
) -> Calibration:
    done: set[str] = set()
    if out.exists():
        table = read_table(out)
        check_pair(table, engine.pair, str(out))
        done = set(table.done)
    command = provenance()
    state = Calibration()
    pending = _Pending()

    def write() -> None:
        add_to_table(
            out,
            engine.pair,
            pending.counts,
            prompts=len(pending.done),
            tokens=pending.tokens,
            provenance=command,
            done=pending.done,
        )
        pending.forget()

    def unknown() -> Iterator[Prompt | BadRow]:
        for row in prompts:
            if isinstance(row, Prompt):
                digest = _digest(engine, row, max_new_tokens)
                if digest in done:
                    state.known += 1
                    continue
                done.add(digest)
            yield row

    try:
        for answered in engine.answers(unknown(), max_new_tokens, parallel=parallel):
            if answered.answer is None:
                assert answered.error is not None
                state.failed.append((answered.prompt.id, answered.error))
                continue
            assert isinstance(answered.prompt, Prompt)
            tokens = answered.answer.counters.tokens
            pending.done.append(_digest(engine, answered.prompt, max_new_tokens))
            pending.tokens += tokens
            pending.counts.update(
                key for turn in answered.answer.turns for step in turn.steps for key in divergences(step)
            )
            state.prompts += 1
            state.tokens += tokens
            progress(state)
            if time.monotonic() - pending.since > _SECONDS:
                write()
    finally:
        # Also when it is interrupted: what was counted so far is whole.
        if pending.done or not out.exists():
            write()
    return state


@dataclass(slots=True)
class _Pending:
    """What is counted and not written yet."""

    counts: Counter[int] = field(default_factory=Counter)
    done: list[str] = field(default_factory=list)
    tokens: int = 0
    since: float = field(default_factory=time.monotonic)

    def forget(self) -> None:
        self.counts, self.done, self.tokens, self.since = Counter(), [], 0, time.monotonic()


def divergences(step: Step) -> Iterator[int]:
    """Of each token that was drafted where the target picked another one the key of the pair (CSD, §4.2).

    None of a step that a stop token ends inside its accepted path: the target picked nothing after it.
    """
    if len(step.tokens) <= len(step.path):
        return
    for child in below(step.draft, step.path[-1] if step.path else -1):
        yield key_of(int(step.draft.tokens[child]), step.tokens[-1])


def _digest(engine: Engine, prompt: Prompt, max_new_tokens: int) -> str:
    """Of a prompt and all that its counts depend on, beside the pair."""
    sampling = engine.sampling
    parts = [
        prompt.content,
        [sampling.temperature, sampling.top_k, sampling.top_p, sampling.seed],
        sorted(engine.method.options.items()),
        [str(path.resolve()) for path in engine.method.paths],
        engine.method.budget,
        max_new_tokens,
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


class TableUpdates:
    """Divergences on their way into a table: in parts, so that a job that dies has given most of them."""

    def __init__(self, table: Path | None, engine: Engine) -> None:
        self._table, self._engine = table, engine
        self._prompts = self._tokens = 0

    def saw(self, tokens: int) -> None:
        """One more prompt is answered."""
        self._prompts += tokens > 0
        self._tokens += tokens
        if self._prompts >= _PROMPTS_A_PART:
            self.close()

    def close(self) -> None:
        """Add what is not in the table yet."""
        if self._table is None or self._engine.memory is None:
            return
        new = self._engine.memory.take_new()
        if new or self._prompts:
            add_to_table(
                self._table,
                self._engine.pair,
                new,
                prompts=self._prompts,
                tokens=self._tokens,
                provenance=provenance(),
            )
        self._prompts = self._tokens = 0
