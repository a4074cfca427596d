"""The parts that a store's indexes and corpus are made of: what a growing store joins, and how it is renamed."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
from collections.abc import Callable, Mapping, Sequence

from specds.datastore.corpus import read_documents, write_like
from specds.datastore.manifest import Manifest, Segment, Shard
from specds.datastore.writer import Writer
from specds.errors import UsageError

_RESERVE = 256 << 20
# Tokens of a corpus file that is put together of several, all of which are in memory then.
_MOST_TOKENS = 64 << 20


def usable_memory(memory: int | None) -> int:
    """Bytes that data may take: `memory` (None: half of the machine's) without what Python and its libraries take."""
    if memory is None:
        memory = _machine_memory() // 2
    return max(memory - _RESERVE, memory // 4)


def require_memory(what: str, needed: int, memory: int | None) -> None:
    """Refuse what would take more than `memory` (None: the machine's).

    Raises:
        UsageError: it does, and is more than what Python and its libraries take anyway.
    """
    allowed = max(usable_memory(_machine_memory() if memory is None else memory), _RESERVE)
    if needed > allowed:
        raise UsageError(
            f"{what} takes about {needed:,} bytes of memory, and {allowed:,} may be taken",
            "a corpus file is taken as a whole; build-suffix, build-dense, compact and rebuild take --memory",
        )


def _machine_memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def to_join(segments: Sequence[Segment], tokens: int, most: int) -> list[Segment]:
    """The last segments that a new one of so many tokens takes in, so that n tokens are at most log2 n segments.

    Each is at most as large as all that comes after it: a token is indexed again only when its segment at least
    doubles, and a small addition to a large index costs what the addition does.

    Args:
        most: tokens that the joined segment may have.
    """
    joined: list[Segment] = []
    for segment in reversed(segments):
        if segment.tokens > tokens or tokens + segment.tokens > most:
            break
        joined.insert(0, segment)
        tokens += segment.tokens
    return joined


def portions(shards: Sequence[Shard], most: int) -> list[list[Shard]]:
    """Neighbouring corpus files together while they have at most so many tokens; a larger one stands alone."""
    groups: list[list[Shard]] = []
    tokens = 0
    for shard in shards:
        tokens += shard.tokens
        if not groups or tokens > most:
            groups.append([])
            tokens = shard.tokens
        groups[-1].append(shard)
    return groups


def renamed(segments: Sequence[Segment], names: Mapping[str, str]) -> list[Segment]:
    """Segments over corpus files that are called otherwise now; files that became one are one."""
    return [
        dataclasses.replace(segment, shards=list(dict.fromkeys(names.get(name, name) for name in segment.shards)))
        for segment in segments
    ]


def consolidate(writer: Writer, most: int, wanted: Callable[[Shard], bool] = lambda shard: True) -> int:
    """Put neighbouring corpus files that are alike into larger ones; how many files there are less.

    Alike are files of the same origin, model, sampling, licence, command and day that the same segments cover. The
    order of documents stays, and with it what indexes say of them.

    Args:
        most: documents of a file.
        wanted: which files may be touched.
    """
    manifest = writer.manifest
    corpus: list[Shard] = []
    names: dict[str, str] = {}
    for _, alike in itertools.groupby(manifest.corpus, lambda shard: (wanted(shard), _likeness(manifest, shard))):
        for group in _groups(list(alike), most):
            if len(group) == 1 or not wanted(group[0]):
                corpus += group
                continue
            documents = list(read_documents(writer.store, [shard.file for shard in group]))
            corpus.append(write_like(writer, documents, group[0]))
            names |= {shard.file: corpus[-1].file for shard in group}
    if names:
        writer.change(corpus=corpus, suffix=renamed(manifest.suffix, names), dense=renamed(manifest.dense, names))
    return len(manifest.corpus) - len(corpus)


def _groups(shards: list[Shard], most: int) -> list[list[Shard]]:
    groups: list[list[Shard]] = []
    documents = tokens = 0
    for shard in shards:
        documents, tokens = documents + shard.documents, tokens + shard.tokens
        if not groups or documents > most or tokens > _MOST_TOKENS:
            groups.append([])
            documents, tokens = shard.documents, shard.tokens
        groups[-1].append(shard)
    return groups


def _likeness(manifest: Manifest, shard: Shard) -> str:
    covering = [
        next((segment.directory for segment in segments if shard.file in segment.shards), None)
        for segments in manifest.indexes.values()
    ]
    about = dataclasses.asdict(shard)
    made_by = about["provenance"]
    parts = [about[name] for name in ("origin", "model", "sampling", "licence")]
    return json.dumps([*parts, made_by["command"], made_by["version"], made_by["date"][:10], covering], sort_keys=True)
