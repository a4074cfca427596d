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
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from specds.calibration.bench.cases import choose_cases
from specds.calibration.bench.quality import correct, rouge_l
from specds.decode.contracts import Activations, Forward, Target
from specds.decode.counters import Counters
from specds.decode.draft import Draft
from specds.decode.draft_model import draft_model_of
from specds.decode.engine import Engine
from specds.decode.method import distinct, parse_methods
from specds.model import LanguageModel, load_model
from specds.reading.prompts import Prompt
from specds.reference import LogProbabilities
from specds.sampling import Sampling


class Remembering:
    """A target for several engines that computes nothing twice for a prompt: what follows a text is what it was.

    Of the real target it keeps as much in its cache as the text at hand needs, when a pass is to be run.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self._prompt: list[int] = []
        self._text: list[int] = []  # committed, and forwarded if there were no memory
        self._held: list[int] = []  # what the real target holds
        self._pending: list[int] = []
        self._sketched: list[int] = []
        self._drawn: list[int] = []  # what of it the real target has drafted by layer-skip after its text
        self._waits = False  # whether the real target has run the pass that is to be committed
        self._known: dict[Any, Any] = {}

    def prefill(self, tokens: Sequence[int]) -> Forward:
        self._text = list(tokens)
        if self._text != self._prompt:
            self._prompt, self._known = self._text[:], {}
        if not self._known:
            self._known[()] = copied(self._target.prefill(tokens))
            self._held, self._drawn = self._text[:], []
        first: Forward = self._known[()]
        return first

    def forward(self, last: int, draft: Draft) -> Forward:
        self._pending = [last, *draft.tokens.tolist()]
        key = (tuple(self._text), tuple(self._pending), tuple(draft.parents.tolist()))
        self._waits = False
        if key not in self._known:
            self._catch_up()
            self._known[key] = copied(self._target.forward(last, draft))
            self._waits = True
        known: Forward = self._known[key]
        return known

    def commit(self, path: Sequence[int]) -> None:
        self._text += [self._pending[0], *(self._pending[node + 1] for node in path)]
        self._sketched = []
        if self._waits:
            self._target.commit(path)
            self._held, self._drawn = self._text[:], []

    def layer_skip(self, token: int, ahead: int, skip: frozenset[int]) -> torch.Tensor:
        self._sketched = [*self._sketched[:ahead], token]
        key = (tuple(self._text), tuple(self._sketched), skip)
        if key not in self._known:
            self._catch_up()
            if self._drawn != self._sketched[:-1]:
                for place, before in enumerate(self._sketched[:-1]):
                    self._target.layer_skip(before, place, skip)
            self._known[key] = self._target.layer_skip(token, ahead, skip).clone()
            self._drawn = self._sketched
        known: torch.Tensor = self._known[key]
        return known

    def activations(self) -> Activations:
        self._catch_up()
        return self._target.activations()

    def embed(self, tokens: NDArray[np.integer]) -> NDArray[np.float32]:
        return self._target.embed(tokens)

    def _catch_up(self) -> None:
        if self._held != self._text:
            self._target.prefill(self._text)
            self._held, self._drawn = self._text[:], []


def copied(forward: Forward) -> Forward:
    return Forward(forward.logits.clone(), None if forward.hidden is None else forward.hidden.clone())


def share_targets(engines: Iterable[Engine]) -> None:
    """One remembering target for all engines whose drafters ask the same of it."""
    shared: dict[Any, Remembering] = {}
    for engine in engines:
        captures = engine._assembly.prepared.captures
        if captures not in shared:
            shared[captures] = Remembering(engine._target)
        engine._target = shared[captures]
        if engine._draft_model is not None and not isinstance(engine.method.draft_model, LanguageModel):
            engine._draft_model.model = draft_model_of(
                engine.method.draft_model, engine._target, engine.model, engine.runtime
            )


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
