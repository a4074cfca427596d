"""The one error tree. A message says what is wrong and where; the hint says what to do about it."""

from __future__ import annotations


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


class ModelError(SpecdsError):
    """A model cannot be found, loaded or driven by the decoding loop."""


class UnknownModel(ModelError):
    """No such model: neither embedded, nor a file or directory, nor known to the hub."""


class UnsupportedModel(ModelError):
    """The model loads, but its attention or cache cannot verify a tree of tokens."""


class PeerError(SpecdsError):
    """Another engine, measured beside ours, died or answered something that is no answer."""


class StoreError(SpecdsError):
    """A datastore cannot be used."""


class NotAStore(StoreError):
    """The path is not a datastore: no directory, or no manifest in it."""


class StoreVersionError(StoreError):
    """The store was written in a format that this version cannot read."""


class CorruptStore(StoreError):
    """The store is damaged: a file missing, truncated or changed, or a manifest that does not parse."""


class ForeignTokenizer(StoreError):
    """The store holds tokens of another tokenizer."""


class ForeignModel(StoreError):
    """The index was built from another model's hidden states."""


class MissingIndex(StoreError):
    """The store has no index of the kind that the drafter needs."""


class CorruptTable(StoreError):
    """A correction table is damaged, was edited, or is none."""

    def __init__(self, message: str, hint: str = "name one that `specds calibrate-csd` wrote, or a copy of it") -> None:
        super().__init__(message, hint)


class ForeignTable(StoreError):
    """A correction table is of another target, draft or tokenizer."""


class StoreLocked(StoreError):
    """Another process is writing to the store."""


def first_line(error: BaseException) -> str:
    """The first line of what a library says about an error; the name of its class if it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
