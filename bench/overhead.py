"""What the logic of a lossy verifier takes of a step, against strict verification of the same logits.

    python bench/overhead.py --prompts gsm8k.jsonl --drafter pld --verifier csd --set table=pld.parquet

Decodes with the lossy verifier. Before it judges a step, every second time, the strict one judges the same draft, so
that each of them meets the caches as the pass over the model left them in half of the steps: only these are timed. The
difference holds all that the lossy verifier does more: its look-ups, and the query tokens after what it accepted. Steps
in which nothing was accepted lossily, where both judge the same logits, are shown besides.
"""

from __future__ import annotations

import argparse
import itertools
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from time import perf_counter
from typing import Any

from specds.decode.contracts import Case, Verdict, Verifier
from specds.decode.engine import Engine
from specds.decode.method import Method
from specds.decode.verifiers import make_verifier
from specds.model import load_model
from specds.reading.prompts import Prompt, read_prompts
from specds.sampling import Sampling


@dataclass(slots=True)
class Both(Verifier):
    """A lossy verifier; the strict one sees its drafts too, and in turns the first of them is timed.

    Attributes:
        times: of the strict and of the lossy one, (seconds, whether the lossy one let something pass).
    """

    lossy: Verifier
    strict: Verifier
    lossless: bool = False
    times: tuple[list[tuple[float, bool]], list[tuple[float, bool]]] = field(default_factory=lambda: ([], []))

    def verify(self, case: Case) -> Verdict:
        if not len(case.draft):
            return self.lossy.verify(case)
        strictly = len(self.times[0]) < len(self.times[1])
        began = perf_counter()
        verdict = (self.strict if strictly else self.lossy).verify(case)
        seconds = perf_counter() - began
        if strictly:
            verdict = self.lossy.verify(case)
        self.times[0 if strictly else 1].append((seconds, bool(verdict.rescues)))
        return verdict


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", nargs="+", required=True)
    parser.add_argument("--limit", type=int, default=12)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--store", action="append", default=[])
    parser.add_argument("--drafter", default="pld")
    parser.add_argument("--budget", type=int, default=16)
    parser.add_argument("--verifier", default="csd")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="an option of the verifier")
    parser.add_argument("--temperature", type=float, default=0.0)
    options = parser.parse_args()

    model, sampling = load_model(options.model), Sampling(options.temperature)
    chosen: dict[str, str] = dict(pair.split("=", 1) for pair in options.set)
    stores = [Path(path) for path in options.store]
    engine = Engine(model, Method(options.drafter, {}, stores, options.budget, options.verifier, chosen), sampling)
    prompts = [row for row in read_prompts(options.prompts) if isinstance(row, Prompt)]
    engine.answer(prompts[-1], 16)  # warm
    both = Both(engine._verifier, make_verifier("rejection", sampling, {}))
    engine._verifier = both
    steps: list[Any] = []
    for prompt in itertools.islice(prompts, options.limit):
        steps += [step for turn in engine.answer(prompt, options.max_new_tokens).turns for step in turn.steps[1:]]
    elsewhere = [step.draft_seconds + step.forward_seconds + step.commit_seconds for step in steps]
    strict, lossy = both.times
    whole = mean(elsewhere) + mean(seconds for seconds, _ in lossy)
    print(f"{len(steps)} steps of {whole * 1e3:.2f} ms in the mean; microseconds of verifying, mean and median:")
    for what, kept in (("all steps", (True, False)), ("nothing accepted lossily", (False,))):
        strictly, lossily = ([seconds for seconds, passed in times if passed in kept] for times in (strict, lossy))
        for name, seconds in (("strict", strictly), (options.verifier, lossily)):
            print(f"  {what}, {name}: {mean(seconds) * 1e6:.1f}, {median(seconds) * 1e6:.1f} ({len(seconds)} times)")
        more = mean(lossily) - mean(strictly), median(lossily) - median(strictly)
        print(f"  {what}, more: {more[0] / whole:.3%} of a step by means, {more[1] / whole:.3%} by medians")


if __name__ == "__main__":
    main()
