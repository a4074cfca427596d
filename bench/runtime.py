"""Time the target: T(n) of each runtime, plain decoding against `generate`, wrong drafts, and peak memory.

    python bench/runtime.py --prompts F.jsonl --limit 8

Everything is interleaved: row counts and runtimes in one loop, methods prompt by prompt. E1 is T(1) of the generic
runtime, transformers' own forward pass. The wrong drafter predicts nine tenths for tokens that are never right, as many
as the budget allows: what `--budget auto` then costs is what it can cost anyone.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from specds.decode.contracts import Item, Step
from specds.decode.draft import Draft, chain, empty
from specds.decode.drafters.none import Null
from specds.decode.drafters.pld import PromptLookup
from specds.decode.loop import decode_one
from specds.decode.pricing import measurement
from specds.decode.pricing.budget import Adaptive, Budget, Fixed
from specds.decode.prompt import hold
from specds.decode.targets import choose_runtime, make_target
from specds.decode.verifiers import make_verifier
from specds.model import LanguageModel, load_model
from specds.reading.conversation import Conversation
from specds.reading.prompts import Prompt, read_prompts
from specds.reference import generate_plain
from specds.sampling import Sampling


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--limit", type=int, default=8, help="prompts taken, spread evenly over the file")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--rows", default="1,2,4,8,12,16,24,32,64")
    parser.add_argument("--contexts", default="300")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    options = parser.parse_args()

    memory(options)
    model = load_model(options.model, device=options.device, dtype=options.dtype)
    for context in map(int, options.contexts.split(",")):
        curves(model, [int(rows) for rows in options.rows.split(",")], context, options.repeats)
    every = [row for row in read_prompts([options.prompts]) if isinstance(row, Prompt)]
    asked = every[:: max(1, len(every) // options.limit)][: options.limit]
    prompts = [Conversation(prompt).tokens(model.tokenizer) for prompt in asked]
    decoding(model, prompts, options.max_new_tokens)


def curves(model: LanguageModel, rows: list[int], context: int, repeats: int) -> None:
    runtimes = list(dict.fromkeys([choose_runtime(model), "generic"]))
    targets = {name: make_target(model, name) for name in runtimes}
    tokens = np.random.default_rng(0).integers(0, model.config.vocab_size, context).tolist()
    times: dict[tuple[str, int], list[float]] = defaultdict(list)
    slots = {name: hold(target, tokens, context + max(rows)) for name, target in targets.items()}
    for repeat in range(repeats + 1):
        for name, target in targets.items():
            time.sleep(0.05)  # torch's threads go on spinning for a while after a pass of their own
            target.forward([Item.draft(slots[name], 0, empty())])
            for count in rows:
                draft = chain(tokens[: count - 1], [0.5] * (count - 1))
                began = time.perf_counter()
                float(target.forward([Item.draft(slots[name], 0, draft)]).logits[-1, 0])
                if repeat:
                    times[name, count].append(time.perf_counter() - began)
    eager = median(times["generic", 1])
    print(f"T(n) in ms behind {context} tokens, {model.name}, {model.dtype}; E1 = {eager * 1e3:.1f} ms")
    print(" | ".join(["rows", *(f"{name:>8} |   / T(1) |     / E1" for name in runtimes)]))
    for count in rows:
        cells = []
        for name in runtimes:
            single, middle = median(times[name, 1]), median(times[name, count])
            cells.append(f"{middle * 1e3:8.1f} | {middle / single:8.2f} | {middle / eager:8.2f}")
        print(" | ".join([f"{count:4}", *cells]))


class Wrong(Null):
    """Predicts much and is never right: token 0 does not occur in text."""

    def propose(self, budget: int) -> Draft:
        return chain([0] * budget, [0.9] * budget) if budget else empty()


def decoding(model: LanguageModel, prompts: list[list[int]], length: int) -> None:
    runtime = choose_runtime(model)
    target = make_target(model, runtime)
    curve = measurement.known(target, model, runtime)
    kinds: dict[str, tuple[Any, Budget]] = {
        "none": (lambda: Null(Null.Options()), Fixed(0)),
        "pld, auto": (lambda: PromptLookup(PromptLookup.Options()), Adaptive(curve)),
        "wrong, auto": (lambda: Wrong(Null.Options()), Adaptive(curve)),
        "wrong, 8": (lambda: Wrong(Null.Options()), Fixed(8)),
    }
    seconds: dict[str, list[float]] = defaultdict(list)
    outside: dict[str, list[float]] = defaultdict(list)
    total: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for number, prompt in enumerate([prompts[0], *prompts]):
        began = time.perf_counter()
        expected = generate_plain(model, prompt, length)
        spent = {"generate": time.perf_counter() - began}
        names = list(kinds)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            make, budget = kinds[name]
            time.sleep(0.05)  # as above
            target.forget()  # so that no prompt profits from the one before
            began = time.perf_counter()
            steps: list[Step] = list(
                decode_one(
                    target, make(), make_verifier("greedy", Sampling()), prompt, max_new_tokens=length, budget=budget,
                    stop_tokens=model.stop_tokens,
                )
            )  # fmt: skip
            spent[name] = time.perf_counter() - began
            text = [token for step in steps for token in step.tokens]
            if number:
                total[name][0] += text == expected
                total[name][1] += len(steps)
                total[name][2] += sum(len(step.draft) for step in steps)
                outside[name].append((spent[name] - sum(step.forward_seconds for step in steps)) / len(steps))
        if number:  # the first round warms everything up
            for name, took in spent.items():
                seconds[name].append(took / len(expected))
    print(f"\n{len(prompts)} prompts, at most {length} tokens")
    print("method      | tokens/s | x generate |  x none | drafted/step | outside the pass | same text")
    for name, each in seconds.items():
        against = [median(b / a for a, b in zip(each, seconds[other], strict=True)) for other in ("generate", "none")]
        same, steps_taken, drafted = total.get(name, [len(prompts), 0, 0])
        share = f"{median(outside[name]) * 1e3:.3f} ms/step" if outside[name] else "–"
        print(
            f"{name:11} | {1 / median(each):8.1f} | {against[0]:10.2f} | {against[1]:7.3f} | "
            f"{drafted / max(1, steps_taken):12.2f} | {share:>16} | {same}/{len(prompts)}"
        )


def memory(options: argparse.Namespace) -> None:
    """Peak resident memory of `specds decode` in a process of its own."""
    first = next(row for row in read_prompts([options.prompts]) if isinstance(row, Prompt))
    argv = ["decode", "-p", "-", "-q", "--max-new-tokens", "64", "--model", options.model, "--device", options.device]
    command = [sys.executable, "-c", "from specds.cli.main import run; run()", *argv, "--dtype", options.dtype]
    text = " ".join(first.turns[0][-1]["content"].split())
    subprocess.run(command, input=text, text=True, check=True, stdout=subprocess.DEVNULL)
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    print(f"peak memory of `specds decode` on one prompt: {peak / 1e6:.0f} MB")
    if Path(options.model).is_dir():
        weights = sum(path.stat().st_size for path in Path(options.model).glob("*.safetensors"))
        print(f"weights on disk: {weights / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
