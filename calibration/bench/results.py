"""A result's directory: the journal of a run that goes on, and the Parquet files of one that is done."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any

from specds.calibration.trace import problem_of, trace_schema
from specds.errors import InputError, OutputError
from specds.files import files_in, locked, open_journal, open_regular, remove_tree, replacing, write_atomically
from specds.parquet import fits, reading, require_columns
from specds.parquet_bounds import BoundedFile

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
# What a row always says, what it says of an answer, and what of that is counted.
_ALWAYS = ("group", "prompt", "method", "repeat", "order", "session", "peer")
_COUNTED = ("steps", "passes", "drafted", "accepted", "path_drafted", "rescued")
_ANSWERED = (
    *("prompt_tokens", "tokens", "texts", "finish_reasons", "new_tokens", "seconds", "claimed_seconds"),
    *("steps", "passes", "complaints"),
)
# Seconds of an answer, and counts of its steps: with others the figures would not be numbers.
_LEAST_SECONDS, _MOST_NUMBER = 1e-9, 1e12
_AGAIN = "measure again into another --output"

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
            # What is not UTF-8 in a path becomes an escape, which JSON reads as the same again.
            write_atomically(self.path / name, text.encode(errors="backslashreplace"), self.path)

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
            raise OutputError(f"{path} is not a directory", "choose another --output")
        strange = not fresh and any(one.name != JOURNAL and one.name[0] != "." for one in path.iterdir())
        if strange and not (path / RUN).exists():
            raise InputError(
                f"{path} holds something that is not a result of `specds bench`", "choose another --output"
            )
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
                try:
                    sessions = checked_sessions(record.get("sessions"))
                except ValueError as error:
                    raise _damaged(path / RUN, str(error)) from error
                _check_options(path, record.get("options"), options)
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
            record = json.loads(file.read(), parse_constant=_no_constant)
        if record["format"] == FORMAT:
            return dict(record)
    except OSError as error:
        raise InputError(
            f"{path}: {error.strerror or error}", "give the directory that `specds bench --output` wrote"
        ) from error
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    raise InputError(f"{path} is not a file of `specds bench`", _AGAIN)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def read_rows(path: Path) -> list[Row]:
    """The rows of a result that is done.

    Raises:
        InputError: there are none, or they are damaged.
    """
    import pyarrow as pa

    with (
        reading(partial(_damaged, path / RESULTS)),
        open_regular(path / RESULTS, path) as file,
        BoundedFile(file) as parquet,
    ):
        if not parquet.schema.equals(results_schema()):
            raise pa.ArrowInvalid("its columns are others")
        rows: list[Row] = parquet.held(parquet.schema.names, _BATCH)
    for row in rows:
        if (problem := _row_problem(row)) is not None:
            raise _damaged(path / RESULTS, problem)
    return rows


def read_steps(path: Path, columns: list[str] | None = None) -> Iterator[list[Row]]:
    """The steps of a result that is done, some thousands at a time.

    Raises:
        InputError: there are none, or they are damaged.
    """
    import pyarrow as pa

    wanted = steps_schema() if columns is None else pa.schema([steps_schema().field(name) for name in columns])
    with (
        reading(partial(_damaged, path / STEPS)),
        open_regular(path / STEPS, path) as file,
        BoundedFile(file) as held,
    ):
        require_columns(held.schema, wanted)
        for rows in held.records(wanted.names, _BATCH):
            for row in rows:
                if (problem := problem_of(row)) is not None:
                    raise ValueError(problem)
            yield rows


def _damaged(path: Path, why: str) -> InputError:
    return InputError(f"{path} cannot be read: {why}", _AGAIN)


def _row_problem(row: Any) -> str | None:
    """What makes a row invalid: a bench did not write it so."""
    kinds = {field.name: field.type for field in results_schema()}
    if not isinstance(row, dict) or row.keys() != kinds.keys():
        return "a row is not one of a bench"
    failed = row.get("error") is not None
    for name, kind in kinds.items():
        value = row.get(name)
        if value is None:
            if name in _ALWAYS or (name in _ANSWERED and not failed):
                return f"a row has no {name}"
        elif not fits(value, kind):
            return f"a row's {name} are not valid"
    if failed:
        return None
    turns = {len(row[name]) for name in ("prompt_tokens", "tokens", "texts", "finish_reasons")}
    if len(turns) != 1 or 0 in turns or not all(row["tokens"]):
        return "a row's turns do not fit each other"
    if row["new_tokens"] != sum(map(len, row["tokens"])):
        return "a row's tokens are not as many as it says"
    numbers = [row[name] for name in kinds if name.endswith("_seconds") or name in _COUNTED]
    if any(number is not None and not 0 <= number <= _MOST_NUMBER for number in numbers):
        return "a row's numbers cannot be"
    if not _LEAST_SECONDS <= row["seconds"] <= _MOST_NUMBER or row["steps"] < 1:
        return "a row's numbers cannot be"
    return None


def _session_problem(session: Any) -> str | None:
    """What makes a session invalid: a bench did not write it so."""
    if not isinstance(session, dict) or session.keys() != {"date", "command", "machine", "versions", "git"}:
        return "a session is not one of a bench"
    git = session["git"]
    texts = [session["date"], session["command"], *([] if git is None else [_field(git, "commit")])]
    if not all(isinstance(text, str) for text in texts):
        return "a session does not say what ran when"
    for about in (session["machine"], session["versions"]):
        if not isinstance(about, dict) or not all(_is_plain(value) for value in about.values()):
            return "a session does not say where it ran"
    if type(session["machine"].get("threads", 1)) is not int:
        return "a session does not say on how many threads it ran"
    if git is not None and not isinstance(_field(git, "changed"), bool):
        return "a session does not say what ran when"
    return None


def _field(record: Any, name: str) -> Any:
    return record.get(name) if isinstance(record, dict) else None


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, str) or (isinstance(value, int | float) and math.isfinite(value))


@contextlib.contextmanager
def refused(path: Path) -> Iterator[None]:
    """Turn the operating system's refusals into an error that names the result.

    Raises:
        OutputError: no space, no permission, a read-only file system.
    """
    try:
        yield
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror or error}", "choose another --output") from error


def checked_sessions(sessions: Any) -> list[dict[str, Any]]:
    """The sessions of a result, from JSON.

    Raises:
        ValueError: they are none.
    """
    if not isinstance(sessions, list):
        raise ValueError("it does not say who measured")
    for session in sessions:
        if (problem := _session_problem(session)) is not None:
            raise ValueError(problem)
    return sessions


def _check_options(path: Path, held: Any, asked: dict[str, Any]) -> None:
    if not isinstance(held, dict):
        raise _damaged(path / RUN, "it does not say with which options it was begun")
    other = [name for name in {**held, **asked} if held.get(name) != asked.get(name)]
    if other:
        raise InputError(
            f"{path} was begun with other options: {', '.join(name.replace('_', '-') for name in other)}",
            "choose another --output, or repeat the command that it was begun with",
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
            record = json.loads(line)
            row, steps = record["row"], record["steps"]
            problem = _row_problem(row) or next(filter(None, map(_step_problem, steps)), None)
            if problem is not None:
                raise ValueError(problem)
            rows[key_of(row)] = row
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise InputError(f"{path / JOURNAL} is damaged at byte {end}", _AGAIN) from error
        end += len(line)
    journal.truncate(end)
    journal.seek(0, os.SEEK_END)
    return rows


def _step_problem(step: Any) -> str | None:
    if not isinstance(step, dict):
        return "a step is not one of a trace"
    if not all(field.name in step and fits(step[field.name], field.type) for field in trace_schema()):
        return "a step is not one of a trace"
    return problem_of(step)


def _write_parquet(path: Path, schema: Any, tables: Iterator[Any]) -> None:
    import pyarrow.parquet as pq

    with replacing(path, path.parent) as file, pq.ParquetWriter(file, schema, compression="zstd") as writer:
        for table in tables:
            writer.write_table(table, row_group_size=_BATCH)  # none larger than is read
