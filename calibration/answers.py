"""Answers that were written before: token ids of prompts and answers, from what `specds decode` or others wrote."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from specds.calibration.trace import read_trace
from specds.errors import InputError, PromptError
from specds.printing import is_unicode
from specds.reading.conversation import Conversation
from specds.reading.examples import Example, read_examples
from specds.reading.input_file import check_file, shown
from specds.reading.lines import lines
from specds.reading.prompts import BadRow, Prompt
from specds.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Recorded:
    """One turn's prompt and answer, as token ids.

    Attributes:
        id: the prompt's.
        turn: which of its turns, from 0.
        prompt: template and history included.
        tokens: the answer, a stop token included; at least one.
        stopped: whether the answer ends because its last token ends it.
        most: how many tokens it could have had; as many as it has where that is not known.
        group: what the prompt belongs to; empty if nobody says.
    """

    id: str
    turn: int
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    stopped: bool
    most: int
    group: str = ""

    @property
    def text(self) -> tuple[int, ...]:
        """Prompt and answer."""
        return self.prompt + self.tokens


@dataclass(frozen=True, slots=True)
class Answers:
    """What was read.

    Attributes:
        turns: in the order of the file.
        failed: records of prompts that were not answered.
        lossless: whether all are said to be the model's own text, token for token.
    """

    turns: tuple[Recorded, ...]
    failed: int = 0
    lossless: bool = True


def read_answers(
    path: str,
    prompts: Iterable[Prompt | BadRow],
    tokenizer: Tokenizer,
    *,
    most: int | None = None,
    stop_tokens: Collection[int] = (),
) -> Answers:
    """The answers that `specds decode` wrote, with the prompts that they answer.

    Args:
        path: JSON lines, "-", or a trace (.parquet).
        prompts: what was decoded, in any order if their ids differ, else in the answers' order; more may be there.
        most: --max-new-tokens of the run. By default what the answers show: the longest that ended for its length.
        stop_tokens: the model's; of a trace they say which answers ended by themselves.

    Raises:
        InputError: the file cannot be read, holds something else, or its prompts are others.
    """
    known = list(prompts)
    by_id = {row.id: row for row in known}
    unique = len(by_id) == len(known)
    turns: list[Recorded] = []
    failed, lossless, number = 0, True, -1
    records = _traced(path, tokenizer, stop_tokens) if path.lower().endswith(".parquet") else _records(path)
    for number, (where, record) in enumerate(records):
        row = by_id.get(record["id"]) if unique else known[number] if number < len(known) else None
        if "error" in record:
            failed += 1
            continue
        if not isinstance(row, Prompt) or row.id != record["id"]:
            raise InputError(f"{where} answers prompt {record['id']!r}, which is not among the prompts", _SAME)
        lossless = lossless and record.get("lossless") is True
        turns += _turns(where, record, row, tokenizer)
    if not turns:
        raise InputError(f"no answers in {shown(path)}", "give what `specds decode` wrote")
    if most is None:
        most = max((turn.most for turn in turns if not turn.stopped), default=0)
    turns = [replace(turn, most=max(turn.most, most)) if turn.stopped else turn for turn in turns]
    return Answers(tuple(turns), failed, lossless)


def read_pairs(files: Sequence[str], tokenizer: Tokenizer) -> Answers:
    """Prompts with their responses, in any form that `specds ingest` reads; raw texts have nothing to answer.

    Raises:
        InputError: a file cannot be read, or holds no such rows.
    """
    turns: list[Recorded] = []
    failed = 0
    for number, example in enumerate(read_examples(files)):
        if not isinstance(example, Example) or not example.prompt:
            failed += 1
            continue
        try:
            prompt, tokens = example.tokens(tokenizer)
        except PromptError:
            failed += 1
            continue
        if not tokens:
            failed += 1
            continue
        ends = tokenizer.end is not None and tokens.index(tokenizer.end) == len(tokens) - 1
        turns.append(Recorded(str(number), 0, tuple(prompt), tuple(tokens), ends, len(tokens), example.source))
    if not turns:
        raise InputError(
            f"no prompts with responses in {', '.join(map(shown, files))}",
            'rows such as {"prompt": "…", "response": "…"}, or answers of `specds decode` with their --prompts',
        )
    return Answers(tuple(turns), failed)


_SAME = "give the prompt files that were decoded, with the same --prompt-field and --model"


def _records(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    check_file(path)
    for where, line in lines(path):
        try:
            record = None if isinstance(line, PromptError) else json.loads(line)
            if not isinstance(record, dict) or not isinstance(record.get("id"), str):
                raise ValueError("no record")
        except (ValueError, RecursionError) as error:
            raise InputError(
                f"{where} is not an answer of `specds decode`", "give what --output or stdout got"
            ) from error
        yield where, record


def _traced(path: str, tokenizer: Tokenizer, stop_tokens: Collection[int]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Records as `specds decode` writes them, from its trace; of a turn that was traced several times the first."""
    rows = read_trace(path, ["prompt", "turn", "step", "position", "tokens", "rescue_nodes"])
    prompts: dict[str, dict[int, list[dict[str, Any]]]] = {}
    again: set[tuple[str, int]] = set()
    lossless = True
    for row in rows:
        steps = prompts.setdefault(row["prompt"], {}).setdefault(row["turn"], [])
        turn = row["prompt"], row["turn"]
        if steps and not row["step"]:
            again.add(turn)
        if turn not in again:
            steps.append(row)
        lossless = lossless and not row["rescue_nodes"]
    for name, turns in prompts.items():
        parts = []
        for steps in turns.values():
            tokens = [token for step in steps for token in step["tokens"]]
            stopped = bool(tokens) and tokens[-1] in stop_tokens
            part: dict[str, Any] = {"tokens": tokens, "finish_reason": "stop" if stopped else "length"}
            part["prompt_tokens"] = steps[0]["position"]
            whole = all(type(token) is int and 0 <= token < tokenizer.vocab_size for token in tokens)
            parts.append({**part, "text": tokenizer.decode(tokens) if whole else ""})
        yield f"{shown(path)}: prompt {name}", {"id": name, "turns": parts, "lossless": lossless}


