"""The manifest: what a datastore holds, checked field by field before anything else is trusted."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import re
import types
import typing
from dataclasses import dataclass, field
from typing import Any

from specds.errors import CorruptStore, StoreError, StoreVersionError
from specds.limits import MAX_MANIFEST

FORMAT = "specds datastore"
VERSION = 2
NAME = "manifest.json"
# Written with a name and a line for each, JSON values take more bytes than this.
_BYTES_OF_VALUE = 16
_SAFE_PATH = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*")


@dataclass(frozen=True, slots=True)
class Identity:
    """A model or tokenizer: the name its user gave it, and what tells it from others."""

    name: str
    fingerprint: str


@dataclass(frozen=True, slots=True)
class Provenance:
    """How a part of the store came to be."""

    command: str
    version: str
    date: str


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A file of the store: its size in bytes, sha256 of all of it, and sha256 of its first and last 64 KiB."""

    size: int
    sha256: str
    edges: str


@dataclass(frozen=True, slots=True)
class SourceCount:
    """Documents and tokens of one source within a shard."""

    documents: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Shard:
    """One Parquet file of the corpus.

    Attributes:
        origin: `generated` (the model's own answers: in-distribution) or `ingested`.
        model: which model wrote it; None for ingested text.
        sampling: with which sampling options; empty for ingested text.
        licence: under which its documents stand, as whoever added them said; empty if nobody did.
    """

    file: str
    documents: int
    prompt_tokens: int
    response_tokens: int
    origin: str
    model: Identity | None
    sampling: dict[str, Any]
    sources: dict[str, SourceCount]
    licence: str
    provenance: Provenance

    @property
    def tokens(self) -> int:
        """Tokens of its documents, prompts and responses."""
        return self.prompt_tokens + self.response_tokens


@dataclass(frozen=True, slots=True)
class Segment:
    """One immutable index over some shards; the segments of a kind together are one index.

    Attributes:
        directory: where its files are, relative to the store.
        shards: the corpus files it covers, in the corpus's order; no other segment of its kind covers them.
        tokens: corpus tokens covered.
        model: for a dense index, whose hidden states its keys are.
        parameters: what is needed to open it (dtypes, lengths), and what it was built with.
        quality: what was measured when it was built (recall, explained variance).
    """

    directory: str
    shards: list[str]
    tokens: int
    model: Identity | None
    parameters: dict[str, Any]
    quality: dict[str, Any]
    provenance: Provenance


