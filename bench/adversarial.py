"""Make adversarial datastores out of one that helps, to measure what they cost.

    python bench/adversarial.py code.ds --foreign foreign.txt --output adversarial
    specds bench -p todo.jsonl --methods none,auto,auto:adversarial/random.ds,auto:adversarial/foreign.ds -o r

`random` holds random tokens, `backwards` the store's responses from their end, `near` its responses with every fourth
token another, and `foreign` a text, of another language say. Each has as many tokens as asked for at most, and both
indexes.
"""

from __future__ import annotations

import argparse
import dataclasses
import shutil
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from specds.datastore.build_dense import DenseOptions, build_dense
from specds.datastore.build_suffix import build_suffix
from specds.datastore.corpus import Document, add_documents, read_documents
from specds.datastore.creation import create_store
from specds.datastore.store import open_store
from specds.model import load_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path)
    parser.add_argument("--foreign", type=Path, help="a text file")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=40_000, help="response tokens of each")
    parser.add_argument("--model", default="smollm2-135m")
    options = parser.parse_args()
    model = load_model(options.model)
    random, vocabulary = np.random.default_rng(0), int(model.config.vocab_size)
    most = options.tokens // 100
    documents = list(islice(read_documents(open_store(options.store, model.tokenizer)), most))

    def altered(tokens: NDArray[np.int32]) -> NDArray[np.int32]:
        changed = tokens.copy()
        changed[3::4] = random.integers(0, vocabulary, len(changed[3::4]))
        return changed

    alterations: dict[str, Callable[[NDArray[np.int32]], NDArray[np.int32]]] = {
        "random": lambda tokens: random.integers(0, vocabulary, len(tokens)).astype(np.int32),
        "backwards": lambda tokens: tokens[::-1].copy(),
        "near": altered,
    }
    adversarial = {
        name: [dataclasses.replace(document, source=name, response=alter(document.response)) for document in documents]
        for name, alter in alterations.items()
    }
    if options.foreign:
        text = np.array(model.tokenizer.encode(options.foreign.read_text()), np.int32)
        pieces = [text[start : start + 100] for start in range(0, min(len(text), options.tokens), 100)]
        nothing = np.empty(0, np.int32)
        adversarial["foreign"] = [Document(f"foreign-{n}", "foreign", nothing, piece) for n, piece in enumerate(pieces)]
    for name, altered_documents in adversarial.items():
        path = options.output / f"{name}.ds"
        shutil.rmtree(path, ignore_errors=True)
        store = create_store(path, model.tokenizer)
        with store.writer() as writer:
            add_documents(writer, altered_documents, origin="ingested")
        build_suffix(open_store(path))
        build_dense(open_store(path), model, DenseOptions())
        tokens = sum(len(document.response) for document in altered_documents)
        print(f"{path}: {len(altered_documents)} documents, {tokens:,} tokens")


if __name__ == "__main__":
    main()
