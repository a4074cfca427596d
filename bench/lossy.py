"""Count what verifiers accept and what it does to the texts, many at once; seconds are not measured.

    python bench/lossy.py --prompts gsm8k.jsonl=24 humaneval.jsonl=24 --methods 'pld@8,pld@8!csd?table=T.parquet'

Methods are written as for `specds bench`, which times them. Here no pass is computed twice: methods that ask the same
of the target share one that remembers what followed a text, so that a prompt is read once, and verifiers that agree up
to a place cost one pass each up to there. A row's result depends on nothing beside it, so that counts are what they
would be.

Printed for each group: MAT; accepted tokens over those of the best path and over all drafted ones; lossily accepted
tokens in a hundred steps; texts that are those of the first method with the same drafter; mean log-probability of a
token under the target; ROUGE-L to that first method's text; right answers, where a reference marks one.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from specds.calibration.bench.cases import choose_cases
from specds.calibration.bench.quality import correct, rouge_l
from specds.decode.contracts import Activations, Forward, Item, Target
from specds.decode.counters import Counters
from specds.decode.draft_model import draft_models
from specds.decode.engine import Engine
from specds.decode.method import distinct, parse_methods
from specds.decode.prompt import hold
from specds.model import LanguageModel, load_model
from specds.reading.prompts import Prompt
from specds.reference import LogProbabilities
from specds.sampling import Sampling


class Slot:
    def __init__(self) -> None:
        self.tokens: list[int] = []


class Remembering:
    """A target for several engines that computes nothing twice for a prompt: what follows a text is what it was.

    One request at a time. The real target holds the text at hand only when a pass is to be run.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self.chunk, self.capacity = target.chunk, target.capacity
        self._prompt: list[int] = []
        self._length = 0
        self._held: Any = None  # the real target's slot
        self._pending: NDArray[np.int32] = np.empty(0, np.int32)
        self._waits = False  # whether the real target has run the pass that is to be committed
        self._skipped: list[int] = []
        self._drawn: list[int] = []  # what the real target has drafted by layer-skip behind its text
        self._known: dict[Any, Any] = {}

    def open(self, prompt: Sequence[int], length: int) -> Slot:
        if list(prompt) != self._prompt:
            self._prompt, self._known = list(prompt), {}
            self._release()
        self._length = max(self._length, length)
        return Slot()

    def close(self, slot: Any) -> None:
        self._skipped = []

    def forget(self) -> None:
        self._target.forget()

    def forward(self, items: Sequence[Item]) -> Forward:
        (item,) = items
        parents = () if item.parents is None else tuple(item.parents.tolist())
        key = (tuple(item.slot.tokens), tuple(item.tokens.tolist()), parents, item.wanted)
        self._pending, self._waits = item.tokens, False
        if key not in self._known:
            self._catch_up(item.slot)
            self._known[key] = copied(self._target.forward([replace(item, slot=self._held)]))
            self._waits = True
        known: Forward = self._known[key]
        return known

    def commit(self, slot: Any, rows: Sequence[int]) -> None:
        slot.tokens += self._pending[list(rows)].tolist()
        self._skipped = []
        if self._waits:
            self._target.commit(self._held, rows)
            self._drawn = []

    def layer_skip(self, slot: Any, token: int, ahead: int, skip: frozenset[int]) -> torch.Tensor:
        self._skipped = [*self._skipped[:ahead], token]
        key = (tuple(slot.tokens), tuple(self._skipped), skip)
        if key not in self._known:
            self._catch_up(slot)
            if self._drawn != self._skipped[:-1]:
                for place, before in enumerate(self._skipped[:-1]):
                    self._target.layer_skip(self._held, before, place, skip)
            self._known[key] = self._target.layer_skip(self._held, token, ahead, skip).clone()
            self._drawn = self._skipped
        known: torch.Tensor = self._known[key]
        return known

    def activations(self, slot: Any, start: int = 0) -> Activations:
        self._catch_up(slot)
        return self._target.activations(self._held, start)

    def embed(self, tokens: NDArray[np.integer]) -> NDArray[np.float32]:
        return self._target.embed(tokens)

    def _catch_up(self, slot: Any) -> None:
        if self._held is None or list(self._held.tokens) != slot.tokens:
            self._release()
            self._held = hold(self._target, slot.tokens, self._length)

    def _release(self) -> None:
        if self._held is not None:
            self._target.close(self._held)
        self._held, self._drawn = None, []