@dataclass(frozen=True, slots=True)
class Change:
    """Something that was taken away or put together, which no part that is there speaks of."""

    what: str
    provenance: Provenance


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything a store holds; see docs/store.md.

    Attributes:
        history: removals, merges and the like, oldest first.
        files: every file but the manifest itself.
    """

    tokenizer: Identity
    vocab_size: int
    corpus: list[Shard] = field(default_factory=list)
    suffix: list[Segment] = field(default_factory=list)
    dense: list[Segment] = field(default_factory=list)
    history: list[Change] = field(default_factory=list)
    files: dict[str, FileRecord] = field(default_factory=dict)

    @property
    def documents(self) -> int:
        """Documents in the corpus."""
        return sum(shard.documents for shard in self.corpus)

    @property
    def tokens(self) -> int:
        """Tokens in the corpus, prompts and responses."""
        return sum(shard.tokens for shard in self.corpus)

    @property
    def indexes(self) -> dict[str, list[Segment]]:
        """The segments of each kind of index."""
        return {"suffix": self.suffix, "dense": self.dense}

    def files_of(self, segment: Segment) -> list[str]:
        """The files of a segment."""
        return [name for name in self.files if name.startswith(segment.directory + "/")]

    def uncovered(self, kind: str) -> list[Shard]:
        """Corpus files that no segment of a kind covers."""
        covered = {name for segment in self.indexes[kind] for name in segment.shards}
        return [shard for shard in self.corpus if shard.file not in covered]


def dump(manifest: Manifest) -> bytes:
    """The manifest as it stands on disk: JSON, sorted, with a format name, a version and its own checksum.

    Raises:
        StoreError: nobody would read so large a one.
    """
    body = {"format": FORMAT, "version": VERSION, **dataclasses.asdict(manifest)}
    body["digest"] = digest(body)
    # ASCII escapes keep a name that is not UTF-8 (half a surrogate pair in Python) what it was, in a file that is.
    data = (json.dumps(body, indent=1, sort_keys=True, ensure_ascii=True) + "\n").encode("ascii")
    if said := _too_large(data):
        raise StoreError(
            f"the store's new manifest {said}", f"`specds compact` makes it smaller, or {MAX_MANIFEST.hint}"
        )
    return data


def digest(body: dict[str, Any]) -> str:
    """sha256 over the rest of a manifest's JSON: damage that leaves every field plausible is found by it."""
    rest = {name: value for name, value in body.items() if name != "digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode("ascii")).hexdigest()


def parse(data: bytes, where: str) -> Manifest:
    """A manifest from its bytes; every field's type and every path is checked.

    Raises:
        CorruptStore: not a manifest; a field is missing, of the wrong type, negative, or an unsafe path; or
            something else changed since it was written.
        StoreVersionError: a manifest of another format version.
    """
    hint = "restore the store from a copy, or build it again"
    if said := _too_large(data):
        raise CorruptStore(f"{where} {said}", f"{hint}; if it is yours, {MAX_MANIFEST.hint}")
    try:
        body = json.loads(data.decode("utf-8"))
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise CorruptStore(f"{where} is not JSON: {' '.join(str(error).split())[:200]}", hint) from error
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise CorruptStore(f"{where} is not a specds manifest: its format is not {FORMAT!r}", hint)
    if body.get("version") != VERSION:
        raise StoreVersionError(
            f"{where} has format version {str(body.get('version'))[:40]}, this specds reads {VERSION}",
            "build the store again with this version, or use the version that wrote it",
        )
    try:
        about = ("format", "version", "digest")
        manifest: Manifest = _build(Manifest, {k: v for k, v in body.items() if k not in about}, "")
        _check_paths(manifest)
        if body.get("digest") != digest(body):
            raise _FieldError("it changed since it was written")
    except _FieldError as error:
        raise CorruptStore(f"{where}: {error}", hint) from error
    return manifest


def _too_large(data: bytes) -> str:
    """What is too much about a manifest; a value of a few bytes takes a hundred once it is parsed."""
    most = MAX_MANIFEST.bytes
    if len(data) > most:
        return f"has more than {most:,} bytes"
    values = sum(data.count(mark) for mark in (b",", b"[", b"{"))
    return f"has more than {most // _BYTES_OF_VALUE:,} values" if values > most // _BYTES_OF_VALUE else ""


class _FieldError(Exception):
    pass


def _build(kind: Any, value: Any, where: str) -> Any:
    """Turn JSON into a dataclass by its type hints; nothing is coerced."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return value
    if origin is types.UnionType:
        inner = next(argument for argument in arguments if argument is not type(None))
        return None if value is None else _build(inner, value, where)
    if dataclasses.is_dataclass(kind):
        if not isinstance(value, dict):
            raise _FieldError(f"{where or 'the manifest'} is not an object")
        build: Any = kind
        hints = _hints(build)
        missing, unknown = sorted(hints.keys() - value.keys()), sorted(value.keys() - hints.keys())
        if missing or unknown:
            said = f"lacks {', '.join(missing)}" if missing else f"has unknown fields {', '.join(unknown)[:200]}"
            raise _FieldError(f"{where or 'the manifest'} {said}")
        return build(**{name: _build(hint, value[name], f"{where}.{name}".lstrip(".")) for name, hint in hints.items()})
    if origin is list:
        if not isinstance(value, list):
            raise _FieldError(f"{where} is not a list")
        return [_build(arguments[0], inner_value, f"{where}[{index}]") for index, inner_value in enumerate(value)]
    if origin is dict:
        if not isinstance(value, dict):
            raise _FieldError(f"{where} is not an object")
        return {
            name: _build(arguments[1], inner_value, f"{where}[{name[:80]!r}]") for name, inner_value in value.items()
        }
    if type(value) is not kind:
        raise _FieldError(f"{where} is {type(value).__name__}, not {kind.__name__}")
    if kind is int and not 0 <= value < 1 << 62:
        raise _FieldError(f"{where} is out of range")
    return value


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    """The fields of a class and their types; reading them from annotations takes longer than all checks together."""
    return typing.get_type_hints(kind)


def _check_paths(manifest: Manifest) -> None:
    order = {shard.file: place for place, shard in enumerate(manifest.corpus)}
    segments = [segment for kind in manifest.indexes.values() for segment in kind]
    for path in [*order, *manifest.files, *(segment.directory for segment in segments)]:
        if not _SAFE_PATH.fullmatch(path) or len(path) > 300:
            raise _FieldError(f"the path {path[:80]!r} is not a plain path inside the store")
    if len(order) < len(manifest.corpus):
        raise _FieldError("a corpus file is named twice")
    for path in order:
        if path not in manifest.files:
            raise _FieldError(f"the corpus file {path} has no size and checksum")
    directories = {path.rpartition("/")[0] for path in manifest.files}
    directories |= {directory.rpartition("/")[0] for directory in directories}
    for kind, parts in manifest.indexes.items():
        covered: set[str] = set()
        for segment in parts:
            if not segment.directory.startswith(kind + "/") or segment.directory not in directories:
                raise _FieldError(f"the index {segment.directory} has no files")
            for shard in segment.shards:
                if shard not in order:
                    raise _FieldError(f"the index {segment.directory} covers {shard[:80]}, which is not in the corpus")
            places = [order[shard] for shard in segment.shards]
            if places != sorted(set(places)) or covered & set(segment.shards):
                raise _FieldError(f"the index {segment.directory} covers a corpus file twice, or out of order")
            covered.update(segment.shards)
