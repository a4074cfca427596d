"""A result's directory: the journal of a run that goes on, and the Parquet files of one that is done."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from specds.calibration.trace import trace_schema
from specds.errors import InputError, OutputError
from specds.files import files_in, locked, open_journal, open_regular, remove_tree, replacing, write_atomically

FORMAT = "specds bench 1"
RESULTS, STEPS, SUMMARY, REPORT, JOURNAL, RUN = (
    "results.parquet",
    "steps.parquet",
    "summary.json",
    "report.html",
    "journal.jsonl",
    "run.json",
)
_OPENING = b'{"row": '
_BATCH = 4_096
_AGAIN = "measure again into another --out"

Row = dict[str, Any]
Key = tuple[str, str, int]


def key_of(row: Row) -> Key:
    """What a row is of: prompt, method, repeat."""
    return row["prompt"], row["method"], row["repeat"]


def results_schema() -> Any:
    """The Arrow schema of `results.parquet`: a row for each prompt, method and repeat."""
    import pyarrow as pa

    text, whole, real, truth = pa.string(), pa.int32(), pa.float64(), pa.bool_()
    counts = ("steps", "passes", "drafted", "accepted", "path_drafted", "rescued")
    parts = ("claimed", "draft", "forward", "verify", "commit")
    return pa.schema(
        [
            ("group", text),
            ("prompt", text),
            ("method", text),
            ("repeat", whole),
            ("order", whole),
            ("session", whole),
            ("peer", truth),
            ("lossless", truth),
            ("error", text),
            ("prompt_tokens", pa.list_(pa.list_(whole))),
            ("tokens", pa.list_(pa.list_(whole))),
            ("texts", pa.list_(text)),
            ("finish_reasons", pa.list_(text)),
            ("new_tokens", whole),
            ("seconds", real),
            *((f"{part}_seconds", real) for part in parts),
            *((name, whole) for name in counts),
            ("complaints", pa.list_(text)),
            ("same", truth),
            ("differs_turn", whole),
            ("differs_at", whole),
            ("gap", real),
            ("near_tie", truth),
            ("log_p", real),
            ("rouge_l", real),
            ("rouge_l_plain", real),
            ("correct", truth),
        ]
    )


def steps_schema() -> Any:
    """The Arrow schema of `steps.parquet`: a trace, each row with the group, method and repeat that it is of."""
    import pyarrow as pa

    own = [("group", pa.string()), ("method", pa.string()), ("repeat", pa.int32())]
    return pa.schema([*own, *((one.name, one.type) for one in trace_schema())])


@dataclass(slots=True)
class Results:
    """A result's directory, locked by the run that writes it.

    Attributes:
        path: the directory.
        rows: what is measured, by key; those that failed are measured again.
        sessions: who measured: one entry for each time that the command ran.
    """

    path: Path
    rows: dict[Key, Row]
    sessions: list[dict[str, Any]]
    _options: dict[str, Any]
    _journal: IO[bytes]
    _new: set[Key] = field(default_factory=set)

    def add(self, row: Row, steps: list[Row]) -> None:
        """Keep a row and its steps; they are on the disk when this returns.

        Raises:
            OutputError: they cannot be written.
        """
        line = json.dumps({"row": row, "steps": steps}, ensure_ascii=True) + "\n"
        with refused(self.path):
            self._journal.write(line.encode())
            self._journal.flush()
            os.fsync(self._journal.fileno())
        self.rows[key_of(row)] = row
        self._new.add(key_of(row))

    def finish(self, rows: list[Row]) -> None:
        """Write the Parquet files: these rows in this order, and the steps of all of them. The journal ends.

        Raises:
            OutputError: they cannot be written.
        """
        import pyarrow as pa

        with refused(self.path):
            _write_parquet(self.path / STEPS, steps_schema(), self._steps({key_of(row) for row in rows}))
            table = [pa.Table.from_pylist(rows, results_schema())]
            _write_parquet(self.path / RESULTS, results_schema(), iter(table))
            self._journal.truncate(0)
            remove_tree(self.path / JOURNAL, self.path)

    def write(self, name: str, text: str) -> None:
        """Replace one of the directory's texts.

        Raises:
            OutputError: it cannot be written.
        """
        with refused(self.path):
            write_atomically(self.path / name, text.encode(), self.path)

    def begin(self, session: dict[str, Any]) -> None:
        """Say who measures from now on."""
        self.sessions.append(session)
        record = {"format": FORMAT, "options": self._options, "sessions": self.sessions}
        self.write(RUN, json.dumps(record, indent=1, ensure_ascii=False) + "\n")

    def _steps(self, wanted: set[Key]) -> Iterator[Any]:
        """Tables of steps: those that were there, without what was measured anew, then the journal's."""
        import pyarrow as pa

        if (self.path / STEPS).exists():
            for batch in read_steps(self.path):
                kept = [row for row in batch if key_of(row) in wanted - self._new]
                yield pa.Table.from_pylist(kept, steps_schema())
        self._journal.seek(0)
        last = {key: number for number, key in enumerate(self._journal_keys())}
        self._journal.seek(0)
        batch = []
        for number, line in enumerate(self._journal):
            record = json.loads(line)
            row = record["row"]
            if key_of(row) in wanted and last[key_of(row)] == number:
                own = {"group": row["group"], "method": row["method"], "repeat": row["repeat"]}
                batch += [own | step for step in record["steps"]]
            if len(batch) >= _BATCH:
                yield pa.Table.from_pylist(batch, steps_schema())
                batch = []
        yield pa.Table.from_pylist(batch, steps_schema())

    def _journal_keys(self) -> Iterator[Key]:
        for line in self._journal:
            yield key_of(json.loads(line)["row"])


