"""What is measured: our own methods in this process, other engines in processes of their own."""

from __future__ import annotations

import contextlib
import json
import queue
import shlex
import subprocess
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import IO, Any, Protocol

from specds.decode.answering import Turn
from specds.decode.contracts import Step
from specds.decode.counters import Counters
from specds.decode.engine import Engine
from specds.errors import PeerError, PromptError
from specds.model import LanguageModel
from specds.reading.conversation import Conversation
from specds.reading.prompts import Prompt
from specds.reference import until_stop

_MOST_LINE = 1 << 26


@dataclass(frozen=True, slots=True)
class Measured:
    """One answer of one contender.

    Attributes:
        turns: its token ids; the steps of a peer are not known.
        seconds: wall time of the whole answer, as seen from outside.
        claimed: seconds that the contender itself accounts for; None if it does not say.
        passes: forward passes of the target, counted from outside in our methods, as it says for a peer.
    """

    turns: tuple[Turn, ...]
    seconds: float
    claimed: float | None
    passes: int | None

    @property
    def steps(self) -> list[Step]:
        """The steps of all turns."""
        return [step for turn in self.turns for step in turn.steps]


class Contender(Protocol):
    """One column of the comparison.

    Attributes:
        name: unique in a run.
        peer: another engine.
        drafter: what traces call it; empty for a peer.
        lossless: whether it says that its texts are plain decoding's; None: it does not say.
    """

    name: str
    peer: bool
    drafter: str
    lossless: bool | None

    def answer(self, prompt: Prompt, max_new_tokens: int) -> Measured:
        """Answer all turns, timed.

        Raises:
            PromptError: a prompt that cannot be answered.
            PeerError: an engine that died or answered nonsense.
        """

    def close(self) -> None:
        """End what was started."""


class Ours:
    """A method of ours, over an engine."""

    peer = False

    def __init__(self, name: str, engine: Engine) -> None:
        self.name, self.drafter = name, engine.method.drafter
        # Rejection sampling draws from the target's distribution, but not the tokens of plain sampling.
        same = engine.sampling.greedy or not engine.independent
        self.lossless: bool | None = engine.lossless if same else None
        self._engine = engine
        self._target = engine.count_passes()

    def answer(self, prompt: Prompt, max_new_tokens: int) -> Measured:
        """See `Contender.answer`. Nothing of an earlier request is left in the cache when the clock starts."""
        self._target.forget()
        self._target.passes = 0
        began = perf_counter()
        answer = self._engine.answer(prompt, max_new_tokens)
        seconds = perf_counter() - began
        return Measured(answer.turns, seconds, answer.counters.seconds, self._target.passes)

    def close(self) -> None:
        """See `Contender.close`."""


class Worker:
    """A process that answers requests: a JSON line in, a JSON line out.

    A request is one turn: `id`, `peer`, `turn`, `tokens` (the whole prompt's ids, template and history included),
    `text` (the same as text), `messages` (the conversation; absent for text to be continued), `max_new_tokens` and
    `stop_tokens`. Its answer has `id`, `tokens` (the new ids, a stop token included), and may have `seconds`, `passes`
    (forward passes of the target), `lossless`, or an `error`.

    Args:
        command: run when the first request comes.
        log: takes its stderr.
        timeout: seconds that one answer may take, the first one's loading included.
    """

    def __init__(self, command: Sequence[str], log: Path, timeout: float) -> None:
        self._command, self._log, self._timeout = list(command), log, timeout
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """The answer to one request.

        Raises:
            PeerError: it died, was silent for too long, or answered something that is not a record of this request.
        """
        process = self._running()
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            line = self._lines.get(timeout=self._timeout)
        except (OSError, queue.Empty) as error:
            silent = isinstance(error, queue.Empty)
            raise self._broken(f"is silent for {self._timeout:g} s" if silent else "died") from error
        if not line:
            raise self._broken("died")
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise self._broken(f"answered {line.strip()[:60]!r}, which is not JSON") from error
        if not isinstance(record, dict) or record.get("id") != request["id"]:
            raise self._broken(f"answered a record that is not of request {request['id']!r}")
        return record

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(OSError):
            assert process.stdin is not None
            process.stdin.close()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _running(self) -> subprocess.Popen[str]:
        if self._process is None:
            with self._log.open("ab") as log:
                try:
                    self._process = subprocess.Popen(
                        self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
                    )
                except OSError as error:
                    reason = f"{shlex.join(self._command)}: {error.strerror or error}"
                    raise PeerError(reason, "check the command") from error
            self._lines = queue.SimpleQueue()
            assert self._process.stdout is not None
            threading.Thread(target=_listen, args=(self._process.stdout, self._lines), daemon=True).start()
        return self._process

    def _broken(self, what: str) -> PeerError:
        """The process is ended; the next request starts it anew."""
        self.close()
        with contextlib.suppress(OSError):
            said = self._log.read_text(errors="replace").strip().splitlines()
            if said:
                what += f" ({said[-1][:200]})"
        return PeerError(f"{shlex.join(self._command)[:200]} {what}", f"its stderr is in {self._log}")


