"""Calibrating CSD: decode prompts strictly, and count where the target picked another token than was drafted."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from specds.datastore.corrections import add_to_table, calibrating, check_pair, read_table
from specds.datastore.provenance import provenance
from specds.decode.engine import Engine
from specds.errors import PromptError
from specds.reading.prompts import BadRow, Prompt

# Above 1 nothing passes the gate: verification is strict, and only counts (CSD, Phase 1).
COUNTING = {"tau": "2"}
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
    failed: list[tuple[str, PromptError]] = field(default_factory=list)


def calibrate(
    engine: Engine,
    prompts: Iterable[Prompt | BadRow],
    out: Path,
    max_new_tokens: int,
    progress: Callable[[Calibration], None] = lambda state: None,
) -> Calibration:
    """Count divergences over prompts into the table at `out`, which is begun, added to, or gone on with.

    Counts and the digests of the prompts they are of are written together every few seconds, so that a run that dies
    loses some work and counts nothing twice. Prompts that the table has counted under the same conditions are skipped.

    Args:
        engine: one whose verifier counts, and accepts nothing lossily: `csd` with `COUNTING`, and a fixed budget,
            because what is drafted decides what is counted.

    Raises:
        CorruptTable, ForeignTable: what `out` holds.
        StoreLocked: another calibration is counting into it.
        OutputError: it cannot be written.
    """
    with calibrating(out):
        return _calibrate(engine, prompts, out, max_new_tokens, progress)


def _calibrate(
    engine: Engine,
    prompts: Iterable[Prompt | BadRow],
    out: Path,
    max_new_tokens: int,
    progress: Callable[[Calibration], None],
) -> Calibration:
    memory = engine.memory
    assert memory is not None
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
            memory.take_new(),
            prompts=len(pending.done),
            tokens=pending.tokens,
            provenance=command,
            done=pending.done,
        )
        pending.forget()

    try:
        for row in prompts:
            if isinstance(row, BadRow):
                state.failed.append((row.id, row.error))
                continue
            digest = _digest(engine, row, max_new_tokens)
            if digest in done:
                state.known += 1
                continue
            before = dict(memory.new)
            try:
                answer = engine.answer(row, max_new_tokens)
            except BaseException as error:
                memory.new = before  # of a prompt all is counted, or nothing
                if not isinstance(error, PromptError):
                    raise
                state.failed.append((row.id, error))
                continue
            done.add(digest)
            pending.done.append(digest)
            pending.tokens += answer.counters.tokens
            state.prompts += 1
            state.tokens += answer.counters.tokens
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

    done: list[str] = field(default_factory=list)
    tokens: int = 0
    since: float = field(default_factory=time.monotonic)

    def forget(self) -> None:
        self.done, self.tokens, self.since = [], 0, time.monotonic()


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
