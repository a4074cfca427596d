"""The PyPI package dejavuu, on its transformers backend, as a peer of `specds bench`.

    specds bench -p F.jsonl -o R --peer 'dejavuu=python3.13 bench/peer_dejavuu.py --model DIR --method sam_decoding'

Stands alone: that Python has dejavuu and torch, and needs no specds. DIR is a model as transformers saves it (of the
embedded one, specds keeps such a directory in its cache; transformers 4 wants `"rope_theta": 100000` in a copy of its
config.json, or the texts are another model's). The model stays loaded; each answer has a drafter of its own.
"""

import argparse
import json
import os
import sys
import time

import torch
from dejavuu.core.engine import generate
from dejavuu.decoders.hf import HFBackend
from dejavuu.drafters import make_drafter


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--method", default="token_recycling")
    parser.add_argument("--tree", action="store_true")
    parser.add_argument("--width", type=int, default=2)
    parser.add_argument("--budget", type=int, default=8)
    parser.add_argument("--attention", default="eager")
    options = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is not an answer
    torch.set_num_threads(os.cpu_count() or 1)
    model = HFBackend(options.model, device="cpu", dtype="float32", attn_implementation=options.attention)
    # One stop token is all that dejavuu knows; what it writes behind another one is cut by the bench.
    stop = model._model.config.eos_token_id
    for line in sys.stdin:
        request = json.loads(line)
        began = time.perf_counter()
        result = generate(
            model,
            request["tokens"],
            request["max_new_tokens"],
            make_drafter(options.method),
            options.budget,
            stop,
            tree=options.tree,
            width=options.width,
        )
        record = {
            "id": request["id"],
            "tokens": list(map(int, result.tokens)),
            "seconds": time.perf_counter() - began,
            "passes": result.steps + 1,  # it does not count the prompt's
            "lossless": True,
        }
        answers.write(json.dumps(record) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
