"""The one error tree. A message says what is wrong and where; the hint says what to do about it."""

from __future__ import annotations

import errno

# What C and C++ libraries say where the system refuses them something; they raise what they happen to have at hand.
_SAID_OF_MEMORY = ("allocate memory", "bad_alloc", "out of memory", "failed to map segment", "malloc of size")
_SAID_OF_FILES = ("too many open files",)
_SAID_OF_THREADS = ("can't start new thread", "resource temporarily unavailable")


class SpecdsError(Exception):
    """Anything specds refuses or cannot do.

    Attributes:
        message: what is wrong and where (file, row, field), on one line.
        hint: what the user can do about it; empty when there is nothing to do.
        exit_code: what the command line exits with: 1 failed, 2 wrong usage.
    """

    exit_code = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(SpecdsError):
    """The request itself makes no sense: an unknown drafter, an option out of range."""

    exit_code = 2


class InputError(SpecdsError):
    """An input file is missing, unreadable, or not of the form it should have."""


class PromptError(InputError):
    """One prompt cannot be used: empty, malformed, or longer than the model's context."""


class OutputError(SpecdsError):
    """Results cannot be written: a full disk, an unwritable directory, a closed pipe."""


class UnsafeFile(OutputError):
    """Where a file or directory of specds' own should be there is a link, a pipe or a device: it may lead elsewhere."""


class ModelError(SpecdsError):
    """A model cannot be found, loaded or driven by the decoding loop."""


class UnknownModel(ModelError):
    """No such model: neither embedded, nor a file or directory, nor known to the hub."""


class UnsupportedModel(ModelError):
    """The model loads, but its attention or cache cannot verify a tree of tokens."""


class PeerError(SpecdsError):
    """Another engine, measured beside ours, died or answered something that is not an answer."""


class ResourceError(SpecdsError):
    """The system refuses the process what it needs: memory, open files or threads."""


class StoreError(SpecdsError):
    """A datastore cannot be used."""


class NotAStore(StoreError):
    """The path is not a datastore: no directory, or no manifest in it."""


class StoreVersionError(StoreError):
    """The store was written in a format that this version cannot read."""


class CorruptStore(StoreError):
    """The store is damaged: a file missing, truncated or changed, or a manifest that does not parse."""


class UnsafeStore(CorruptStore):
    """Something in the store is a link, a pipe or a device: it may lead out of it."""


class ForeignTokenizer(StoreError):
    """The store holds tokens of another tokenizer."""


class ForeignModel(StoreError):
    """The index was built from another model's hidden states."""


class MissingIndex(StoreError):
    """The store has no index of the kind that the drafter needs."""


class CorruptTable(StoreError):
    """A correction table is damaged, was edited, or is not one."""

    def __init__(self, message: str, hint: str = "name one that `specds calibrate-csd` wrote, or a copy of it") -> None:
        super().__init__(message, hint)


class ForeignTable(StoreError):
    """A correction table is of another target, draft or tokenizer."""


class StoreLocked(StoreError):
    """Another process is writing to the store."""


class Notice(UserWarning):
    """Something that a user may want to change, and that stops nothing: one line, what to do at its end."""


def first_line(error: BaseException) -> str:
    """The first line of what a library says about an error; the name of its class if it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def shortage(error: BaseException) -> ResourceError | None:
    """The lack of memory, files or threads that caused an error, whatever the error itself blames; None if none is.

    A file that cannot be opened because too many are open looks damaged to whoever wanted to read it.
    """
    said = error.message if isinstance(error, SpecdsError) else first_line(error)
    cause: BaseException | None = error
    while cause is not None:
        if what := _short_of(cause):
            lack, hint = what
            where = cause.filename if isinstance(cause, OSError) and cause.filename else said
            return ResourceError(lack if where == type(error).__name__ else f"{lack}: {where}", hint)
        cause = cause.__cause__ or cause.__context__
    return None


def _short_of(error: BaseException) -> tuple[str, str] | None:
    number = error.errno if isinstance(error, OSError) else None
    said = "" if isinstance(error, SpecdsError) else str(error).lower()

    def told(words: tuple[str, ...]) -> bool:
        return isinstance(error, OSError | RuntimeError | ImportError) and any(word in said for word in words)

    if isinstance(error, MemoryError) or number == errno.ENOMEM or told(_SAID_OF_MEMORY):
        return "not enough memory", (
            "free some, or raise the limit (ulimit -v); a file that asks for more than it can need is damaged"
        )
    if number in (errno.EMFILE, errno.ENFILE) or told(_SAID_OF_FILES):
        return "too many open files", "raise the limit (ulimit -n)"
    if number == errno.EAGAIN or told(_SAID_OF_THREADS):
        return "no more threads or processes", "raise the limit (ulimit -u), or use fewer --threads"
    return None