def _listen(stream: IO[str], lines: queue.SimpleQueue[str]) -> None:
    with contextlib.suppress(OSError, ValueError):
        while line := stream.readline(_MOST_LINE):
            lines.put(line)
    lines.put("")


class Peer:
    """Another engine behind a worker; several peers may share one.

    Args:
        lossless: whether it says so; None: its answers may.
    """

    peer = True
    drafter = ""

    def __init__(self, name: str, worker: Worker, model: LanguageModel, lossless: bool | None = None) -> None:
        self.name = name
        self.lossless = lossless
        self._worker, self._model = worker, model

    def answer(self, prompt: Prompt, max_new_tokens: int) -> Measured:
        """See `Contender.answer`. Its clock is ours: what it says of its own time is only compared with it."""
        conversation = Conversation(prompt)
        turns: list[Turn] = []
        claimed: list[Any] = []
        passes: list[Any] = []
        tokenizer = self._model.tokenizer
        began = perf_counter()
        while not conversation.done:
            tokens, raw_text = conversation.tokens(tokenizer), conversation.raw_text
            longest = min(max_new_tokens, self._model.context_length - len(tokens))
            if longest < 1:
                raise PromptError(f"the prompt has {len(tokens):,} tokens, which leave no room", "shorten it")
            request = {
                "id": f"{prompt.id}/{conversation.turn}",
                "peer": self.name,
                "turn": conversation.turn,
                "tokens": tokens,
                "text": tokenizer.hf.decode(tokens) if raw_text is None else raw_text,
                **({"messages": list(conversation.messages)} if raw_text is None else {}),
                "max_new_tokens": longest,
                "stop_tokens": sorted(self._model.stop_tokens),
            }
            record = self._worker.ask(request)
            written = self._tokens(record)[:longest]
            claimed.append(record.get("seconds"))
            passes.append(record.get("passes"))
            if self.lossless is None and isinstance(record.get("lossless"), bool):
                self.lossless = record["lossless"]
            text = tokenizer.decode(written)
            stopped = written[-1] in self._model.stop_tokens
            reason = "stop" if stopped else "length" if longest == max_new_tokens else "context"
            turns.append(Turn(text, tuple(written), reason, tuple(tokens), ()))
            conversation.answered(text)
        seconds = perf_counter() - began
        known = all(isinstance(seconds, int | float) and seconds >= 0 for seconds in claimed)
        counted = all(isinstance(count, int) and count > 0 for count in passes)
        return Measured(tuple(turns), seconds, sum(claimed) if known else None, sum(passes) if counted else None)

    def _tokens(self, record: dict[str, Any]) -> list[int]:
        """The ids of an answer, by the same stop rule as ours."""
        if record.get("error"):
            raise PeerError(f"{self.name}: {str(record['error'])[:200]}", "its stderr may say more")
        tokens = record.get("tokens")
        most = int(self._model.config.vocab_size)
        if (
            not isinstance(tokens, list)
            or not tokens
            or not all(type(token) is int and 0 <= token < most for token in tokens)
        ):
            raise PeerError(f"{self.name} answered without token ids", f'"tokens" is a list of numbers below {most:,}')
        return until_stop(tokens, self._model.stop_tokens)

    def close(self) -> None:
        """See `Contender.close`."""
        self._worker.close()


def complaints(measured: Measured) -> list[str]:
    """What in an answer of ours contradicts itself or what was counted from outside.

    Every committed token must be a drafted one on the accepted path or the target's own at its end, every step one
    pass of the target.
    """
    problems: list[str] = []
    steps = measured.steps
    if measured.passes is not None and measured.passes != len(steps):
        problems.append(f"reports {len(steps)} steps, and the target ran {measured.passes} passes")
    for number, turn in enumerate(measured.turns):
        place = len(turn.prompt)
        for index, step in enumerate(turn.steps):
            where = f"turn {number}, step {index}"
            if step.index != index or step.position != place:
                problems.append(f"{where} says it is step {step.index} at position {step.position}, not {place}")
            place += len(step.tokens)
            drafted = tuple(int(step.draft.tokens[node]) for node in step.path)
            parents = tuple(int(step.draft.parents[node]) for node in step.path)
            if parents != (-1, *step.path)[: len(parents)]:
                problems.append(f"{where} accepts nodes that are not a path")
            if (
                not step.tokens
                or len(step.tokens) > len(drafted) + 1
                or step.tokens[: len(drafted)] != (drafted[: len(step.tokens)])
            ):
                problems.append(f"{where} commits other tokens than the accepted ones and one of the target's")
        if tuple(token for step in turn.steps for token in step.tokens) != turn.tokens:
            problems.append(f"the steps of turn {number} do not add up to its text")
    return problems


def counters_of(measured: Measured) -> Counters | None:
    """What the steps add up to; None of a peer, whose steps are not known."""
    steps = measured.steps
    return Counters.of(steps) if steps else None
