"""Traces: one Parquet row for each forward pass of the target."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from specds.datastore.rows import check_file, shown
from specds.decode.contracts import Step
from specds.decode.cost import MOST_ROWS, Passes
from specds.errors import InputError, OutputError
from specds.parquet import reading, require_columns

_ROWS = 8_192
_COUNTS = ("turn", "step", "position", "drafted", "accepted", "committed")
# Of a part of one step; a year, in which no clock errs.
_MOST_SECONDS = 3.2e7
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
        if not self._path.exists():
            return
        count = 0
        for batch in self._rows_of(prompts):
            try:
                self._writer.write_batch(batch)
            except OSError as error:
                raise self._refused(error) from error
            count += len(batch)
        self._written |= count > 0  # not before all of it was read: the old file is replaced then

    def _rows_of(self, prompts: Collection[str]) -> Iterator[Any]:
        import pyarrow as pa
        import pyarrow.compute as pc
        import pyarrow.parquet as pq

        wanted = pa.array(list(prompts), pa.string())

        def refused(why: str) -> OutputError:
            return OutputError(f"{self._path} is not a trace: {why}", "choose another --trace")

        with reading(refused), pq.ParquetFile(self._path) as old:
            if not old.schema_arrow.equals(trace_schema()):
                raise pa.ArrowInvalid("its columns are others")
            for batch in old.iter_batches(_ROWS):
                yield batch.filter(pc.is_in(batch["prompt"], wanted))

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

    def refused(why: str) -> InputError:
        return InputError(f"{shown(path)} is no trace: {why}", _HINT)

    check_file(path)
    with reading(refused):
        with pq.ParquetFile(path) as file:
            require_columns(file.schema_arrow, pa.schema([trace_schema().field(name) for name in columns]))
        rows: list[dict[str, Any]] = pq.read_table(path, columns=list(columns)).to_pylist()
    for row in rows:
        if (problem := problem_of(row)) is not None:
            raise refused(problem)
    return rows


def problem_of(row: Mapping[str, Any]) -> str | None:
    """What makes some fields of a step none that decoding wrote: an empty one, seconds that cannot be, no tree."""
    for name, value in row.items():
        if value is None or (isinstance(value, list) and None in value):
            return f"a field {name!r} is empty"
        if name.endswith("seconds"):
            some = value if isinstance(value, list) else [value]
            if not all(0 <= one <= _MOST_SECONDS for one in some):
                return f"numbers that cannot be: {name} {value!r}"[:200]
    parents, path = row.get("draft_parents"), row.get("path")
    if parents is not None and not all(-1 <= parent < node for node, parent in enumerate(parents)):
        return "a draft is no tree"
    if parents is not None and len(row.get("draft_scores", parents)) != len(parents):
        return "a draft's scores are not one a node"
    if parents is not None and path is not None and not all(0 <= node < len(parents) for node in path):
        return "a path leads out of its draft"
    for name in _COUNTS:
        if row.get(name, 0) < 0:
            return f"numbers that cannot be: {name} {row[name]}"
    if path is not None and row.get("accepted", 0) > len(path):
        return "more tokens are accepted than the path has"
    return None


def read_passes(path: str) -> Passes:
    """The passes that a trace tells of.

    Raises:
        InputError: as `read_trace`, or what is there is no number of rows or seconds.
    """
    import numpy as np

    columns = ("turn", "step", "position", "drafted", "forward_seconds", "verify_seconds")
    rows = read_trace(path, columns)
    turn, step, position, drafted = (np.array([row[name] for row in rows], np.int64) for name in columns[:4])
    # On a GPU the wait for a pass is where its result is read.
    forward, verify = (np.array([row[name] for row in rows], np.float64) for name in columns[4:])
    seconds = forward + verify
    if not (drafted < MOST_ROWS).all():
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
