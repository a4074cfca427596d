"""Time the suffix index: building it, and looking things up.

    python bench/suffix.py --tokens 20000000
    python bench/suffix.py --tokens 20000000 --text corpus/*.py
    python bench/suffix.py --tokens 20000000 --parts 1 8 8:1000
    python bench/suffix.py --tokens 20000000 --rest ~/rest/bin/python

Contexts come from text that is not in the index: the last documents are held out. With --rest, REST's own engine builds
and searches an index of the same text; `draftretriever` (DraftRetriever/wheels of its repository) must be installed in
that Python. Its build writes the index too; so does ours, where the two are compared.
"""

import argparse
import json
import re
import statistics
import subprocess
import tempfile
import time
import zlib
from pathlib import Path

import numpy as np

from specds.datastore.continuations import continuation_tree
from specds.datastore.suffix_array import build_suffix_array
from specds.datastore.suffix_match import longest_match
from specds.datastore.suffix_parts import Parts, separator

VOCABULARY = 49_152


def synthetic(n: int, seed: int) -> np.ndarray:
    """Zipf tokens, two fifths of them in passages copied from earlier ones, in documents of about 500 tokens."""
    rng = np.random.default_rng(seed)
    weights = np.cumsum(1 / np.arange(1, VOCABULARY + 1) ** 1.1)
    ids = rng.permutation(VOCABULARY)
    text = ids[np.searchsorted(weights, rng.random(n) * weights[-1])].astype(np.uint16)
    for target in range(1000, n - 20, 50):
        source = int(rng.integers(0, target - 20))
        text[target : target + 20] = text[source : source + 20]
    text[np.flatnonzero(rng.random(n) < 1 / 500)] = separator(np.uint16)
    return text


def tokenised(paths: list[Path], n: int) -> np.ndarray:
    """Words and single marks as hashes: not a real tokenizer's ids, but repeated as real text is."""
    parts: list[np.ndarray] = []
    have = 0
    for path in paths:
        words = re.findall(rb" ?\w+|\s+|[^\w\s]", path.read_bytes())
        ids = np.fromiter((zlib.crc32(word) % VOCABULARY for word in words), np.uint16, len(words))
        parts += [ids, np.array([separator(np.uint16)], np.uint16)]
        have += ids.size + 1
        if have >= n:
            break
    return np.concatenate(parts)[:n]