@contextlib.contextmanager
def open_results(path: Path, options: dict[str, Any]) -> Iterator[Results]:
    """Begin a result, or go on with one of the same options.

    Raises:
        InputError: the directory holds something else, or a run with other options; it is left as it is.
        OutputError: it cannot be written, or another process writes it.
    """
    options = json.loads(json.dumps(options))
    with refused(path):
        fresh = not path.exists()
        if not fresh and not path.is_dir():
            raise OutputError(f"{path} is not a directory", "choose another --out")
        strange = not fresh and any(one.name != JOURNAL and one.name[0] != "." for one in path.iterdir())
        if strange and not (path / RUN).exists():
            raise InputError(f"{path} holds something that is no result of `specds bench`", "choose another --out")
        path.mkdir(parents=True, exist_ok=True)
        files_in(path)  # nothing in it may lead elsewhere
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(locked(path / ".lock", path))
            except BlockingIOError as error:
                raise OutputError(f"{path} is being written by another process", "wait until it is done") from error
            for stray in path.glob(".*.tmp"):  # of a run that was killed
                remove_tree(stray, path)
            sessions: list[dict[str, Any]] = []
            if (path / RUN).exists():
                record = read_json(path / RUN)
                sessions = list(record["sessions"])
                _check_options(path, record["options"], options)
            rows = {key_of(row): row for row in read_rows(path)} if (path / RESULTS).exists() else {}
            journal = stack.enter_context(open_journal(path / JOURNAL, path))
            new = _read_journal(path, journal)
            rows |= new
            yield Results(path, rows, sessions, options, journal, set(new))


def read_json(path: Path) -> dict[str, Any]:
    """One of a result's JSON files.

    Raises:
        InputError: it is missing, or none of ours.
    """
    try:
        with open_regular(path, path.parent) as file:
            record = json.loads(file.read())
        if record["format"] == FORMAT:
            return dict(record)
    except OSError as error:
        raise InputError(
            f"{path}: {error.strerror or error}", "give the directory that `specds bench --out` wrote"
        ) from error
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    raise InputError(f"{path} is no file of `specds bench`", _AGAIN)


def read_rows(path: Path) -> list[Row]:
    """The rows of a result that is done.

    Raises:
        InputError: there are none, or they are damaged.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with open_regular(path / RESULTS, path) as file:
            table = pq.read_table(file)
        if not table.schema.equals(results_schema()):
            raise pa.ArrowInvalid("its columns are others")
        rows: list[Row] = table.to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{path / RESULTS} cannot be read: {str(error)[:200]}", _AGAIN) from error
    return rows


def read_steps(path: Path, columns: list[str] | None = None) -> Iterator[list[Row]]:
    """The steps of a result that is done, some thousands at a time.

    Raises:
        InputError: there are none, or they are damaged.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with open_regular(path / STEPS, path) as file, pq.ParquetFile(file) as steps:
            for batch in steps.iter_batches(_BATCH, columns=columns):
                yield batch.to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{path / STEPS} cannot be read: {str(error)[:200]}", _AGAIN) from error


@contextlib.contextmanager
def refused(path: Path) -> Iterator[None]:
    """Turn the operating system's refusals into an error that names the result.

    Raises:
        OutputError: no space, no permission, a read-only file system.
    """
    try:
        yield
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror or error}", "choose another --out") from error


def _check_options(path: Path, held: dict[str, Any], asked: dict[str, Any]) -> None:
    other = [name for name in {**held, **asked} if held.get(name) != asked.get(name)]
    if other:
        raise InputError(
            f"{path} was begun with other options: {', '.join(name.replace('_', '-') for name in other)}",
            "choose another --out, or repeat the command that it was begun with",
        )


def _read_journal(path: Path, journal: IO[bytes]) -> dict[Key, Row]:
    """The rows in a journal; a last line that a crash cut is dropped."""
    rows: dict[Key, Row] = {}
    end = 0
    journal.seek(0)
    for line in journal:
        if not line.endswith(b"\n"):
            break
        try:
            if not line.startswith(_OPENING):
                raise ValueError
            row = json.loads(line)["row"]
            rows[key_of(row)] = row
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise InputError(f"{path / JOURNAL} is damaged at byte {end}", _AGAIN) from error
        end += len(line)
    journal.truncate(end)
    journal.seek(0, os.SEEK_END)
    return rows


def _write_parquet(path: Path, schema: Any, tables: Iterator[Any]) -> None:
    import pyarrow.parquet as pq

    with replacing(path, path.parent) as file, pq.ParquetWriter(file, schema, compression="zstd") as writer:
        for table in tables:
            writer.write_table(table)
