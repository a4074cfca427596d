"""The answers of `specds decode`: their records, and the file that a stopped job goes on with."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from specds.errors import InputError, OutputError, SpecdsError
from specds.reading.prompts import BadRow, Prompt

if TYPE_CHECKING:
    from specds.decode.answering import Answer
    from specds.decode.engine import Engine

_OPENING = b'{"id": '


def answer_record(engine: Engine, answer: Answer, key: str) -> dict[str, Any]:
    """One answered prompt."""
    last = answer.turns[-1]
    record: dict[str, Any] = {
        "id": answer.id,
        "text": last.text,
        "tokens": list(last.tokens),
        "finish_reason": last.finish_reason,
        "prompt_tokens": len(last.prompt),
        "drafter": engine.method.drafter,
        "lossless": engine.lossless,
        "counters": answer.counters.record(),
        "key": key,
    }
    if len(answer.turns) > 1:
        record["turns"] = [
            {
                "text": turn.text,
                "tokens": list(turn.tokens),
                "finish_reason": turn.finish_reason,
                "prompt_tokens": len(turn.prompt),
            }
            for turn in answer.turns
        ]
    return record


def error_record(row: Prompt | BadRow, error: Exception, key: str) -> dict[str, Any]:
    """One prompt that could not be answered."""
    hint = error.hint if isinstance(error, SpecdsError) else ""
    return {"id": row.id, "error": {"type": type(error).__name__, "message": str(error), "hint": hint}, "key": key}


def request_key(engine: Engine, row: Prompt | BadRow, max_new_tokens: int) -> str:
    """A digest of all that an answer's text depends on; of a drafter it does not depend, as far as it is lossless."""
    content = row.content if isinstance(row, Prompt) else [row.id, str(row.error)]
    sampling = engine.sampling
    parts = [
        content,
        engine.model.fingerprint,
        engine.model.dtype,
        [engine.model.tokenizer.fingerprint, str(getattr(engine.model.tokenizer.hf, "chat_template", None))],
        sorted(engine.model.stop_tokens),
        [sampling.temperature, sampling.top_k, sampling.top_p, sampling.seed],
        max_new_tokens,
        None
        if engine.lossless
        else [
            engine.method.verifier,
            sorted(engine.method.verifier_options.items()),
            engine.method.drafter,
            sorted(engine.method.options.items()),
            engine.method.budget,
        ],
    ]
    return hashlib.sha256(json.dumps(parts, ensure_ascii=True).encode()).hexdigest()[:24]


@dataclass(frozen=True, slots=True)
class Held:
    """An answer that an earlier run wrote."""

    id: str
    key: str
    failed: bool


@dataclass(slots=True)
class AnswerFile:
    """A file of answers, one JSON line each, locked while it is written.

    Attributes:
        path: where it is.
        held: what earlier runs of the same job wrote, in order.
    """

    path: Path
    held: list[Held]
    _file: BinaryIO

    def write(self, record: dict[str, Any]) -> None:
        """Append an answer; it is on the disk when this returns."""
        self._file.write((json.dumps(record, ensure_ascii=True) + "\n").encode())
        self._file.flush()
        os.fsync(self._file.fileno())

    def check(self, number: int, row: Prompt | BadRow, key: str) -> None:
        """Refuse a prompt that is not the one that the held answer is to.

        Raises:
            InputError: another prompt, model, sampling or length than the file was begun with.
        """
        held = self.held[number]
        if (held.id, held.key) != (row.id, key):
            what = (
                f"answers prompt {held.id!r}, where the prompt is {row.id!r}"
                if held.id != row.id
                else f"answers {row.id!r} with another prompt text, model, dtype, sampling or --max-new-tokens"
            )
            raise InputError(
                f"{self.path} line {number + 1} {what}",
                "choose another --output, or repeat the command that it was begun with",
            )


@contextlib.contextmanager
def answer_file(path: Path) -> Iterator[AnswerFile]:
    """Open a file of answers to go on with; a last line that a crash cut is dropped.

    Raises:
        InputError: the file holds something else; it is left as it is.
        OutputError: it cannot be written, or another process writes it.
    """
    try:
        with path.open("ab+") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise OutputError(f"cannot write {path}: it is not a file", "choose another --output")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise OutputError(f"{path} is being written by another process", "wait until it is done") from error
            held, end = _read(path, file)
            file.truncate(end)
            yield AnswerFile(path, held, file)
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror or error}", "choose another --output") from error


def _read(path: Path, file: BinaryIO) -> tuple[list[Held], int]:
    """The answers in a file, and where the last whole one ends."""
    held: list[Held] = []
    end = 0
    file.seek(0)
    for line in file:
        whole = line.endswith(b"\n")
        if not whole and (line.startswith(_OPENING) or _OPENING.startswith(line)) and not _is_json(line):
            break  # what a crash leaves of a record of ours; anything else is somebody's
        try:
            record = json.loads(line)
            if not whole:
                raise ValueError("ours end in a newline, written with them")
            held.append(Held(str(record["id"]), str(record["key"]), "error" in record))
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise InputError(
                f"{path} line {len(held) + 1} is not an answer of `specds decode`", "choose another --output"
            ) from error
        end += len(line)
    return held, end


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True
