"""Everything that specds reads: good files of each kind, ways to break them, and what is then asked to read them."""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import hashlib
import io
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from specds.calibration import answers, trace
from specds.calibration.bench import compare, results
from specds.calibration.bench.judge import compare_texts
from specds.calibration.bench.report import report
from specds.calibration.bench.run import check_tokens, summarize
from specds.calibration.explanation import explain
from specds.cli.main import run
from specds.cli.values import cost_curve
from specds.datastore import corrections
from specds.datastore.corpus import document_ids, read_documents, token_stream
from specds.datastore.dense_segment import load_normalizer, read_keys
from specds.datastore.integrity import find_problems
from specds.datastore.store import open_store
from specds.decode import answers as answer_files
from specds.decode.auto.acceptance import load_acceptance
from specds.decode.config import read_config, write_config
from specds.decode.method import Method
from specds.model import LanguageModel, load_model
from specds.reading.examples import read_examples
from specds.reading.prompts import read_prompts
from specds.sampling import Sampling
from specds.tokenizer import Tokenizer

from ..test_gguf import write_gguf
from .mutations import (
    Rng,
    mutate_array,
    mutate_bytes,
    mutate_csv,
    mutate_json,
    mutate_lines,
    mutate_metadata,
    mutate_npy,
    mutate_packed,
    mutate_parquet,
    mutate_safetensors,
    seal_manifest,
)

MODEL = ("--model", "model", "--device", "cpu")
BENCH = ("bench", "-p", "p.jsonl", "--methods", "none,pld", "--max-new-tokens", "8", "--limit", "4", *MODEL)
STORE = "s.ds"
FAISS = "f.ds"

Mutation = Callable[[Rng, bytes], bytes]


@dataclass(frozen=True)
class Reader:
    """One kind of file.

    Attributes:
        name: for people.
        files: what is broken: a path in the base folder → the ways to break it, of which one is drawn.
        read: reads it as a library would be used; the argument is the folder, which is the working directory.
        commands: command lines that read it.
        sealed: a store whose manifest may be made to fit what was done, as a forger would.
        writes: whether reading changes files, or adds some.
        weight: how many mutations it gets, against others.
    """

    name: str
    files: dict[str, Sequence[Mutation]]
    read: Callable[[], object]
    commands: Sequence[Sequence[str]] = ()
    sealed: str | None = None
    writes: bool = False
    weight: int = 1


