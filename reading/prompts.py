"""Prompts: what `specds generate` and `specds decode` are asked to answer, from files of rows or plain text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from specds.errors import PromptError
from specds.reading.fields import Row, Wanted, id_of, kind_of, layout_of, text_of
from specds.reading.input_file import check_file
from specds.reading.rows import format_of, rows

Message = dict[str, str]  # {"role": "system" | "user" | "assistant", "content": text}

ROLES = ("system", "user", "assistant")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request to the model.

    Attributes:
        id: the row's own "id" or "question_id" as text, else its number, from 0, over all files' rows.
        turns: for each of the user's turns, the messages to append before the model answers: one user message; a
            first turn from "messages" holds the system message and the history too.
        raw: the only message's content is text to be continued as it is, without the chat template.
        reference: a reference answer.
        group: what the row says in the field that groups rows; None if none was asked for, or it says nothing.
    """

    id: str
    turns: tuple[tuple[Message, ...], ...]
    raw: bool = False
    reference: str | None = None
    group: str | None = None

    @property
    def content(self) -> list[object]:
        """All that an answer depends on, for JSON and digests of it: the same question has the same."""
        return [self.turns, self.raw]


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that cannot be used, to be reported in its place while the others go on."""

    id: str
    error: PromptError


def read_prompts(
    paths: Sequence[str],
    *,
    format: str | None = None,
    prompt_field: str = "prompt",
    group_field: str | None = None,
) -> Iterator[Prompt | BadRow]:
    """The prompts of all files in their order, each as soon as its line is there.

    JSON lines (.jsonl, .ndjson, .json), Parquet, CSV and TSV rows are conversations ("messages", ending with the
    user's), several user turns ("turns"), one ("prompt"), or text to be continued ("text"); of several, the first in
    this order is taken. The first row of a CSV or TSV file names its columns; lists stand in it as JSON. Any other
    file, like a stream that does not start with "{", holds one prompt a line. ".gz" and ".zst" files are unpacked; "-"
    is standard input. Blank lines are skipped.

    Args:
        paths: files, or "-".
        format: "jsonl", "parquet", "csv", "tsv" or "text" for all files; by each file's name if None.
        prompt_field: another name for "prompt"; a field so named is then the only one looked at.
        group_field: the field whose text is each prompt's group.

    Raises:
        InputError: a file is missing, a directory, not permitted, of a kind that is not read (all checked at the
            call), or found damaged or without the columns while it is read.
        UsageError: no such format.
    """
    for path in paths:
        format_of(path, format)
        check_file(path)
    return _prompts(paths, format, prompt_field, group_field)


def messages_of(where: str, field: str, value: object) -> tuple[Message, ...]:
    """A conversation from a field's value, with nothing but role and content in each message.

    Raises:
        PromptError: it is not a valid list of messages, or the role of one is unknown, or its content is not text.
    """
    if not isinstance(value, list) or not value:
        kind = "empty" if value == [] else kind_of(value)
        raise PromptError(
            f"{where}, field {field!r} must be a list of messages, but is {kind}",
            'a message is {"role": "user", "content": "..."}',
        )
    return tuple(_message(where, f"{field}[{index}]", message) for index, message in enumerate(value))


def _message(where: str, field: str, message: object) -> Message:
    if not isinstance(message, dict):
        raise PromptError(
            f"{where}, field {field!r} must be a message, but is {kind_of(message)}",
            'a message is {"role": "user", "content": "..."}',
        )
    role = text_of(where, f"{field}.role", message.get("role"))
    if role not in ROLES:
        raise PromptError(f"{where}, field '{field}.role' is {role[:40]!r}", f"a role is one of {', '.join(ROLES)}")
    # A system message may be blank; a question may not.
    content = text_of(where, f"{field}.content", message.get("content"), blank=role != "user")
    return {"role": role, "content": content}


def _prompts(
    paths: Sequence[str], format: str | None, prompt_field: str, group_field: str | None
) -> Iterator[Prompt | BadRow]:
    names = ("messages", "turns", "prompt", "text") if prompt_field == "prompt" else (prompt_field,)
    wanted = Wanted(
        layouts=tuple((name,) for name in names),
        also=("id", "question_id", "reference", *filter(None, [group_field])),
        hint="name the prompt's field with --prompt-field",
        line=prompt_field,
        lists=("messages", "turns"),
    )
    number = 0
    for path in paths:
        for where, row in rows(path, wanted, format=format):
            name = id_of(row, number)
            number += 1
            if isinstance(row, PromptError):
                yield BadRow(name, row)
                continue
            try:
                (field,) = layout_of(where, row, wanted)
                # A "text" that the user asked for by name is a prompt like any other.
                raw = field == "text" and prompt_field != "text"
                group = None if group_field is None else row.get(group_field)
                prompt = Prompt(
                    name, _turns(where, field, row[field]), raw, _reference(row), None if group is None else str(group)
                )
            except PromptError as error:
                yield BadRow(name, error)
            else:
                yield prompt


def _turns(where: str, field: str, value: object) -> tuple[tuple[Message, ...], ...]:
    if field == "messages":
        messages = messages_of(where, field, value)
        if messages[-1]["role"] != "user":
            raise PromptError(
                f"{where}, field {field!r} must end with a user's message, but ends with role {messages[-1]['role']!r}",
                "leave out what the model is to write",
            )
        return (messages,)
    if field == "turns":
        if not isinstance(value, list) or not value:
            kind = "empty" if value == [] else kind_of(value)
            raise PromptError(f"{where}, field 'turns' must be a list of strings, but is {kind}", "one string a turn")
        return tuple((_user(where, f"turns[{index}]", turn),) for index, turn in enumerate(value))
    return ((_user(where, field, value),),)


def _user(where: str, field: str, value: object) -> Message:
    return {"role": "user", "content": text_of(where, field, value)}


def _reference(row: Row) -> str | None:
    """Answering needs no reference, so one of another form is left out rather than the row."""
    value = row.get("reference")
    for candidate in value if isinstance(value, list) else [value]:
        if isinstance(candidate, str):
            return candidate
    return None
