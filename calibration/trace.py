"""Traces: one Parquet row for each step, a request's part of a forward pass of the target."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from specds.decode.contracts import Step
from specds.decode.pricing.curve import MOST_ROWS, Passes
from specds.errors import InputError, OutputError
from specds.files import open_journal, remove_tree, replacing, target_of
from specds.parquet import reading, require_columns
from specds.parquet_bounds import BoundedFile
from specds.reading.input_file import check_file, shown

_ROWS = 8_192
_COUNTS = ("turn", "step", "position", "forward_pass", "pass_tokens", "drafted", "accepted", "committed")
# Of a part of one step; a year, in which no clock errs.
_MOST_SECONDS = 3.2e7
# Of all runs that a trace is of.
_MOST_PASSES = 1 << 48
_KEY = b"specds"
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
        "forward_pass": step.forward_pass,
        "pass_tokens": step.pass_tokens,
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

    Until then each turn stands in a journal beside it, on the disk before `add` returns: a run that is killed loses
    nothing that the next one could not carry over.

    Args:
        resumable: whether a later run may go on with this one's answers, and so with its journal.

    Raises:
        OutputError: the file cannot be written, or another process writes it.
    """

    def __init__(self, path: Path, *, resumable: bool = False) -> None:
        self._path = path
        self._resumable = resumable
        self._target = path
        self._held: Sequence[str] = ()
        self._lacks = 0
        self._journal: _Journal | None = None
        self._begun = self._written = False
        self._passes = 0

    def __enter__(self) -> Self:
        try:
            self._target = target_of(self._path)
            self._journal = _Journal(self._target.with_name(f".{self._target.name}.journal"))
        except OutputError as error:
            raise OutputError(error.message, "choose another --trace") from error
        except OSError as error:
            raise self._refused(error) from error
        return self

    def carry_over(self, held: Sequence[str]) -> list[str]:
        """Keep the rows of answers that earlier runs wrote to the same path, or to a journal that they left.

        Args:
            held: the prompts of these answers, in order; one that stands there twice was answered twice.

        Returns:
            those of them that no rows are left of.

        Raises:
            OutputError: what is there is not a trace; it is left as it is.
        """
        wanted = _Wanted(held)
        kept = _Kept()
        try:
            for batch in self._old(wanted):
                kept = kept.and_more(batch.column("forward_pass").to_pylist())
        except (ValueError, TypeError) as error:
            hint = "choose another --trace"
            raise OutputError(f"{self._path} is not a trace: its passes have no numbers", hint) from error
        try:
            kept = self._rows.keep(wanted, kept)
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise OutputError(f"{self._rows.path} is not the journal of a trace", "remove it") from error
        self._held, self._begun, self._written = held, True, kept.rows > 0
        self._passes = kept.passes
        self._lacks = wanted.left.total()
        return list(wanted.left.elements())

    def add(self, prompt: str, turn: int, drafter: str, steps: Sequence[Step]) -> None:
        """Append the steps of one turn."""
        self._begin()
        try:
            rows = [trace_row(prompt, turn, drafter, step) for step in steps]
            for row in rows:
                row["forward_pass"] += self._passes  # each run counts its own
            self._rows.append(rows)
        except OSError as error:
            raise self._refused(error) from error
        self._written = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Finish the file, also after an error: what was traced is kept, if anything was."""
        done = not self._resumable
        try:
            self._begin()
            if kind is None or self._written:
                self._finish()
            done = True
        except OSError as failure:
            raise self._refused(failure) from failure
        finally:
            self._rows.close(remove=done)

    @property
    def _rows(self) -> _Journal:
        assert self._journal is not None, "the writer is not entered"
        return self._journal

    def _begin(self) -> None:
        """Without `carry_over` nothing is: what another run left is of no use."""
        if not self._begun:
            self._rows.keep(_Wanted(()), _Kept())
            self._begun = True

    def _finish(self) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        schema = trace_schema()
        if self._lacks:
            schema = schema.with_metadata({_KEY: json.dumps({"lacks": self._lacks})})
        with replacing(self._target) as file, pq.ParquetWriter(file, schema, compression="zstd") as writer:
            for batch in self._old(_Wanted(self._held)) if self._held else ():
                writer.write_batch(batch)
            waiting: list[dict[str, Any]] = []
            for rows in self._rows:
                waiting += rows
                if len(waiting) >= _ROWS:
                    writer.write_table(pa.Table.from_pylist(waiting, schema))
                    waiting = []
            writer.write_table(pa.Table.from_pylist(waiting, schema))

    def _old(self, wanted: _Wanted) -> Iterator[Any]:
        """The wanted rows of the finished trace that is there, if one is."""
        import pyarrow as pa

        if not self._target.exists():
            return

        def refused(why: str) -> OutputError:
            return OutputError(f"{self._path} is not a trace: {why}", "choose another --trace")

        with reading(refused), self._target.open("rb") as stream, BoundedFile(stream) as old:
            if not old.schema.equals(trace_schema()):
                raise pa.ArrowInvalid("its columns are others")
            for batch in old.batches(trace_schema().names, _ROWS, whole=True):
                columns = (batch.column(name).to_pylist() for name in ("prompt", "turn", "step"))
                mask = [wanted.takes(*row) for row in zip(*columns, strict=True)]
                yield batch.filter(pa.array(mask, pa.bool_())).cast(trace_schema())

    def _refused(self, error: OSError) -> OutputError:
        return OutputError(f"cannot write the trace {self._path}: {error.strerror or error}", "check --trace")


class _Kept(NamedTuple):
    """Rows of earlier runs: how many, and how many passes they were numbered by."""

    rows: int = 0
    passes: int = 0

    def and_more(self, passes: Sequence[int]) -> _Kept:
        """With rows of these passes; ValueError if there cannot be as many."""
        kept = _Kept(self.rows + len(passes), max([self.passes - 1, *passes]) + 1)
        if kept.passes > _MOST_PASSES:
            raise ValueError(kept.passes)
        return kept


class _Wanted:
    """Which rows are of answers that are held; of one prompt so many answers as were written, the first ones."""

    def __init__(self, held: Sequence[str]) -> None:
        self.left = Counter(held)
        self._taken = False

    def takes(self, prompt: str, turn: int, step: int) -> bool:
        """Asked for each row in order: an answer begins with the first step of its first turn."""
        if turn == step == 0:
            self._taken = self.left[prompt] > 0
            self.left[prompt] -= self._taken
        return self._taken


class _Journal:
    """The rows of a run that goes on: JSON lines, one a turn, locked by their writer."""

    def __init__(self, path: Path) -> None:
        self.path = path
        while True:
            self._file = open_journal(path)
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                self._file.close()
                raise OutputError(f"{path} is being written by another process", "wait until it is done") from error
            if os.fstat(self._file.fileno()).st_nlink:
                break
            self._file.close()  # its last writer removed it on finishing

    def append(self, rows: list[dict[str, Any]]) -> None:
        handle = self._file.fileno()
        end = os.fstat(handle).st_size
        data = memoryview((json.dumps(rows, ensure_ascii=True) + "\n").encode())
        try:
            while data:
                data = data[os.write(handle, data) :]
            os.fsync(handle)
        except OSError:
            os.ftruncate(handle, end)
            raise

    def __iter__(self) -> Iterator[list[dict[str, Any]]]:
        for _, rows in self._turns():
            yield rows

    def keep(self, wanted: _Wanted, kept: _Kept) -> _Kept:
        """Cut off what follows the last wanted turn, and what a crash left of a turn; returns all that stays."""
        import pyarrow as pa

        end = 0
        if wanted.left:
            for after, rows in self._turns():
                if not all(wanted.takes(row["prompt"], row["turn"], row["step"]) for row in rows):
                    break
                pa.Table.from_pylist(rows, trace_schema())  # it may be somebody else's
                end, kept = after, kept.and_more([row["forward_pass"] for row in rows])
        self._file.truncate(end)
        return kept

    def close(self, *, remove: bool) -> None:
        if remove:
            with contextlib.suppress(OSError):
                remove_tree(self.path)
        self._file.close()

    def _turns(self) -> Iterator[tuple[int, list[dict[str, Any]]]]:
        """Where each whole line ends, and its rows."""
        end = 0
        with os.fdopen(os.dup(self._file.fileno()), "rb") as file:
            file.seek(0)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                end += len(line)
                yield end, json.loads(line)


def lacking(path: str) -> int:
    """How many answers of a run a trace has no rows of, as its writer said.

    Raises:
        InputError: it cannot be read.
    """
    check_file(path)
    with (
        reading(lambda why: InputError(f"{shown(path)} is not a trace: {why}", _HINT)),
        Path(path).open("rb") as stream,
        BoundedFile(stream) as file,
    ):
        raw = (file.schema.metadata or {}).get(_KEY, b"{}")
    try:
        lacks = json.loads(raw).get("lacks", 0)
    except (ValueError, AttributeError, RecursionError):
        return 0
    return lacks if type(lacks) is int and 0 <= lacks < 1 << 62 else 0


def read_trace(path: str, columns: Sequence[str]) -> list[dict[str, Any]]:
    """Some columns of a trace, a record a step.

    Raises:
        InputError: it cannot be read, lacks a column, or a field is empty.
    """
    import pyarrow as pa

    def refused(why: str) -> InputError:
        return InputError(f"{shown(path)} is not a trace: {why}", _HINT)

    check_file(path)
    with reading(refused), Path(path).open("rb") as stream, BoundedFile(stream) as file:
        require_columns(file.schema, pa.schema([trace_schema().field(name) for name in columns]))
        rows = file.held(columns, _ROWS)
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
        return "a draft is not a tree"
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
    """The passes that a trace tells of: those that one request had alone. The others' seconds are shares of passes.

    Raises:
        InputError: as `read_trace`, or what is there is not a number of query tokens or seconds.
    """
    import numpy as np

    columns = ("turn", "step", "position", "drafted", "pass_tokens", "forward_seconds", "verify_seconds")
    rows = read_trace(path, columns)
    turn, step, position, drafted, whole = (np.array([row[name] for row in rows], np.int64) for name in columns[:5])
    # On a GPU the wait for a pass is where its result is read.
    forward, verify = (np.array([row[name] for row in rows], np.float64) for name in columns[5:])
    seconds = forward + verify
    if not (drafted < MOST_ROWS).all():
        raise InputError(f"{shown(path)} is not a trace: numbers that cannot be", _HINT)
    if not ((position >= 1) & (position < 1 << 40)).all():
        raise InputError(f"{shown(path)} is not a trace: positions that cannot be", _HINT)
    later = (step > 0) & (drafted + 1 == whole)
    first = (step == 0) & (turn == 0) & (position == whole)
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
            ("forward_pass", pa.int64()),
            ("pass_tokens", pa.int64()),
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
