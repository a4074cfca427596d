"""Traces: one Parquet row for each forward pass of the target."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from specds.datastore.rows import check_file, shown
from specds.decode.contracts import Step
from specds.decode.pricing.curve import MOST_ROWS, Passes
from specds.errors import InputError, OutputError, first_line

_ROWS = 8_192
_HINT = "give a file that `decode --trace` wrote"


def trace_row(prompt: str, turn: int, drafter: str, step: Step) -> dict[str, Any]:
    """A step as a flat record.

    The draft is kept whole (tokens, parents, scores, and where each came from), so that what any verifier would
    have done with it, and what a smaller budget would have kept, can be replayed.
    """
    return {
        "prompt": prompt,
        "turn": turn,
        "step": step.index,
        "position": step.position,
        "drafter": drafter,
        "drafted": len(step.draft),
        "accepted": step.accepted,
        "committed": len(step.tokens),
        "tokens": list(step.tokens),
        "draft_tokens": step.draft.tokens.tolist(),
        "draft_parents": step.draft.parents.tolist(),
        "draft_scores": step.draft.score.tolist(),
        "draft_sources": [] if step.draft.origin is None else step.draft.origin.names(),
        "draft_places": [] if step.draft.origin is None else step.draft.origin.place.tolist(),
        "path": list(step.path),
        "rescue_nodes": [rescue.node for rescue in step.rescues],
        "rescue_picked": [rescue.picked for rescue in step.rescues],
        "rescue_log_ratios": [rescue.log_ratio for rescue in step.rescues],
        "rescue_counts": [rescue.count for rescue in step.rescues],
        "asked": list(step.asked),
        "asked_seconds": list(step.asked.values()),
        "draft_seconds": step.draft_seconds,
        "forward_seconds": step.forward_seconds,
        "verify_seconds": step.verify_seconds,
        "commit_seconds": step.commit_seconds,
    }


class TraceWriter:
    """Writes trace rows to a Parquet file, which appears whole when the writer closes.

    Raises:
        OutputError: the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        self._rows: list[dict[str, Any]] = []
        self._writer: Any = None
        self._written = False

    def __enter__(self) -> Self:
        import pyarrow.parquet as pq

        # The finished file takes the place of what is there, and that must not be a device.
        if self._path.exists() and not self._path.is_file():
            raise OutputError(f"cannot write the trace {self._path}: it is not a file", "choose another --trace")
        try:
            self._writer = pq.ParquetWriter(self._temporary, trace_schema(), compression="zstd")
        except OSError as error:
            raise self._refused(error) from error
        return self

    def carry_over(self, prompts: Collection[str]) -> None:
        """Keep the rows of some prompts that an earlier run wrote to the same path, if it wrote any.

        Raises:
            OutputError: what is there is not a trace; it is left as it is.
        """
        import pyarrow as pa
        import pyarrow.compute as pc
        import pyarrow.parquet as pq

        if not self._path.exists():
            return
        try:
            with pq.ParquetFile(self._path) as old:
                if not old.schema_arrow.equals(trace_schema()):
                    raise pa.ArrowInvalid("its columns are others")
                count = 0
                for batch in old.iter_batches(_ROWS):
                    kept = batch.filter(pc.is_in(batch["prompt"], pa.array(list(prompts), pa.string())))
                    self._writer.write_batch(kept)
                    count += len(kept)
            self._written |= count > 0  # not before all of it was read: the old file is replaced then
        except pa.ArrowInvalid as error:
            raise OutputError(f"{self._path} is not a trace: {first_line(error)}", "choose another --trace") from error
        except OSError as error:
            raise self._refused(error) from error

    def add(self, prompt: str, turn: int, drafter: str, steps: Sequence[Step]) -> None:
        """Append the steps of one turn."""
        self._rows += [trace_row(prompt, turn, drafter, step) for step in steps]
        if len(self._rows) >= _ROWS:
            self._flush()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Finish the file, also after an error: what was traced is kept, if anything was."""
        try:
            self._flush()
            self._writer.close()
            if kind is None or self._written:
                self._temporary.replace(self._path)
        except OSError as failure:
            raise self._refused(failure) from failure
        finally:
            self._temporary.unlink(missing_ok=True)

    def _flush(self) -> None:
        import pyarrow as pa

        if self._rows:
            try:
                self._writer.write_table(pa.Table.from_pylist(self._rows, trace_schema()))
            except OSError as error:
                raise self._refused(error) from error
            self._written = True
            self._rows = []

    def _refused(self, error: OSError) -> OutputError:
        return OutputError(f"cannot write the trace {self._path}: {error.strerror or error}", "check --trace")


def read_trace(path: str, columns: Sequence[str]) -> list[dict[str, Any]]:
    """Some columns of a trace, a record a step.

    Raises:
        InputError: it cannot be read, lacks a column, or a field is empty.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    check_file(path)
    try:
        rows: list[dict[str, Any]] = pq.read_table(path, columns=list(columns)).to_pylist()
    except (pa.ArrowException, OSError, KeyError) as error:
        raise InputError(f"{shown(path)} is no trace: {first_line(error)}", _HINT) from error
    if any(None in row.values() or len(row) != len(columns) for row in rows):
        raise InputError(f"{shown(path)} is no trace: a field is empty", _HINT)
    return rows


