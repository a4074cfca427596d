"""Check every token that a lossy verifier accepted and a strict one would not, with logits computed anew.

    specds decode -p F.jsonl -d pld --verifier respec --trace T.parquet > A.jsonl
    python bench/check_lossy.py --trace T.parquet --prompts F.jsonl --k 3 --tau 3 --matches 3
    python bench/check_lossy.py --trace T.parquet --prompts F.jsonl --log-ratio -4.605 --count 6    # CSD

Shares no code with the verifiers. ReSpec (Eq. 6 and 7): among the k likeliest, within tau of the likeliest, followed by
at least so many greedy matches. CSD (Algorithm 1, Eq. 3): the logit ratio at least log tau, the count at least lambda.
Whatever else was accepted must be what the model picks greedily.
"""

from __future__ import annotations

import argparse
from typing import Any

import pyarrow.parquet as pq
import torch

from specds.model import load_model
from specds.reading.conversation import Conversation
from specds.reading.prompts import Prompt, read_prompts

# Float sums of another program may differ by so much, in logits.
_SLACK = 2e-3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", required=True)
    parser.add_argument("--prompts", nargs="+", required=True)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--k", type=int)
    parser.add_argument("--tau", type=float)
    parser.add_argument("--matches", type=int, default=0)
    parser.add_argument("--log-ratio", type=float)
    parser.add_argument("--count", type=int, default=0)
    options = parser.parse_args()
    model = load_model(options.model)
    prompts = {row.id: row for row in read_prompts(options.prompts) if isinstance(row, Prompt)}
    rows = [row for row in pq.read_table(options.trace).to_pylist() if row["turn"] == 0]
    rescued = accepted = wrong = 0
    for name in dict.fromkeys(row["prompt"] for row in rows):
        steps = [row for row in rows if row["prompt"] == name]
        tokens = Conversation(prompts[name]).tokens(model.tokenizer)
        text = tokens + [token for row in steps for token in row["tokens"]]
        with torch.inference_mode():
            logits = model.network(torch.tensor([text]), use_cache=False).logits[0].float()
        for row in steps:
            rescued += len(row["rescue_nodes"])
            accepted += row["accepted"]
            wrong += sum(complaints(row, logits, options))
    print(f"{accepted} drafted tokens accepted, {rescued} of them lossily; {wrong} break a rule")
    raise SystemExit(wrong > 0)


def complaints(row: dict[str, Any], logits: torch.Tensor, options: argparse.Namespace) -> list[bool]:
    """For each accepted token of a step whether it should not have been."""
    problems = []
    path = row["path"][: row["accepted"]]
    picks = [
        bool(logits[row["position"] + i - 1].max() - logits[row["position"] + i - 1, token] <= _SLACK)
        for i, token in enumerate(row["tokens"][: len(path)])
    ]
    for index, node in enumerate(path):
        line, token = logits[row["position"] + index - 1], row["draft_tokens"][node]
        if node not in row["rescue_nodes"]:
            problems.append(not picks[index])
            continue
        place = row["rescue_nodes"].index(node)
        ratio = float(line[token] - line[row["rescue_picked"][place]])
        bad = abs(ratio - row["rescue_log_ratios"][place]) > _SLACK
        if options.k is not None:
            bad |= int((line > line[token] + _SLACK).sum()) >= options.k
        if options.tau is not None:
            bad |= float(line.max() - line[token]) > options.tau + _SLACK
        if options.log_ratio is not None:
            bad |= ratio < options.log_ratio - _SLACK
        bad |= row["rescue_counts"][place] < options.count
        # The step may have been cut at a stop token or at the length asked for.
        follow = [path[i] not in row["rescue_nodes"] and picks[i] for i in range(index + 1, len(path))]
        run = next((i for i, good in enumerate(follow) if not good), len(follow))
        cut = len(path) < len(row["path"])
        bad |= run < options.matches and not cut
        if bad:
            print(f"{row['prompt']} step {row['step']} node {node}: ratio {ratio:.4f}, followed by {run}")
        problems.append(bad)
    return problems


if __name__ == "__main__":
    main()
