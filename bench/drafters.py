"""Compare drafters on the same prompts: MAT, acceptance, tokens/s, and speed over plain decoding and `generate`.

    python bench/drafters.py --prompts F.jsonl G.jsonl --limit 24 --max-new-tokens 128 \
        --store id=own.ds --store ood=books.ds --methods none,pld,rest:id,rest:ood,dresd:id,dresd:ood

A method is a drafter, `:store` for one that retrieves, `@budget` for another budget than --budget,
`?name=value&…` for its options, and `!verifier?name=value&…`: `dresd:id@32?drafts=3&length=20!respec?tau=2`;
`model?draft_model=skip:3+5-8` drafts with the target's own layers but 3 and 5 to 8. Methods are interleaved by prompt,
in an order that rotates, after a warm-up; the texts are compared with plain decoding's, token for token. Prints a table
(drafting: the median over steps of drafting time over the pass's) and writes one JSON line a (prompt, method) to --out.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from pathlib import Path
from statistics import median
from typing import Any

from specds.datastore.prompts import Prompt, read_prompts
from specds.datastore.store import open_store
from specds.decode.engine import Engine
from specds.model import load_model
from specds.reference import LogProbabilities, generate_plain
from specds.sampling import Sampling

# transformers' own ways of generating, timed beside ours with --generate.
REFERENCES: dict[str, dict[str, int]] = {"generate": {}, "generate, lookup": {"prompt_lookup_num_tokens": 10}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", nargs="+", required=True, metavar="FILE[=LIMIT]")
    parser.add_argument("--limit", type=int, default=20, help="prompts taken of each group, spread evenly over it")
    parser.add_argument("--group", default="", help="a field of the rows that groups them; default: by file")
    parser.add_argument("--turns", type=int, default=1, help="turns answered of each prompt")
    parser.add_argument("--quality", action="store_true", help="the texts' mean log-probability, by transformers' pass")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--store", action="append", default=[], metavar="NAME=PATH")
    parser.add_argument("--methods", default="none,pld")
    parser.add_argument("--budget", type=int, help="default: as many as pay for themselves")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--generate", action="store_true", help="also time transformers' own generate (greedy only)")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()

    model = load_model(options.model, device=options.device, dtype=options.dtype)
    stores = dict(pair.split("=", 1) for pair in options.store)
    sampling = Sampling(options.temperature, top_p=options.top_p)
    engines = {name: engine(model, name, stores, options.budget, sampling) for name in options.methods.split(",")}
    prompts = [one for file in options.prompts for one in spread(file, options.limit, options.group, options.turns)]
    rows: list[dict[str, Any]] = []
    judge = LogProbabilities(model) if options.quality else None
    methods: list[str] = [*engines, *(REFERENCES if options.generate else [])]
    for method in methods:
        measure(model, engines, method, prompts[0][1], 16, None)
    for number, (file, prompt) in enumerate(prompts):
        for method in methods[number % len(methods) :] + methods[: number % len(methods)]:
            row = {"file": file, "prompt": prompt.id, "method": method}
            rows.append(row | measure(model, engines, method, prompt, options.max_new_tokens, judge))
        print(f"\r{number + 1} of {len(prompts)} prompts", end="", flush=True)
    print()
    if options.out:
        options.out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for file in [*dict.fromkeys(file for file, _ in prompts), "all"]:
        table(file, [row for row in rows if file in (row["file"], "all")], methods)


def engine(model: Any, method: str, stores: dict[str, str], budget: int | None, sampling: Sampling) -> Engine:
    drafting, _, judging = method.partition("!")
    name, _, settings = drafting.partition("?")
    name, _, own = name.partition("@")
    drafter, _, store = name.partition(":")
    verifier, _, tolerance = judging.partition("?")
    chosen = pairs(settings)
    draft_model = chosen.pop("draft_model", "").replace("+", ",") or None  # commas stand between methods
    return Engine(
        model,
        drafter,
        chosen,
        [open_store(stores[store], model.tokenizer)] if store else [],
        verifier or "auto",
        sampling,
        int(own) if own else budget,
        verifier_options=pairs(tolerance),
        draft_model=draft_model,
    )


def pairs(settings: str) -> dict[str, str]:
    return dict(pair.split("=", 1) for pair in settings.split("&") if pair)


def spread(file: str, limit: int, group: str = "", turns: int = 1) -> list[tuple[str, Prompt]]:
    """Prompts of each group at even distances over a file (`F.jsonl=16`: with a limit of its own), and its name."""
    file, _, own = file.partition("=")
    limit = int(own or limit)
    names: dict[str, str] = {}
    if group:
        rows = [json.loads(line) for line in Path(file).read_text().splitlines() if line.strip()]
        names = {str(row["id"]): str(row[group]) for row in rows}
    groups: dict[str, list[Prompt]] = {}
    for row in read_prompts([file]):
        if isinstance(row, Prompt):
            groups.setdefault(names.get(row.id, Path(file).stem), []).append(row)
    chosen = []
    for name, every in groups.items():
        stride = max(1, len(every) // limit)
        some = itertools.islice(every[::stride], limit)
        chosen += [(name, Prompt(row.id, row.turns[:turns], row.raw)) for row in some]
    return chosen


def measure(
    model: Any, engines: dict[str, Engine], method: str, prompt: Prompt, length: int, judge: LogProbabilities | None
) -> dict[str, Any]:
    time.sleep(0.05)  # torch's threads go on spinning for a while after `generate`
    began = time.perf_counter()
    if method in REFERENCES:
        text: list[int] = []
        history: list[Any] = []
        for messages in prompt.turns:
            history += messages
            tokens = model.tokenizer.prompt(history[0]["content"]) if prompt.raw else model.tokenizer.chat(history)
            written = generate_plain(model, tokens, length, **REFERENCES[method])
            history.append({"role": "assistant", "content": model.tokenizer.decode(written)})
            text += written
        return {"text": text, "seconds": time.perf_counter() - began, "steps": len(text), "drafted": 0, "accepted": 0}
    answer = engines[method].answer(prompt, length)
    seconds = time.perf_counter() - began
    counters = answer.counters
    steps = [step for turn in answer.turns for step in turn.steps if step.index]
    return {
        "text": [token for turn in answer.turns for token in turn.tokens],
        "log_p": sum(judge.of(turn.prompt, turn.tokens) for turn in answer.turns) if judge else 0.0,
        "rescues": sum(len(step.rescues) for step in steps),
        "share": sorted(step.draft_seconds / max(step.forward_seconds, 1e-9) for step in steps),
        "seconds": seconds,
        "steps": counters.steps,
        "drafted": counters.drafted,
        "accepted": counters.accepted,
        "path": counters.path_drafted,
        "draft_seconds": counters.draft_seconds,
    }


def table(title: str, rows: list[dict[str, Any]], methods: list[str]) -> None:
    by = {method: {(row["file"], row["prompt"]): row for row in rows if row["method"] == method} for method in methods}
    base = methods[0]
    print(f"\n{title}: {len(by[base])} prompts, {sum(len(row['text']) for row in by[base].values())} tokens")
    head = ("method", "MAT", "steps", "accept path", "accept node", "tokens/s", f"x {base}", "x generate", "drafting")
    print(" | ".join(f"{name:>11}" if index else f"{name:40}" for index, name in enumerate((*head, "same", "log p"))))
    for method in methods:
        own = by[method].values()
        total = {
            key: sum(row.get(key, 0) for row in own)
            for key in ("steps", "drafted", "accepted", "path", "seconds", "log_p")
        }
        tokens = sum(len(row["text"]) for row in own)

        def speedup(other: str, method: str = method) -> str:
            if other not in by:
                return "–"
            pairs = [(by[other][prompt], row) for prompt, row in by[method].items()]
            each = [(len(b["text"]) / b["seconds"]) / (len(a["text"]) / a["seconds"]) for a, b in pairs if a["text"]]
            return f"{median(each):.2f}"

        same = sum(row["text"] == by[base][prompt]["text"] for prompt, row in by[method].items())
        shares = [one for row in own for one in row.get("share", [])]
        cells = (
            f"{tokens / total['steps']:.2f}",
            f"{total['steps']}",
            f"{total['accepted'] / total['path']:.1%}" if total["path"] else "–",
            f"{total['accepted'] / total['drafted']:.1%}" if total["drafted"] else "–",
            f"{tokens / total['seconds']:.1f}",
            speedup(base),
            speedup("generate"),
            f"{median(shares):.2%}" if shares else "–",
            f"{same}/{len(by[base])}",
            f"{total['log_p'] / tokens:.3f}" if total["log_p"] else "–",
        )
        print(" | ".join([f"{method:40}", *(f"{cell:>11}" for cell in cells)]))


if __name__ == "__main__":
    main()
