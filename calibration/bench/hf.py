"""transformers' own ways of generating, as a peer: `python -m specds.calibration.bench.hf --model M`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from time import perf_counter
from typing import Any

# `generate`'s own default of tokens that a lookup copies.
LOOKUP = 10
WAYS = ("hf-generate", "hf-prompt-lookup", "hf-assisted")


def main() -> None:
    """Answer requests (see `Worker`) until stdin ends."""
    from specds.model import LanguageModel, load_model
    from specds.reference import generate_plain

    parser = argparse.ArgumentParser()
    for name in ("model", "revision", "dtype", "device", "assistant"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--trust-remote-code", action="store_true")
    options = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is not an answer

    def load(name: str, revision: str | None = None) -> LanguageModel:
        return load_model(
            name,
            dtype=options.dtype,
            device=options.device,
            threads=options.threads,
            revision=revision,
            trust_remote_code=options.trust_remote_code,
        )

    model = load(options.model, options.revision)
    more: dict[str, dict[str, Any]] = {"hf-generate": {}, "hf-prompt-lookup": {"prompt_lookup_num_tokens": LOOKUP}}
    if options.assistant:
        more["hf-assisted"] = {"assistant_model": load(options.assistant).network}
    passes = 0

    def count(*_: object) -> None:
        nonlocal passes
        passes += 1

    model.network.register_forward_hook(count)
    for line in sys.stdin:
        request = json.loads(line)
        passes, record = 0, {"id": request["id"]}
        began = perf_counter()
        try:
            tokens = generate_plain(model, request["tokens"], request["max_new_tokens"], **more[request["peer"]])
            record |= {"tokens": tokens, "seconds": perf_counter() - began, "passes": passes}
        except Exception as error:  # whatever a model's own code raises is this request's answer
            record["error"] = f"{type(error).__name__}: {error}"
        answers.write(json.dumps(record) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