def _turns(where: str, record: dict[str, Any], prompt: Prompt, tokenizer: Tokenizer) -> Iterator[Recorded]:
    parts = record.get("turns") or [record]
    if not isinstance(parts, list) or len(parts) != len(prompt.turns):
        raise InputError(f"{where} answers a prompt of another number of turns than {prompt.id!r} has", _SAME)
    conversation = Conversation(prompt)
    for part in parts:
        tokens, text = _fields(where, part, tokenizer.vocab_size)
        try:
            ids = conversation.tokens(tokenizer)
        except PromptError as error:
            raise InputError(f"{where}: {error.message}", error.hint) from error
        if len(ids) != part.get("prompt_tokens"):
            raise InputError(
                f"{where} answers a prompt of {part.get('prompt_tokens')} tokens, and {prompt.id!r} has {len(ids)}",
                _SAME,
            )
        stopped = part.get("finish_reason") == "stop"
        yield Recorded(prompt.id, conversation.turn, tuple(ids), tokens, stopped, len(tokens), prompt.group or "")
        conversation.answered(text)


def _fields(where: str, part: Any, vocabulary: int) -> tuple[tuple[int, ...], str]:
    tokens, text = (part.get("tokens"), part.get("text")) if isinstance(part, dict) else (None, None)
    whole = isinstance(tokens, list) and all(type(token) is int and 0 <= token < vocabulary for token in tokens)
    if not whole or not tokens or not isinstance(text, str):
        raise InputError(f"{where} holds no token ids of this model", _SAME)
    if not is_unicode(text):
        raise InputError(f"{where} holds text with half of a surrogate pair, which no model writes", _SAME)
    return tuple(tokens), text
