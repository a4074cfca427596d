"""The manifest: what is written is what is read, and nothing else is trusted."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specds.datastore.manifest import (
    Change,
    FileRecord,
    Identity,
    Manifest,
    Provenance,
    Segment,
    Shard,
    SourceCount,
    dump,
    parse,
)
from specds.errors import CorruptStore, StoreVersionError

HOW = Provenance("specds generate p.jsonl", "0.1.0", "2026-01-01T00:00:00+00:00")
MODEL = Identity("tiny", "f" * 64)
SHARD = Shard(
    "corpus/part-00001.parquet", 2, 5, 7, "generated", MODEL, {"seed": 0}, {"a": SourceCount(2, 12)}, "MIT", HOW
)
SUFFIX = Segment("suffix/000001", [SHARD.file], 12, None, {"positions": 14}, {}, HOW)
DENSE = Segment("dense/000001", [SHARD.file], 12, MODEL, {"keys": 10}, {"recall_at_10": 0.9}, HOW)
FILES = {
    name: FileRecord(3, "a" * 64, "b" * 64)
    for name in (SHARD.file, "suffix/000001/sa.bin", "dense/000001/keys/index.faiss")
}
FULL = Manifest(
    Identity("tiny", "e" * 64), 128, [SHARD], [SUFFIX], [DENSE], [Change("removed 2 documents", HOW)], FILES
)
BODY: dict[str, Any] = json.loads(dump(FULL))

numbers = st.integers(0, (1 << 62) - 1)
texts = st.text(st.characters(), max_size=20)
identities = st.builds(Identity, texts, texts)
provenances = st.builds(Provenance, texts, texts, texts)
sources = st.dictionaries(texts, st.builds(SourceCount, numbers, numbers), max_size=3)
shards = st.builds(
    Shard,
    st.just(SHARD.file),
    numbers,
    numbers,
    numbers,
    texts,
    st.none() | identities,
    st.dictionaries(texts, st.none() | st.integers(-5, 5) | texts),
    sources,
    texts,
    provenances,
)


def test_a_written_manifest_reads_back_equal() -> None:
    assert parse(dump(FULL), "m") == FULL
    assert (FULL.documents, FULL.tokens) == (2, 12)


@given(identities, numbers, shards)
def test_any_names_and_counts_survive(tokenizer: Identity, vocabulary: int, shard: Shard) -> None:
    """Names come from users: any Unicode, and half surrogate pairs where a file name is not UTF-8."""
    written = Manifest(tokenizer, vocabulary, [shard], files={shard.file: FileRecord(1, "", "")})
    data = dump(written)
    assert parse(data, "m") == written
    data.decode("utf-8")


def test_the_same_manifest_is_the_same_bytes() -> None:
    turned = dataclasses.replace(FULL, files=dict(reversed(FULL.files.items())))
    assert dump(turned) == dump(FULL)


def changed(change: Callable[[dict[str, Any]], object]) -> bytes:
    body = copy.deepcopy(BODY)
    change(body)
    return json.dumps(body).encode()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda m: m.pop("files"), "lacks files"),
        (lambda m: m["corpus"][0].pop("origin"), "corpus[0] lacks origin"),
        (lambda m: m.update(extra=1), "unknown fields extra"),
        (lambda m: m["suffix"][0].update(extra=1), "suffix[0] has unknown fields extra"),
        (lambda m: m.update(vocab_size="128"), "vocab_size is str, not int"),
        (lambda m: m.update(vocab_size=128.0), "vocab_size is float, not int"),
        (lambda m: m.update(vocab_size=True), "vocab_size is bool, not int"),
        (lambda m: m.update(vocab_size=-1), "vocab_size is out of range"),
        (lambda m: m.update(vocab_size=1 << 80), "vocab_size is out of range"),
        (lambda m: m.update(tokenizer=None), "tokenizer is not an object"),
        (lambda m: m.update(tokenizer=["a", "b"]), "tokenizer is not an object"),
        (lambda m: m.update(corpus={}), "corpus is not a list"),
        (lambda m: m.update(files=[]), "files is not an object"),
        (lambda m: m["files"][SHARD.file].update(size=-1), "size is out of range"),
        (lambda m: m["corpus"][0].update(documents=None), "documents is NoneType, not int"),
        (lambda m: m["corpus"][0]["sources"].update(a=3), "is not an object"),
        (lambda m: m["dense"][0].update(model="tiny"), "model is not an object"),
        (lambda m: m["suffix"][0].update(shards=["corpus/other.parquet"]), "which is not in the corpus"),
        (lambda m: m["files"].pop(SHARD.file), "no size and checksum"),
        (lambda m: m["files"].pop("suffix/000001/sa.bin"), "has no files"),
    ],
)
def test_a_wrong_field_is_named(change: Callable[[dict[str, Any]], object], said: str) -> None:
    with pytest.raises(CorruptStore) as refused:
        parse(changed(change), "m.json")
    assert said in refused.value.message
    assert "m.json" in refused.value.message
    assert refused.value.hint


UNSAFE = [
    "../x",
    "/etc/passwd",
    "a/../../b",
    "corpus/../../x",
    "..",
    ".",
    "",
    "corpus//x",
    "corpus/",
    "./x",
    ".hidden",
    "corpus/.x",
    "~/x",
    "C:\\x",
    "corpus\\x",
    "a\0b",
    "a\nb",
    "x" * 400,
]


@pytest.mark.parametrize("path", UNSAFE)
@pytest.mark.parametrize("where", ["files", "shard", "suffix", "dense"])
def test_a_path_that_may_lead_out_is_refused(path: str, where: str) -> None:
    def change(body: dict[str, Any]) -> None:
        if where == "files":
            body["files"][path] = body["files"][SHARD.file]
        elif where == "shard":
            body["corpus"][0]["file"] = path
        else:
            body[where][0]["directory"] = path

    with pytest.raises(CorruptStore, match="not a plain path inside the store"):
        parse(changed(change), "m")


@pytest.mark.parametrize("version", [0, 1, 3, "2", None, 1.5, [2]])
def test_another_version_is_refused_by_its_own_error(version: object) -> None:
    with pytest.raises(StoreVersionError, match="this specds reads 2") as refused:
        parse(changed(lambda m: m.update(version=version, something_new={})), "m")
    assert refused.value.hint


def test_damage_that_leaves_every_field_plausible_is_found() -> None:
    with pytest.raises(CorruptStore, match="changed since it was written"):
        parse(changed(lambda m: m["corpus"][0].update(documents=3)), "m")
    with pytest.raises(CorruptStore, match="changed since it was written"):
        parse(changed(lambda m: m.pop("digest")), "m")


@given(st.integers(0, len(dump(FULL)) - 1), st.integers(0, 7))
def test_every_flipped_bit_is_found(place: int, bit: int) -> None:
    data = bytearray(dump(FULL))
    data[place] ^= 1 << bit
    with pytest.raises((CorruptStore, StoreVersionError)):
        parse(bytes(data), "m")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"3",
        b'"specds datastore"',
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"9" * 10_000,
        b'{"format": "another", "version": 1}',
        b'{"version": 1}',
    ],
)
def test_what_is_no_manifest_is_refused(data: bytes) -> None:
    with pytest.raises(CorruptStore):
        parse(data, "m")


@given(st.integers(0, len(dump(FULL)) - 1))
def test_a_cut_manifest_is_refused(end: int) -> None:
    data = dump(FULL)[:end]
    if data.strip() == dump(FULL).strip():
        return
    with pytest.raises(CorruptStore):
        parse(data, "m")


@given(st.recursive(st.none() | st.booleans() | st.floats() | texts, lambda x: st.lists(x) | st.dictionaries(texts, x)))
def test_any_json_in_any_place_is_refused_by_name_or_taken(value: Any) -> None:
    """No input ends in another error than the named ones."""
    for name in BODY:
        body = {**BODY, name: value}
        with contextlib.suppress(CorruptStore, StoreVersionError):
            parse(json.dumps(body).encode(), "m")