def make_base(folder: Path, model: LanguageModel) -> None:
    """Good files of every kind, made by the commands that make them."""
    os.chdir(folder)
    model.network.save_pretrained("model")
    model.tokenizer.hf.save_pretrained("model")
    shutil.copytree("model", "other")
    write_gguf(Path("tiny.gguf"))
    prompts = [{"id": f"p{n}", "prompt": f"w{n} w{n + 1} w5 w6", "group": "ab"[n % 2]} for n in range(8)]
    _lines("p.jsonl", prompts)
    _lines(
        "p2.jsonl",
        [
            {"id": "a", "turns": ["w1 w2", "w3"]},
            {"id": "b", "messages": [{"role": "system", "content": "w4"}, {"role": "user", "content": "w7"}]},
            {"id": "c", "text": "w8 w9", "reference": "w8"},
            {"question_id": 7, "prompt": "w8", "reference": ["w9"]},
        ],
    )
    Path("p.txt").write_text("w1 w2\nw3\n\n  w4 w5\n")
    Path("p.jsonl.gz").write_bytes(gzip.compress(Path("p.jsonl").read_bytes(), mtime=0))
    Path("p.jsonl.zst").write_bytes(pa.compress(Path("p.jsonl").read_bytes(), codec="zstd", asbytes=True))
    Path("p.csv").write_text('id,prompt,group\n1,"w1, w2",a\n2,"w3\nw4",b\n3,w5 "w6",\n')
    Path("turns.tsv").write_text('id\tturns\n1\t["w1", "w2"]\n2\t["w3"]\n')
    Path("e.csv").write_text("question,answer,source\nw1,w2 w3,x\nw4,w5,\n")
    pq.write_table(pa.Table.from_pylist(prompts), "p.parquet")
    turns = [{"id": n, "turns": [f"w{n}", "w2"]} for n in range(3)]
    pq.write_table(pa.Table.from_pylist(turns), "turns.parquet")
    talk = [{"messages": [{"role": "user", "content": "w1"}]}] * 2
    pq.write_table(pa.Table.from_pylist(talk), "messages.parquet")
    examples: list[dict[str, Any]] = [
        {"prompt": "w1", "response": "w2 w3", "source": "x"},
        {"instruction": "w1", "input": "w2", "output": "w3"},
        {"question": "w1", "answer": "w2"},
        {"text": "w7 w8 w9"},
        {"messages": [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2"}]},
    ]
    _lines("e.jsonl", examples)
    pq.write_table(
        pa.Table.from_pylist([{"prompt": f"w{n}", "response": "w2 w3 w4", "source": "x"} for n in range(9)]),
        "e.parquet",
    )
    for store, index in ((STORE, "scann"), (FAISS, "faiss")):
        command("generate", "p.jsonl", "-s", store, "--max-new-tokens", "12", *MODEL)
        command("build-suffix", store)
        command("build-dense", store, "--index", index, "--dims", "8", *MODEL)
        command("ingest", "e.jsonl", "-s", store, "--model", "model")
        command("build-suffix", store)
        command("build-dense", store, *MODEL)
        command("remove", store, "--source", "x")
    shutil.copytree(STORE, "good.ds")
    decode = ("decode", "--max-new-tokens", "12", *MODEL)
    command(*decode, "-p", "p.jsonl", "-s", STORE, "--output", "a.jsonl", "--trace", "t.parquet")
    command(*decode, "-p", "p2.jsonl", "-d", "none", "--output", "a2.jsonl")
    steps: dict[str, list[Any]] = {}
    for row in pq.read_table("t.parquet").to_pylist():
        steps.setdefault(row["prompt"], []).append(row)
    Path(".t2.parquet.journal").write_text("".join(json.dumps(one) + "\n" for one in steps.values()))
    csd = ("calibrate-csd", "-p", "p.jsonl", "-d", "rest", "-s", STORE, "--max-new-tokens", "12", *MODEL)
    command(*csd, "--output", "table.parquet")
    command(*csd, "--output", "table2.parquet", "--limit", "2")
    pair = corrections.read_table(Path("table.parquet")).pair
    for number, name in enumerate(("table.parquet", "table2.parquet")):
        counts = {corrections.key_of(n, (n * 7 + number) % 128): 1 + n % 5 for n in range(1, 100)}
        table = corrections.read_table(Path(name)).plus(counts, prompts=3, tokens=200)
        corrections.write_table(Path(name), dataclasses.replace(table, pair=pair))
    command("calibrate-drafts", "-p", "p.jsonl", "-s", STORE, "--max-new-tokens", "12", *MODEL)
    command(*BENCH, "--output", "bench", codes=(0, 1))
    shutil.copytree("bench", "bench2")
    rows = results.read_rows(Path("bench"))
    _lines("bench2/journal.jsonl", [{"row": row, "steps": []} for row in rows])
    Path("cost.json").write_text(command("profile", "--json", *MODEL))
    options = Method("pld", {"length": "8"}, budget=4)
    stored = Method("rest", stores=(Path(STORE),))
    write_config(Path("config.json"), options, {"a": stored, "b": options}, {"tuned": "by hand"})


def _lines(path: str, records: Sequence[dict[str, Any]]) -> None:
    Path(path).write_text("".join(json.dumps(one) + "\n" for one in records))


class CommandFailed(Exception):
    """A command did what no command may do, or failed where it must not."""


def command(*argv: str, codes: Sequence[int] = (0,)) -> str:
    """Run a command in this process, as a shell would; returns its stdout.

    Raises:
        CommandFailed: an exit code that is none of these.
    """
    code, out, err = outcome(argv)
    if code not in codes:
        raise CommandFailed(f"{' '.join(argv)}: {code}\n{out[-500:]}\n{err[-2_000:]}")
    return out


def outcome(argv: Sequence[str]) -> tuple[int, str, str]:
    """The exit code, stdout and stderr of a command; file descriptors 1 and 2 are taken while it runs."""
    kept = [os.dup(1), os.dup(2)]
    streams = sys.stdout, sys.stderr, sys.argv
    sinks = [os.memfd_create("out"), os.memfd_create("err")]
    code = -1
    try:
        for number, sink in enumerate(sinks, 1):
            os.dup2(sink, number)
        sys.stdout = _stream(1, "strict")
        sys.stderr = _stream(2, "backslashreplace")
        sys.argv = ["specds", *argv]
        try:
            run()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else -1
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(ValueError, OSError):
                stream.flush()
    finally:
        sys.stdout, sys.stderr, sys.argv = streams
        for number, handle in enumerate(kept, 1):
            os.dup2(handle, number)
            os.close(handle)
    texts = []
    for sink in sinks:
        with os.fdopen(sink, "rb") as file:
            file.seek(0)
            texts.append(file.read().decode("utf-8", "surrogateescape"))
    return code, texts[0], texts[1]


def _stream(handle: int, errors: str) -> io.TextIOWrapper:
    """A text stream over a file descriptor that stays open when the stream goes."""
    return io.TextIOWrapper(io.FileIO(handle, "w", closefd=False), "utf-8", errors, write_through=True)


@cache
def language_model() -> LanguageModel:
    """The model of the base folder, which is the working directory."""
    return load_model("model", device="cpu", threads=1)


def tokenizer() -> Tokenizer:
    """Its tokenizer."""
    return language_model().tokenizer


def readers(base: Path, *, libraries: bool) -> list[Reader]:
    """What there is to read.

    Args:
        base: what `make_base` filled.
        libraries: also break the files that only ScaNN and faiss read, and open them.
    """
    others = [path.read_bytes() for path in sorted(base.rglob("*")) if path.is_file()]
    others = [data for data in others if 0 < len(data) < 1 << 16]

    def raw(rng: Rng, data: bytes) -> bytes:
        return mutate_bytes(rng, data, others)

    def whole(rng: Rng, data: bytes) -> bytes:
        text = mutate_json(rng, json.loads(data), rng.choice([1, 1, 1, 2, 3]))
        return text.encode("utf-8", "surrogatepass")

    def table(rng: Rng, data: bytes) -> bytes:
        return mutate_parquet(rng, data, others)

    def about(rng: Rng, data: bytes) -> bytes:
        return mutate_metadata(rng, data, b"specds", lambda record, columns: None)

    def about_table(rng: Rng, data: bytes) -> bytes:
        return mutate_metadata(rng, data, b"specds", seal_table)

    def packed(rng: Rng, data: bytes) -> bytes:
        return mutate_packed(rng, data, rng.choice([raw, rows]), others)

    def head(rng: Rng, data: bytes) -> bytes:
        # The numbers themselves, behind the last tensor's name and place, can be any.
        end = data.rindex(b".weight") + 64
        return mutate_bytes(rng, data[:end], others) + data[end:]

    def length(rng: Rng, data: bytes) -> bytes:
        return mutate_bytes(rng, data[:8], [])[:8] + data[8:]

    def tensors(rng: Rng, data: bytes) -> bytes:
        size = int.from_bytes(data[:8], "little")
        text = mutate_json(rng, json.loads(data[8 : 8 + size]), rng.choice([1, 1, 2])).encode("utf-8", "surrogatepass")
        return len(text).to_bytes(8, "little") + text + data[8 + size :]

    sealed, rows = _sealed_manifest, mutate_lines

    def arrays(dtype: str) -> Sequence[Mutation]:
        return (raw, lambda rng, data: mutate_array(rng, data, dtype))

    def inside(store: str, pattern: str, ways: Sequence[Mutation]) -> dict[str, Sequence[Mutation]]:
        found = sorted(path.relative_to(base).as_posix() for path in (base / store).glob(pattern) if path.is_file())
        assert found, f"{store}/{pattern}"
        return dict.fromkeys(found, ways)

    decode = ("decode", "-p", "p.jsonl", "--limit", "2", "--max-new-tokens", "6", "-q", *MODEL)
    rebuilt = [("rebuild", STORE, "--suffix-only"), ("compact", STORE), ("merge", STORE, "good.ds", "--output", "m.ds")]
    looks = [("inspect", STORE), ("inspect", STORE, "--json"), ("inspect", STORE, "--provenance"), ("verify", STORE)]
    suffix = {**inside(STORE, "suffix/*/tokens.bin", arrays("<u2")), **inside(STORE, "suffix/*/sa.bin", arrays("<i4"))}
    dense = {
        **inside(STORE, "dense/*/tokens.bin", arrays("<u2")),
        **inside(STORE, "dense/*/positions.bin", arrays("<u4")),
        **inside(STORE, "dense/*/normalizer.safetensors", (raw, mutate_safetensors, mutate_safetensors)),
    }
    keys = inside(STORE, "dense/*/keys/dataset.npy", (raw, mutate_npy, mutate_npy))
    manifest = {f"{STORE}/manifest.json": (sealed, sealed, sealed, whole, raw)}
    found = [
        Reader(
            "manifest",
            manifest,
            read_store,
            [*looks, *rebuilt, (*decode, "-s", STORE), ("diff", STORE, "good.ds"), ("remove", STORE, "--id", "p1")],
            weight=4,
        ),
        Reader(
            "corpus",
            inside(STORE, "corpus/*.parquet", (table, table, table, raw, about)),
            read_corpus,
            [
                *rebuilt,
                ("export", STORE, "--to", "jsonl"),
                ("export", STORE, "--to", "parquet", "--output", "x.parquet"),
                ("diff", STORE, "good.ds"),
                ("dedupe", STORE, "-n"),
                ("remove", STORE, "--id", "p1"),
                ("ingest", "p.txt", "-s", STORE, "--model", "model"),
                ("build-dense", STORE, "--replace", *MODEL),
            ],
            sealed=STORE,
            weight=3,
        ),
        Reader(
            "suffix",
            suffix,
            read_suffix,
            [(*decode, "-s", STORE, "-d", name) for name in ("rest", "auto", "sam")],
            sealed=STORE,
            weight=3,
        ),
        Reader(
            "dense",
            dense,
            partial(read_dense, STORE),
            [
                *((*decode, "-s", STORE, "-d", name) for name in ("dresd", "auto", "respec")),
                ("compact", STORE),
                ("remove", STORE, "--id", "p1"),
            ],
            sealed=STORE,
            weight=3,
        ),
        Reader("dense keys", keys, read_stored_keys, sealed=STORE),
        Reader(
            "table",
            {"table.parquet": (table, about_table, about_table, raw)},
            read_table,
            [
                ("table", "inspect", "table.parquet"),
                ("table", "inspect", "table.parquet", "--model", "model", "--json"),
                ("table", "diff", "table.parquet", "table2.parquet"),
                ("table", "merge", "table.parquet", "table2.parquet", "--output", "m.parquet"),
                ("table", "prune", "table.parquet", "--least", "2", "--output", "m.parquet"),
                (*decode, "-d", "rest", "-s", STORE, "--verifier", "csd", "--table", "table.parquet"),
            ],
            weight=3,
            writes=True,
        ),
        Reader(
            "calibration",
            {f"{STORE}.drafts.json": (whole, whole, raw)},
            lambda: load_acceptance(Path(f"{STORE}.drafts.json")),
            [("inspect", f"{STORE}.drafts.json"), ("inspect", STORE, "--drafts", "--json"), (*decode, "-s", STORE)],
            weight=2,
        ),
        Reader(
            "cost",
            {"cost.json": (whole, whole, raw)},
            read_cost,
            [
                (
                    "replay",
                    "--answers",
                    "a.jsonl",
                    "-p",
                    "p.jsonl",
                    "--limit",
                    "2",
                    "--methods",
                    "pld",
                    "--cost",
                    "cost.json",
                    *MODEL,
                )
            ],
        ),
        Reader(
            "config",
            {"config.json": (whole, whole, raw)},
            lambda: [read_config("config.json"), read_config("config.json#a")],
            [(*decode, "--config", "config.json"), (*decode, "--config", "config.json#b")],
        ),
        Reader(
            "answers",
            {"a.jsonl": (rows, rows, rows, raw), "a2.jsonl": (rows, rows, raw)},
            read_answers,
            [
                ("replay", "--answers", "a.jsonl", "-p", "p.jsonl", "--methods", "pld", *MODEL),
                ("replay", "--answers", "a2.jsonl", "-p", "p2.jsonl", "--methods", "pld", *MODEL),
                ("evaluate", STORE, "--answers", "a.jsonl", "-p", "p.jsonl", "--no-dense", "--model", "model"),
                ("decode", "-p", "p.jsonl", "-d", "none", "--max-new-tokens", "12", "--output", "a.jsonl", *MODEL),
            ],
            weight=3,
            writes=True,
        ),
        Reader(
            "trace",
            {"t.parquet": (table, table, table, raw), ".t2.parquet.journal": (rows, rows, raw)},
            read_trace,
            [
                ("explain", "t.parquet"),
                ("explain", "t.parquet", "--json"),
                (
                    "replay",
                    "--answers",
                    "t.parquet",
                    "-p",
                    "p.jsonl",
                    "--methods",
                    "pld",
                    "--cost",
                    "t.parquet",
                    *MODEL,
                ),
                (
                    "decode",
                    "-p",
                    "p.jsonl",
                    "--max-new-tokens",
                    "12",
                    "--output",
                    "a.jsonl",
                    "--trace",
                    "t.parquet",
                    *MODEL,
                ),
            ],
            weight=3,
            writes=True,
        ),
        Reader(
            "results",
            {
                "bench/results.parquet": (table, table, table, raw),
                "bench/steps.parquet": (table, table, raw),
                "bench/summary.json": (whole, whole, whole, raw),
                "bench/run.json": (whole, raw),
            },
            read_results,
            [
                ("compare", "bench", "bench2"),
                ("compare", "bench", "bench2", "--json"),
                ("replay", "--answers", "a.jsonl", "-p", "p.jsonl", "--methods", "pld", "--cost", "bench", *MODEL),
                (*BENCH, "--output", "bench"),
            ],
            weight=4,
            writes=True,
        ),
        Reader(
            "journal",
            {"bench2/journal.jsonl": (rows, rows, rows, raw)},
            read_journal,
            [(*BENCH, "--output", "bench2")],
            writes=True,
        ),
        Reader(
            "prompts: JSON lines",
            {"p.jsonl": (rows, rows, raw), "p2.jsonl": (rows, rows, rows, raw)},
            partial(read_rows, ["p.jsonl", "p2.jsonl"]),
            [
                ("decode", "-p", "p2.jsonl", "-p", "p.jsonl", "-d", "none", "--max-new-tokens", "2", *MODEL),
                ("generate", "p.jsonl", "p2.jsonl", "-s", "new.ds", "--max-new-tokens", "2", *MODEL),
            ],
            weight=2,
        ),
        Reader(
            "prompts: Parquet",
            {
                "p.parquet": (table, table, table, raw),
                "turns.parquet": (table, table),
                "messages.parquet": (table, table),
            },
            partial(read_rows, ["p.parquet", "turns.parquet", "messages.parquet"]),
            [
                (
                    "decode",
                    "-p",
                    "p.parquet",
                    "-p",
                    "turns.parquet",
                    "-p",
                    "messages.parquet",
                    "-d",
                    "none",
                    "--max-new-tokens",
                    "2",
                    *MODEL,
                )
            ],
            weight=3,
        ),
        Reader(
            "prompts: text",
            {"p.txt": (raw,)},
            partial(read_rows, ["p.txt"]),
            [("decode", "-p", "p.txt", "-d", "none", "--max-new-tokens", "2", *MODEL)],
        ),
        Reader(
            "prompts: packed",
            {"p.jsonl.gz": (packed,), "p.jsonl.zst": (packed,)},
            partial(read_rows, ["p.jsonl.gz", "p.jsonl.zst"]),
            [("decode", "-p", "p.jsonl.gz", "-p", "p.jsonl.zst", "-d", "none", "--max-new-tokens", "2", *MODEL)],
        ),
        Reader(
            "prompts: CSV",
            {"p.csv": (mutate_csv, mutate_csv, raw), "turns.tsv": (mutate_csv, raw), "e.csv": (mutate_csv, raw)},
            lambda: [read_rows(["p.csv", "turns.tsv"]), list(read_examples(["e.csv"]))],
            [
                ("decode", "-p", "p.csv", "-p", "turns.tsv", "-d", "none", "--max-new-tokens", "2", *MODEL),
                ("ingest", "e.csv", "-s", "new.ds", "--model", "model"),
            ],
            weight=2,
        ),
        Reader(
            "safetensors",
            {"other/model.safetensors": (tensors, tensors, length, raw)},
            read_safetensors,
            [("decode", "-p", "p.txt", "-d", "none", "--max-new-tokens", "2", "--model", "other", "--device", "cpu")],
        ),
        Reader(
            "GGUF",
            {"tiny.gguf": (head,)},
            read_gguf,
        ),
        Reader(
            "examples",
            {"e.jsonl": (rows, rows, raw), "e.parquet": (table, table, raw)},
            lambda: list(read_examples(["e.jsonl", "e.parquet"])),
            [("ingest", "e.jsonl", "e.parquet", "-s", "new.ds", "--model", "model")],
            weight=2,
        ),
    ]
    if libraries:
        scann = {
            **inside(STORE, "dense/*/keys/*.npy", (raw, mutate_npy)),
            **inside(STORE, "dense/*/keys/*.pb*", (raw,)),
        }
        faiss = inside(FAISS, "dense/*/keys/index.faiss", (raw,))
        for name, store, files in (("ScaNN", STORE, scann), ("faiss", FAISS, faiss)):
            commands = [(*decode, "-s", store, "-d", "dresd"), ("compact", store)]
            found.append(Reader(name, files, partial(read_dense, store), commands, sealed=store, weight=2))
    return found


def _sealed_manifest(rng: Rng, data: bytes) -> bytes:
    body = json.loads(data)
    body.pop("digest")
    text = mutate_json(rng, body, rng.choice([1, 1, 2])).encode("utf-8", "surrogatepass")
    try:
        made = json.loads(text)
        seal_manifest(made)
        return json.dumps(made).encode()
    except (ValueError, RecursionError, AttributeError, TypeError):
        return text


def seal_table(record: dict[str, Any], table: Any) -> None:
    """Give a correction table's description the checksum that its reader computes."""
    names = ("format", "version", "pair", "vocabulary", "prompts", "tokens", "done", "history")
    digest = hashlib.sha256(json.dumps({name: record.get(name) for name in names}, sort_keys=True).encode())
    for name in ("draft_token", "target_token", "count"):
        digest.update(np.ascontiguousarray(table.column(name).to_numpy()).tobytes())
    record["sha256"] = digest.hexdigest()


def read_store() -> None:
    """A store as `inspect`, `verify` and the drafters look at it."""
    problems, *_ = find_problems(STORE)
    store = open_store(STORE, tokenizer())
    if not problems:
        store.suffix_index()
        store.dense_index(language_model().fingerprint)
        token_stream(store)


def read_corpus() -> None:
    """All documents, in each of the ways in which they are read."""
    store = open_store(STORE, tokenizer(), corpus_only=True)
    list(read_documents(store))
    document_ids(store)
    token_stream(store)


def read_suffix() -> None:
    """Matches and what follows them, of contexts that stand in the corpus and of others."""
    index = open_store(STORE, tokenizer()).suffix_index()
    random_ = np.random.default_rng(0)
    contexts = [random_.integers(0, 128, 20), np.array([5, 6, 10, 11]), np.array([7])]
    contexts += [np.asarray(tokens[3:9], np.int64) for tokens in index.parts.tokens]
    for context in contexts:
        match = index.match(context.astype(np.int64), 16, 1)
        index.continuations(match)
        index.places(match, 8)
    list(index.parts.tokens)


def read_dense(name: str) -> None:
    """Neighbours of states, with and without a token that follows."""
    store = open_store(name, tokenizer())
    for segment in store.manifest.dense:
        load_normalizer(store.path, segment)
    index = store.dense_index(language_model().fingerprint)
    random_ = np.random.default_rng(0)
    for scale in (1.0, 1e-6):
        hidden = (random_.normal(size=32) * scale).astype(np.float32)
        _, positions = index.search(hidden, 5)
        index.continuations(positions, 6)
        index.search_followed_by(hidden, 7, 5)
        index.alone(7)
    for segment in store.manifest.dense:
        read_keys(store.path, segment)


def read_stored_keys() -> None:
    """The keys as segments are joined by them; the library that searches them is not asked."""
    store = open_store(STORE, tokenizer())
    for segment in store.manifest.dense:
        keys = read_keys(store.path, segment)
        assert keys is not None
        float(np.asarray(keys.keys).sum())


def read_table() -> None:
    """A correction table, described, added to another, and compared with it."""
    table = corrections.read_table(Path("table.parquet"))
    other = corrections.read_table(Path("table2.parquet"))
    json.dumps(corrections.describe(table))
    corrections.difference(table, other)
    corrections.write_table(Path("m.parquet"), table.pruned(top=5, decay=0.5, cap=3))
    corrections.merge([table, dataclasses.replace(other, done=())])


def read_cost() -> None:
    """A cost curve, and what it predicts."""
    curve = cost_curve(Path("cost.json"))
    assert curve is not None
    curve.at(300)
    curve.predict(np.array([1, 5, 300]), np.array([1, 70, 5_000]))


def read_answers() -> None:
    """Answers of one turn and of several, to be replayed and to be gone on with."""
    for name, prompts in (("a.jsonl", "p.jsonl"), ("a2.jsonl", "p2.jsonl")):
        answers.read_answers(name, read_prompts([prompts]), tokenizer())
        with answer_files.answer_file(Path(name)) as file:
            json.dumps([one.id for one in file.held])


def read_trace() -> None:
    """A trace's passes, its answers, where its speed came from, and its rows in the trace of a job that goes on."""
    passes = trace.read_passes("t.parquet")
    passes.curve()
    explain("t.parquet")
    answers.read_answers("t.parquet", read_prompts(["p.jsonl"]), tokenizer())
    trace.lacking("t.parquet")
    for name in ("t.parquet", "t2.parquet"):
        with trace.TraceWriter(Path(name), resumable=True) as writer:
            writer.carry_over(["p1", "p2"])


def read_results() -> None:
    """A result, compared with another, and gone on with to its report."""
    compare.compare(Path("bench"), Path("bench2"))
    _go_on(Path("bench"), "bench2")


def read_journal() -> None:
    """A run that was stopped, gone on with to its end."""
    _go_on(Path("bench2"), "bench")


def _go_on(path: Path, other: str) -> None:
    """What `specds bench` does where all is measured already."""
    about = json.loads(Path(other, "summary.json").read_bytes())
    asked = about["options"]
    with results.open_results(path, asked) as held:
        keys = [(f"p{n}", method, 0) for n in (0, 2, 4, 6) for method in asked["methods"]]
        if not all(key in held.rows for key in keys):
            return  # it would be measured
        rows = [held.rows[key] for key in keys]
        check_tokens(path, held, language_model())
        compare_texts(rows, language_model(), Sampling(), about["near_tie"])
        held.finish(rows)
        summary = summarize(path, rows, held.sessions, asked, about["near_tie"], None)
        json.dumps(summary, allow_nan=False)
        check_text("report", report(summary))


def read_safetensors() -> None:
    """A checkpoint, tensor by tensor as runtimes of our own read it, and as transformers does."""
    model = load_model("other", device="cpu", threads=1)
    for name in language_model().network.state_dict():
        model.tensor(name)
    model.network  # noqa: B018


def read_gguf() -> None:
    """A model, converted and kept nowhere."""
    kept = os.environ["XDG_CACHE_HOME"]
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache
        try:
            load_model("tiny.gguf", device="cpu", threads=1).network  # noqa: B018
        finally:
            os.environ["XDG_CACHE_HOME"] = kept


def read_rows(files: list[str]) -> None:
    """Prompts, as ids that a model can read."""
    for prompt in read_prompts(files):
        json.dumps(
            dataclasses.asdict(prompt) if not hasattr(prompt, "error") else [prompt.id, str(prompt.error)]
        ).encode()


def check_text(what: str, text: str) -> None:
    """Nothing that moves a cursor, or is not UTF-8, may be shown.

    Raises:
        CommandFailed: there is.
    """
    strange = next((one for one in text if not one.isprintable() and one != "\n"), None)
    if strange is not None:
        at = text.index(strange)
        raise CommandFailed(f"{what} shows {strange!r}: …{text[max(0, at - 60) : at + 60]!r}")
