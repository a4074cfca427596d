"""Examples: text that exists already, for `specds ingest`, from files or a Hugging Face data set."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from specds.errors import PromptError, UsageError
from specds.printing import is_unicode
from specds.reading.fields import Layout, Row, Wanted, id_of, layout_of, text_of
from specds.reading.input_file import STDIN, check_file, shown, unpacked
from specds.reading.lines import document
from specds.reading.prompts import BadRow, Message, messages_of
from specds.reading.rows import count_rows, dataset_rows, format_of, rows
from specds.tokenizer import Tokenizer

_MESSAGES: Layout = ("messages",)
_TEXT: Layout = ("text",)
_INSTRUCTION: Layout = ("instruction", "output")
_LAYOUTS = (
    _MESSAGES,
    ("prompt", "response"),
    ("prompt", "completion"),
    _INSTRUCTION,
    ("question", "answer"),
    _TEXT,
)
_DATASET = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(:[\w.-]+)?")
_FILE_SUFFIX = re.compile(
    r"\.(jsonl?|ndjson|parquet|gz|zip|zst|bz2|xz|tar|txt|text|md|rst|csv|tsv|xml|html?|css|sql|sh|py|ipynb|js|ts|c|cc"
    r"|cpp|h|hpp|java|go|rs|rb|php|log|ya?ml|toml|ini|cfg|xlsx?|ods|docx?|pdf|arrow|feather|orc|avro|db|sqlite|pkl)$",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Example:
    """One document of a corpus to be.

    Attributes:
        source: where it comes from, by which a corpus can be told apart later.
        prompt: the messages that the response answers; empty for raw text.
        response: the answer, or the whole of a raw text.
    """

    source: str
    prompt: tuple[Message, ...]
    response: str

    def tokens(self, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
        """Token ids of the prompt, none for raw text, and of the response; an answer ends as a model would end it.

        Raises:
            PromptError: the chat template refuses the messages, or their text is not Unicode.
        """
        prompt = tokenizer.chat(self.prompt) if self.prompt else []
        response = tokenizer.encode(self.response)
        if self.prompt and tokenizer.end is not None:
            response.append(tokenizer.end)
        return prompt, response


def read_examples(
    files: Sequence[str],
    *,
    prompt_field: str | None = None,
    response_field: str | None = None,
    text_field: str | None = None,
    messages_field: str | None = None,
    split: str = "train",
    source: str | None = None,
    source_field: str | None = None,
    limit: int | None = None,
) -> Iterator[Example | BadRow]:
    """The examples of all files and data sets in their order.

    A row is an example by the fields named, else by the first of these that it has: "messages" (the last answer of
    the assistant is the response), "prompt" with "response" or "completion", "instruction" (and "input") with
    "output", "question" with "answer", "text". A text file is one raw document; an empty one is skipped.

    Args:
        files: JSON lines, CSV, TSV, Parquet or text files, packed as ".gz" or ".zst" or not, "-" for JSON lines on
            standard input, or the name of a Hugging Face data set, "owner/name" or "owner/name:config".
        prompt_field, response_field: the fields of a question and its answer; "prompt" and "response" where only one
            of the two is named.
        text_field: the field of a raw text.
        messages_field: the field of a conversation.
        split: the data sets' split.
        source: the source of all examples; by default the row's "source" where that is a string, else the file's
            stem or the data set's name.
        source_field: the field that holds a row's source; where a row lacks it, `source` stands in if given.
        limit: stop after so many examples; bad rows do not count.

    Raises:
        InputError: a file is missing, a directory, not permitted (all checked at the call), or found damaged or
            without the columns while it is read; a data set cannot be loaded.
        UsageError: fields of more than one kind are named, or a negative limit.
    """
    layouts = _layouts(prompt_field, response_field, text_field, messages_field)
    if limit is not None and limit < 0:
        raise UsageError(f"limit is {limit}", "a limit is 0 or more")
    for file in files:
        if not _is_dataset(file):
            format_of(file)
            check_file(file, missing="check the path; a data set on the hub is named owner/name")
    wanted = Wanted(
        layouts=layouts,
        also=("id", "question_id", "input", source_field or "source"),
        hint="name the fields: --messages-field, --prompt-field with --response-field, or --text-field",
        lists=(messages_field or "messages",),
    )
    if layouts is _LAYOUTS:
        messages_field = "messages"
    reader = _Reader(wanted, messages_field, source, source_field)
    return _limited(_examples(files, reader, split), limit)


def count_examples(files: Sequence[str], limit: int | None = None) -> int | None:
    """How many examples there are, as far as that can be told before they are read; None if it cannot."""
    counts = [None if _is_dataset(file) else 1 if format_of(file) == "text" else count_rows([file]) for file in files]
    if None in counts:
        return limit
    total = sum(filter(None, counts))
    return total if limit is None else min(total, limit)


@dataclass(frozen=True, slots=True)
class _Reader:
    """How a row becomes an example."""

    wanted: Wanted
    messages_field: str | None
    source: str | None
    source_field: str | None

    def example(self, where: str, row: Row, origin: str) -> Example:
        source = self._source_of(where, row, origin)
        layout = layout_of(where, row, self.wanted)
        if layout == (self.messages_field,):
            return _conversation(where, layout[0], row, source)
        if len(layout) == 1:
            return Example(source, (), text_of(where, layout[0], row[layout[0]]))
        prompt_field, response_field = layout
        prompt = text_of(where, prompt_field, row[prompt_field])
        if layout == _INSTRUCTION and row.get("input") is not None:
            extra = text_of(where, "input", row["input"], blank=True)
            prompt = f"{prompt}\n\n{extra}" if extra.strip() else prompt
        response = text_of(where, response_field, row[response_field])
        return Example(source, ({"role": "user", "content": prompt},), response)

    def _source_of(self, where: str, row: Row, origin: str) -> str:
        if self.source_field is not None:
            value = row.get(self.source_field)
            if value is None and self.source is not None:
                return self.source
            return text_of(where, self.source_field, value)
        if self.source is not None:
            return self.source
        value = row.get("source")
        return value if isinstance(value, str) and value.strip() and is_unicode(value) else origin


def _examples(files: Sequence[str], reader: _Reader, split: str) -> Iterator[Example | BadRow]:
    number = 0
    for file in files:
        if _is_dataset(file):
            records, origin = dataset_rows(file, reader.wanted, split=split), file
        elif format_of(file) == "text":
            text = document(file)
            if isinstance(text, PromptError):
                yield BadRow(str(number), text)
            elif text.strip():
                yield Example(reader.source or _stem(file), (), text)
            else:
                continue
            number += 1
            continue
        else:
            records = rows(file, reader.wanted, format="jsonl" if file == STDIN else None)
            origin = _stem(file)
        for where, row in records:
            name = id_of(row, number)
            number += 1
            if isinstance(row, PromptError):
                yield BadRow(name, row)
                continue
            try:
                example = reader.example(where, row, origin)
            except PromptError as error:
                yield BadRow(name, error)
            else:
                yield example


def _conversation(where: str, field: str, row: Row, source: str) -> Example:
    messages = messages_of(where, field, row[field])
    last = max((index for index, message in enumerate(messages) if message["role"] == "assistant"), default=None)
    if last is None:
        raise PromptError(f"{where}, field {field!r} has no message of the assistant", "ingest takes answered prompts")
    if last == 0:
        raise PromptError(f"{where}, field {field!r} starts with the answer", "the messages it answers must precede it")
    return Example(source, messages[:last], text_of(where, f"{field}[{last}].content", messages[last]["content"]))


def _layouts(
    prompt_field: str | None, response_field: str | None, text_field: str | None, messages_field: str | None
) -> tuple[Layout, ...]:
    named: list[Layout] = []
    if messages_field is not None:
        named.append((messages_field,))
    if prompt_field is not None or response_field is not None:
        named.append((prompt_field or "prompt", response_field or "response"))
    if text_field is not None:
        named.append((text_field,))
    if len(named) > 1:
        raise UsageError(
            "fields of more than one kind are named", "name a prompt and a response, or a text, or messages: one kind"
        )
    return tuple(named) or _LAYOUTS


def _is_dataset(file: str) -> bool:
    """Whether a name can only mean a data set: it is not a path, and does not look like one mistyped."""
    if _DATASET.fullmatch(file) is None or _FILE_SUFFIX.search(file):
        return False
    return not Path(file).exists() and not Path(file).parent.is_dir()


def _stem(file: str) -> str:
    """The file's name without its extension; "a" for "a.jsonl.gz"."""
    if file == STDIN:
        return "stdin"
    name = Path(file).name
    return shown(Path(unpacked(name)).stem)


def _limited(examples: Iterator[Example | BadRow], limit: int | None) -> Iterator[Example | BadRow]:
    taken = 0
    if limit == 0:
        return
    for example in examples:
        yield example
        taken += isinstance(example, Example)
        if taken == limit:
            return