def copied(forward: Forward) -> Forward:
    return Forward(forward.logits.clone(), None if forward.hidden is None else forward.hidden.clone(), forward.ends)


def share_targets(engines: Iterable[Engine]) -> None:
    """One remembering target for all engines whose drafters ask the same of it."""
    shared: dict[Any, Remembering] = {}
    for engine in engines:
        captures = engine._assembly.prepared.captures
        if captures not in shared:
            shared[captures] = Remembering(engine._target)
        engine._target = shared[captures]
        if engine._draft_models is not None and not isinstance(engine.method.draft_model, LanguageModel):
            engine._draft_models = draft_models(engine.method.draft_model, engine._target, engine.model, engine.runtime)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", nargs="+", required=True, metavar="F[=N]")
    parser.add_argument("--methods", nargs="+", required=True)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--output", type=Path, help="a JSON line for each prompt and method")
    options = parser.parse_args()

    model = load_model(options.model, threads=options.threads)
    methods = distinct([method for text in options.methods for method in parse_methods(text, 8)])
    engines = {method.name: Engine(model, method, Sampling(options.temperature)) for method in methods}
    share_targets(engines.values())
    strict: dict[Any, str] = {}  # of the methods that draft alike, the first
    for method in methods:
        strict.setdefault(drafting(method.name), method.name)
    likely = cache(LogProbabilities(model).of)
    rows: list[dict[str, Any]] = []
    cases = choose_cases(options.prompts, turns=1)
    for number, case in enumerate(cases):
        prompt = case.prompt
        assert isinstance(prompt, Prompt)
        texts = {}
        for name, engine in engines.items():
            turn = engine.answer(prompt, options.max_new_tokens).turns[0]
            counters, base = Counters.of(turn.steps), strict[drafting(name)]
            texts[name] = turn
            rows.append(
                {
                    "group": case.group,
                    "prompt": case.key,
                    "method": name,
                    "steps": counters.steps,
                    "tokens": counters.tokens,
                    "drafted": counters.drafted,
                    "accepted": counters.accepted,
                    "path_drafted": counters.path_drafted,
                    "rescued": counters.rescued,
                    "same": turn.tokens == texts[base].tokens,
                    "rouge_l": rouge_l(turn.text, texts[base].text),
                    "log_p": likely(turn.prompt, turn.tokens),
                    "right": None if prompt.reference is None else correct(turn.text, prompt.reference),
                }
            )
        print(f"\r{number + 1} of {len(cases)} prompts", end="", flush=True)
        if options.output:
            options.output.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print()
    for group in [*dict.fromkeys(row["group"] for row in rows), None]:
        table(group or "all", [row for row in rows if group in (None, row["group"])])


def drafting(method: str) -> str:
    return method.partition("!")[0]


def table(title: str, rows: list[dict[str, Any]]) -> None:
    total: dict[str, Counter[str]] = defaultdict(Counter)
    count: Counter[str] = Counter(row["method"] for row in rows)
    for row in rows:
        total[row["method"]].update({name: float(row[name] or 0) for name in row if name not in KEYS})
    print(f"\n{title}: {len({row['prompt'] for row in rows})} prompts")
    print(f"{'method':56}    MAT   path   node  rescued   same    log p  ROUGE-L  right")
    for method, of in total.items():
        print(
            f"{method:56} {of['tokens'] / of['steps']:6.2f} {of['accepted'] / max(of['path_drafted'], 1):6.1%} "
            f"{of['accepted'] / max(of['drafted'], 1):6.1%} {100 * of['rescued'] / of['steps']:8.1f} {of['same']:6.0f} "
            f"{of['log_p'] / of['tokens']:8.3f} {of['rouge_l'] / count[method]:8.3f} {of['right']:6.0f}"
        )


KEYS = ("group", "prompt", "method")

if __name__ == "__main__":
    main()