def read_passes(path: str) -> Passes:
    """The passes that a trace tells of.

    Raises:
        InputError: as `read_trace`, or what is there is no number of rows or seconds.
    """
    import numpy as np

    columns = ("turn", "step", "position", "drafted", "forward_seconds", "verify_seconds")
    rows = read_trace(path, columns)
    try:
        turn, step, position, drafted = (np.array([row[name] for row in rows], np.int64) for name in columns[:4])
        # On a GPU the wait for a pass is where its result is read.
        forward, verify = (np.array([row[name] for row in rows], np.float64) for name in columns[4:])
    except (ValueError, TypeError, OverflowError) as error:
        raise InputError(f"{shown(path)} is no trace: {first_line(error)}", _HINT) from error
    seconds = forward + verify
    if not np.isfinite(seconds).all() or (seconds < 0).any() or not ((drafted >= 0) & (drafted < MOST_ROWS)).all():
        raise InputError(f"{shown(path)} is no trace: numbers that cannot be", _HINT)
    if not ((position >= 1) & (position < 1 << 40)).all():
        raise InputError(f"{shown(path)} is no trace: positions that cannot be", _HINT)
    later = step > 0
    first = ~later & (turn == 0)
    return Passes(drafted[later] + 1, position[later] - 1, seconds[later], position[first], seconds[first])


def trace_schema() -> Any:
    """The Arrow schema of a trace."""
    import pyarrow as pa

    whole, real = pa.int32(), pa.float64()
    return pa.schema(
        [
            ("prompt", pa.string()),
            ("turn", whole),
            ("step", whole),
            ("position", whole),
            ("drafter", pa.string()),
            ("drafted", whole),
            ("accepted", whole),
            ("committed", whole),
            ("tokens", pa.list_(whole)),
            ("draft_tokens", pa.list_(whole)),
            ("draft_parents", pa.list_(whole)),
            ("draft_scores", pa.list_(pa.float32())),
            ("draft_sources", pa.list_(pa.string())),
            ("draft_places", pa.list_(whole)),
            ("path", pa.list_(whole)),
            ("rescue_nodes", pa.list_(whole)),
            ("rescue_picked", pa.list_(whole)),
            ("rescue_log_ratios", pa.list_(real)),
            ("rescue_counts", pa.list_(pa.int64())),
            ("asked", pa.list_(pa.string())),
            ("asked_seconds", pa.list_(real)),
            *((f"{part}_seconds", real) for part in ("draft", "forward", "verify", "commit")),
        ]
    )
