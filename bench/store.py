"""Time what a datastore costs: building its indexes, adding to them, opening them, and the bytes of it all.

    python bench/store.py --tokens 100000000 --memory 2GB --work big.ds
    python bench/store.py --dense 1000000
    python bench/store.py --embed 16384

Documents are of synthetic tokens (see bench/suffix.py). Commands run in processes of their own, so that their peak
memory is theirs. `--dense` compares a lookup with the ANN library's own call, on random keys; `--embed` compares the
embedding of a corpus with the model's bare forward pass over the same batches.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from suffix import VOCABULARY, synthetic

from specds.datastore.corpus import Document, add_documents
from specds.datastore.creation import make_store
from specds.datastore.dense import DenseIndex
from specds.datastore.dense_segment import Keys, write_segment
from specds.datastore.manifest import Identity, Manifest
from specds.datastore.normalizer import Normalizer
from specds.datastore.store import Store, open_store

_CHILD = """
import json, pathlib, sys, time
from specds.cli.main import app
import specds.datastore.build_suffix
def peak():
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak until here was the parent's
base, began, before = peak(), time.perf_counter(), time.process_time()
app(sys.argv[1:], standalone_mode=False)
seconds, used = time.perf_counter() - began, time.process_time() - before
print(json.dumps({"seconds": seconds, "cpu": used, "base": base, "peak": peak()}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, help="tokens of the corpus")
    parser.add_argument("--added", type=int, default=1_000_000, help="tokens added afterwards")
    parser.add_argument("--memory", help="what build-suffix may take")
    parser.add_argument("--work", type=Path, help="keep the store here, and go on with it if it is there")
    parser.add_argument("--dense", type=int, help="keys of a dense index to look up in")
    parser.add_argument("--embed", type=int, help="tokens to embed")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        if options.tokens:
            grow(options.work or Path(directory) / "big.ds", options.tokens, options.added, options.memory)
        if options.dense:
            look_up(Path(directory) / "dense.ds", options.dense)
        if options.embed:
            embed(options.embed)


def fill(path: Path, tokens: int, seed: int) -> None:
    """Documents of about 500 tokens; a new store if there is none."""
    if not (path / "manifest.json").exists():
        make_store(path, Manifest(Identity("synthetic", "0" * 64), VOCABULARY))
    text = synthetic(tokens, seed).astype(np.int32)
    with open_store(path).writer() as writer:
        rows: list[Document] = []
        for start in range(0, tokens, 500):
            part = text[start : start + 500]
            part = part[part < VOCABULARY]
            rows.append(Document(f"{seed}-{start}", f"source-{seed}", part[:100], part[100:]))
            if len(rows) == 65_536 or start + 500 >= tokens:
                add_documents(writer, rows, origin="ingested")
                rows = []


def command(*argv: object) -> dict[str, float]:
    done = subprocess.run([sys.executable, "-c", _CHILD, *map(str, argv)], stdout=subprocess.PIPE, check=True)
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def grow(path: Path, tokens: int, added: int, memory: str | None) -> None:
    limit = ["--memory", memory] if memory else []
    if not (path / "manifest.json").exists():
        began = time.perf_counter()
        fill(path, tokens, 0)
        print(f"corpus written in {time.perf_counter() - began:.1f} s")
    corpus = open_store(path).manifest.tokens
    # Compiled code comes from the cache the second time.
    warm = path.with_name("warm.ds")
    shutil.rmtree(warm, ignore_errors=True)
    fill(warm, 200_000, 1)
    command("build-suffix", warm)
    shutil.rmtree(warm)
    if not open_store(path).manifest.suffix:
        built = command("build-suffix", path, *limit)
        each = (built["peak"] - built["base"]) * 1024 / corpus
        print(
            f"build-suffix over {corpus:,} tokens: {built['seconds']:.1f} s ({built['cpu']:.1f} of CPU), peak "
            f"{built['peak'] / 1e6:.2f} GB, {each:.1f} bytes a token above {built['base'] / 1e3:.0f} MB"
        )
        print(f"  {describe(open_store(path))}")
        full = built["seconds"]
        fill(path, added, 7)
        built = command("build-suffix", path, *limit)
        print(f"{added:,} more: {built['seconds']:.2f} s, {built['seconds'] / full:.2%} of the full build")
        print(f"  {describe(open_store(path))}")
    opened, indexed = [], []
    for _ in range(20):
        began = time.perf_counter()
        store = open_store(path)
        between = time.perf_counter()
        store.suffix_index()
        indexed.append(time.perf_counter() - between)
        opened.append(between - began)
    whole = statistics.median(opening + indexing for opening, indexing in zip(opened, indexed, strict=True))
    print(f"opening: {whole * 1e3:.1f} ms, of which the index {statistics.median(indexed) * 1e3:.2f}")
    check_edges(store)


def describe(store: Store) -> str:
    manifest = store.manifest
    files = [manifest.files[name] for segment in manifest.suffix for name in manifest.files_of(segment)]
    each = sum(record.size for record in files) / manifest.tokens
    return f"{len(manifest.corpus)} corpus files, {len(manifest.suffix)} segments, {each:.2f} bytes a token"


def check_edges(store: Store) -> None:
    """The first and last tokens of every segment's first and last documents are found where they stand."""
    index = store.suffix_index()
    matches = 0
    for number, tokens in enumerate(index.parts.tokens):
        stops = np.flatnonzero(tokens[:2_000] == np.iinfo(tokens.dtype).max)
        ends = np.flatnonzero(tokens[-2_000:] == np.iinfo(tokens.dtype).max) + len(tokens) - 2_000
        for start, stop in ((0, stops[0]), (ends[-2] + 1, ends[-1])):
            match = index.match(tokens[stop - 17 : stop - 1].astype(np.int64))
            segments, positions = index.places(match, 1_000_000)
            assert match.length == 16
            assert (stop - 17) in positions[segments == number], (number, start, stop)
            drafted, parents, _ = index.continuations(match, 1, 64)
            assert int(tokens[stop - 1]) in drafted[parents == -1]
            matches += 1
    print(f"edges: {matches} documents at the ends of {len(index.parts.tokens)} segments found where they stand")


def look_up(path: Path, keys: int) -> None:
    rng = np.random.default_rng(0)
    dims, width = 64, 576
    centres = rng.standard_normal((keys // 200, dims))
    rows = (centres[rng.integers(0, len(centres), keys)] + rng.standard_normal((keys, dims))).astype(np.float32)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    components = np.linalg.qr(rng.standard_normal((width, dims)))[0].T.astype(np.float32)
    normalizer = Normalizer(np.zeros(width, np.float32), np.ones(width, np.float32), components, 1.0, keys)
    make_store(path, Manifest(Identity("synthetic", "0" * 64), VOCABULARY))
    tokens = synthetic(keys + 1, 0)
    about = {"index": "scann", "kept": "float32", "leaves": None, "search": 250}
    for kind in ("scann", "faiss"):
        with open_store(path).writer() as writer:
            part = Keys([], keys, rows, np.arange(keys), tokens)
            began = time.perf_counter()
            segment = write_segment(
                writer, [part], normalizer, Identity("m", "0"), about | {"index": kind}, lambda *stage: None
            )
            seconds = time.perf_counter() - began
            writer.change(dense=[segment])
        store = open_store(path)
        stored = sum(store.manifest.files[name].size for name in store.manifest.files_of(segment)) / keys
        index = DenseIndex.open(path, [segment])
        states = rows[rng.integers(0, keys, 2_000)] + 0.05 * rng.standard_normal((2_000, dims))
        compare(kind, index, list((states @ components).astype(np.float32)))
        print(
            f"  {keys:,} keys: built and measured in {seconds:.0f} s, {stored:.0f} bytes a key, "
            f"recall@10 {segment.quality['recall_at_10']}"
        )


def compare(kind: str, index: DenseIndex, states: list[np.ndarray]) -> None:
    bare, whole = interleaved([library_call(index, kind), lambda state: index.search(state, 100)], states)
    print(f"{kind}: a lookup {whole:.0f} µs, the library's own call {bare:.0f}: {whole / bare:.2f} ×")


def library_call(index: DenseIndex, kind: str) -> Callable[[np.ndarray], object]:
    """The library's search itself, on a key that is there already."""
    searcher = index.parts[0].searcher
    keys: dict[int, np.ndarray] = {}

    def call(state: np.ndarray) -> object:
        key = keys.get(id(state))
        if key is None:
            key = keys[id(state)] = index.parts[0].normalizer.key(state)
        if kind == "scann":
            return searcher._searcher.search(key, final_num_neighbors=100)  # type: ignore[attr-defined]
        return searcher._index.search(key[None], 100)  # type: ignore[attr-defined]

    return call


def interleaved(calls: list[Callable[[np.ndarray], object]], queries: list[np.ndarray]) -> list[float]:
    """Median microseconds of each call, one after the other on each query; a first round does not count."""
    times: list[list[float]] = [[] for _ in calls]
    for counted in (False, True):
        for query in queries:
            for place, call in enumerate(calls):
                began = time.perf_counter_ns()
                call(query)
                if counted:
                    times[place].append((time.perf_counter_ns() - began) / 1e3)
    return [statistics.median(times_of) for times_of in times]


def embed(tokens: int) -> None:
    import torch

    from specds.datastore.embedding import embed as run
    from specds.model import load_model

    model = load_model("smollm2-135m", device="cpu")
    rng = np.random.default_rng(0)
    text = synthetic(tokens, 0)
    cuts = np.sort(rng.choice(tokens, tokens // 300, replace=False))
    parts = [part[part < VOCABULARY] for part in np.split(text, cuts)]
    documents = sorted(((n, part) for n, part in enumerate(parts) if len(part)), key=lambda pair: -len(pair[1]))
    normalizer = Normalizer(
        np.zeros(576, np.float32), np.ones(576, np.float32), np.eye(64, 576, dtype=np.float32), 1.0, 1
    )
    seen: list[torch.Tensor] = []
    decoder = model.decoder

    def ours() -> None:
        for _, states in run(model, documents, 2_048):
            normalizer.keys(states)

    handle = decoder.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["input_ids"]), with_kwargs=True
    )
    ours()
    handle.remove()
    batches = list(seen)

    @torch.inference_mode()
    def bare() -> None:
        for batch in batches:
            decoder(input_ids=batch, use_cache=False)

    ratios = []
    for _ in range(4):
        began = time.perf_counter()
        bare()
        between = time.perf_counter()
        ours()
        ratios.append((between - began) / (time.perf_counter() - between))
    print(
        f"embedding {sum(len(part) for _, part in documents):,} tokens in {len(batches)} batches: "
        f"{statistics.median(ratios):.3f} of the bare forward pass's speed ({os.cpu_count()} cores)"
    )


if __name__ == "__main__":
    main()
