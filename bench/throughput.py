"""Jobs: how many tokens per second several settings make of the same prompts, many requests at once.

    python bench/throughput.py --prompts code.jsonl=16 chat.jsonl=16 --settings none@1,none@16,auto@1,auto@auto
    python bench/throughput.py --prompts code.jsonl=32 --settings auto@auto --server llama=http://127.0.0.1:8080@16

A setting is a method as `specds bench` writes it, and how many requests at once. A server is any that speaks OpenAI's
chat completions, asked with so many requests at a time. Settings take turns, round by round, in an order that rotates;
nothing of one round is left in a cache in the next, but for what drafters learn of earlier answers with --learning.
Shown are medians over the rounds of: seconds of the job, tokens per second, that over the first setting's, seconds
outside the target's passes as a share of those in it, and whether all texts are the first setting's.
"""

from __future__ import annotations

import argparse
import json
import time
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import median
from typing import Any

from specds.calibration.bench.cases import choose_cases
from specds.decode.contracts import Forward, Item
from specds.decode.engine import Engine
from specds.decode.method import parse_methods
from specds.model import LanguageModel, load_model
from specds.reading.conversation import Conversation
from specds.reading.prompts import Prompt


@dataclass(slots=True)
class Round:
    """What one job took."""

    seconds: float
    tokens: int
    texts: list[tuple[int, ...]] | None = None
    inside: float = 0.0
    passes: int = 0
    steps: int = 0


class Ours:
    """A method of ours with so many requests at once."""

    def __init__(self, model: LanguageModel, setting: str, learning: bool) -> None:
        words, _, parallel = setting.rpartition("@")
        (self._method,) = parse_methods(words)
        self._model, self._learning = model, learning
        self.name, self._wanted = setting, parallel
        self._engine = self._make()

    def _make(self) -> Engine:
        engine = Engine(self._model, self._method)
        self._inside, self._passes = 0.0, 0
        forward: Callable[[Sequence[Item]], Forward] = engine._target.forward

        def timed(items: Sequence[Item]) -> Forward:
            began = time.perf_counter()
            result = forward(items)
            self._inside += time.perf_counter() - began
            self._passes += 1
            return result

        engine._target.forward = timed  # type: ignore[method-assign]
        return engine

    def run(self, prompts: list[Prompt], length: int) -> Round:
        if not self._learning:
            self._engine = self._make()
        self._engine._target.forget()
        mean = sum(len(Conversation(one).tokens(self._model.tokenizer)) for one in prompts) // len(prompts)
        parallel = self._engine.parallel(mean + length // 2) if self._wanted == "auto" else int(self._wanted)
        self._inside, self._passes = 0.0, 0
        began = time.perf_counter()
        answers = [answered.answer for answered in self._engine.answers(prompts, length, parallel=parallel)]
        seconds = time.perf_counter() - began
        texts = [tuple(token for turn in answer.turns for token in turn.tokens) for answer in answers if answer]
        steps = sum(len(turn.steps) for answer in answers if answer for turn in answer.turns)
        return Round(seconds, sum(map(len, texts)), texts, self._inside, self._passes, steps)


class Server:
    """An OpenAI-compatible server, asked with so many requests at once."""

    def __init__(self, text: str) -> None:
        self.name, _, rest = text.partition("=")
        self._url, _, parallel = rest.rpartition("@")
        self._parallel = int(parallel)

    def run(self, prompts: list[Prompt], length: int) -> Round:
        began = time.perf_counter()
        with ThreadPoolExecutor(self._parallel) as pool:
            tokens = sum(pool.map(lambda prompt: self._ask(prompt, length), prompts))
        return Round(time.perf_counter() - began, tokens)

    def _ask(self, prompt: Prompt, length: int) -> int:
        messages: list[Any] = []
        tokens = 0
        for turn in prompt.turns:
            messages += turn
            body = {"messages": messages, "max_tokens": length, "temperature": 0, "cache_prompt": False}
            request = urllib.request.Request(
                f"{self._url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=3600) as reply:
                record = json.load(reply)
            tokens += int(record["usage"]["completion_tokens"])
            messages.append({"role": "assistant", "content": record["choices"][0]["message"]["content"]})
        return tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", nargs="+", required=True, metavar="F[=N]")
    parser.add_argument("--settings", default="none@1,none@16,auto@1,auto@auto")
    parser.add_argument("--server", action="append", default=[], metavar="NAME=URL@N")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--learning", action="store_true", help="keep what drafters learned of earlier rounds")
    options = parser.parse_args()

    model = load_model(options.model)
    prompts = [case.prompt for case in choose_cases(options.prompts) if isinstance(case.prompt, Prompt)]
    contenders: list[Any] = [Ours(model, word, options.learning) for word in options.settings.split(",")]
    contenders += [Server(text) for text in options.server]
    for contender in contenders:
        contender.run(prompts[:2], 8)  # warm
    rounds: dict[str, list[Round]] = {contender.name: [] for contender in contenders}
    for number in range(options.rounds):
        for place in range(len(contenders)):
            contender = contenders[(number + place) % len(contenders)]
            rounds[contender.name].append(contender.run(prompts, options.max_new_tokens))
    first = rounds[contenders[0].name]
    print(f"{len(prompts)} prompts, at most {options.max_new_tokens} tokens, {options.rounds} rounds")
    print("setting                | seconds | tokens/s |  x first | outside/pass | passes | MAT  | same text")
    for name, each in rounds.items():
        against = median(
            one.tokens / one.seconds / (other.tokens / other.seconds) for one, other in zip(each, first, strict=True)
        )
        cells = f"{name:22} | {median(one.seconds for one in each):7.1f} | "
        cells += f"{median(one.tokens / one.seconds for one in each):8.1f} | {against:8.2f} | "
        if each[0].texts is None:
            print(cells + "           – |      – |    – | –")
            continue
        outside = median((one.seconds - one.inside) / one.inside for one in each)
        same = sum(a == b for a, b in zip(each[0].texts, first[0].texts or [], strict=False))
        mat = each[0].tokens / max(1, each[0].steps)
        print(cells + f"{outside:12.1%} | {each[0].passes:6} | {mat:4.2f} | {same}/{len(each[0].texts)}")


if __name__ == "__main__":
    main()