def adversarial(n: int) -> dict[str, np.ndarray]:
    return {
        "one token": np.full(n, 7, np.uint16),
        "period 3": np.tile(np.array([5, 2, 9], np.uint16), n // 3 + 1)[:n],
        "four random tokens": np.random.default_rng(0).integers(0, 4, n).astype(np.uint16),
    }


def time_build(tokens: np.ndarray) -> tuple[np.ndarray, float]:
    started = time.perf_counter()
    sa = build_suffix_array(tokens)
    return sa, time.perf_counter() - started


def quantiles(microseconds: list[float]) -> str:
    p95 = statistics.quantiles(microseconds, n=20)[-1]
    return f"{statistics.median(microseconds):9.1f} {p95:9.1f} {max(microseconds):9.1f}"


def divided(tokens: np.ndarray, sa: np.ndarray, division: str) -> Parts:
    """The text cut at ends of documents: "8" is eight equal parts, "8:1000" one and seven a thousandth of it each."""
    count, _, share = division.partition(":")
    small = tokens.size // int(share or count)
    cuts = [tokens.size - small * part for part in range(int(count) - 1, 0, -1)]
    ends = np.append(np.flatnonzero(tokens == separator(tokens.dtype)) + 1, tokens.size)
    pieces = np.split(tokens, ends[np.searchsorted(ends, cuts)])
    return Parts([(piece, sa if len(pieces) == 1 else build_suffix_array(piece)) for piece in pieces])


def draw_contexts(held_out: np.ndarray, queries: int) -> np.ndarray:
    ends = np.random.default_rng(0).integers(16, held_out.size, queries)
    return np.stack([held_out[end - 16 : end] for end in ends])


def time_lookups(parts: Parts, contexts: np.ndarray) -> list[float]:
    matches: list[float] = []
    trees: list[float] = []
    lengths: list[int] = []
    widths: list[int] = []
    nodes: list[int] = []
    for context in contexts.astype(np.int64):
        started = time.perf_counter_ns()
        length, ranges = longest_match(parts, context)
        between = time.perf_counter_ns()
        tree = continuation_tree(parts, length, ranges)
        ended = time.perf_counter_ns()
        matches.append((between - started) / 1000)
        trees.append((ended - between) / 1000)
        lengths.append(length)
        widths.append(int(np.diff(ranges).sum()))
        nodes.append(tree[0].size)
    totals = [match + tree for match, tree in zip(matches, trees, strict=True)]
    print(
        f"\nlookups ({len(contexts):,})          median       p95       max   microseconds, parts: {len(parts.tokens)}"
    )
    print(f"  longest_match         {quantiles(matches)}")
    print(f"  continuation_tree     {quantiles(trees)}")
    print(f"  both                  {quantiles(totals)}")
    print(
        f"  match length {np.mean(lengths):.2f}, occurrences median {np.median(widths):.0f} "
        f"p95 {np.quantile(widths, 0.95):.0f}, nodes {np.mean(nodes):.1f}"
    )
    return totals


def compare_with_rest(python: str, tokens: np.ndarray, contexts: np.ndarray, repeats: int) -> None:
    """Builds and lookups of both engines in turns, each build with its index written."""
    ours: list[float] = []
    theirs: list[float] = []
    with tempfile.TemporaryDirectory() as directory:
        text, queries, index = (Path(directory) / name for name in ("text", "contexts", "index"))
        tokens.tofile(text)
        contexts.tofile(queries)
        for _ in range(repeats):
            command = [python, str(Path(__file__).parent / "rest_engine.py"), str(text), str(queries)]
            answer = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            theirs.append(answer["seconds"])
            started = time.perf_counter()
            sa = build_suffix_array(tokens)
            with index.open("wb") as file:
                tokens.tofile(file)
                sa.tofile(file)
            ours.append(time.perf_counter() - started)
        print("\nREST's engine")
        lookups = time_lookups(Parts([(tokens, sa)]), contexts)
        print(f"  REST, both            {quantiles(answer['lookups'])}, nodes {answer['nodes']:.1f}")
    p95 = [statistics.quantiles(times, n=20)[-1] for times in (lookups, answer["lookups"])]
    medians = [statistics.median(times) for times in (lookups, answer["lookups"], ours, theirs)]
    print(f"  a lookup takes {medians[0] / medians[1]:.3f} of REST's time in the median, {p95[0] / p95[1]:.3f} at p95")
    print(f"  a build {medians[2] / medians[3]:.2f} of REST's: medians {medians[2]:.2f} s, {medians[3]:.2f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=20_000_000, help="tokens in the index at most")
    parser.add_argument("--text", type=Path, nargs="*", default=[], help="text files to use instead of synthetic text")
    parser.add_argument("--queries", type=int, default=5_000)
    parser.add_argument("--parts", nargs="*", default=["1"], help="parts to spread the text over: N, or N:SHARE")
    parser.add_argument("--adversarial", action="store_true", help="also build from texts that are hard to sort")
    parser.add_argument("--rest", metavar="PYTHON", help="a Python with REST's draftretriever, to compare with")
    parser.add_argument("--repeats", type=int, default=5, help="builds of each engine")
    options = parser.parse_args()

    held = max(options.tokens // 50, 1000)
    wanted = options.tokens + held
    text = tokenised(options.text, wanted) if options.text else synthetic(wanted, seed=0)
    tokens, held_out = text[:-held].copy(), text[-held:]
    contexts = draw_contexts(held_out, options.queries)

    # Compile everything before a clock runs.
    small, _ = time_build(tokens[:100_000].copy())
    parts = Parts([(tokens[:100_000], small)])
    continuation_tree(parts, *longest_match(parts, held_out[:16]))

    print("build                       tokens   seconds")
    sa, seconds = time_build(tokens)
    print(f"  {'text' if options.text else 'synthetic':20}{tokens.size:14,} {seconds:9.2f}")
    if options.adversarial:
        for name, hard in adversarial(tokens.size).items():
            print(f"  {name:20}{hard.size:14,} {time_build(hard)[1]:9.2f}")
    for division in options.parts:
        time_lookups(divided(tokens, sa, division), contexts)
    if options.rest:
        compare_with_rest(options.rest, tokens, contexts, options.repeats)


if __name__ == "__main__":
    main()
