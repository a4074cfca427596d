"""Putting the files and segments of a store together, or building its suffix index anew, in one step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specds.datastore.build_dense import DenseOptions, most_keys
from specds.datastore.build_suffix import most_tokens, write_segments
from specds.datastore.dense_segment import load_normalizer, read_keys, write_segment
from specds.datastore.manifest import Manifest, Segment
from specds.datastore.provenance import history_line
from specds.datastore.segments import consolidate, portions
from specds.datastore.store import Store
from specds.datastore.trial import remember, require_sound
from specds.datastore.writer import Writer

# Documents of one corpus file after compaction.
_SHARD_DOCUMENTS = 65_536

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Compaction:
    """Corpus files, suffix segments and dense segments before and after."""

    before: tuple[int, int, int]
    after: tuple[int, int, int]


def compact(store: Store, *, memory: int | None = None, progress: Progress = lambda stage: None) -> Compaction:
    """Put the segments of each index together, as far as memory reaches, and small corpus files that are alike.

    Documents that no index covers are not taken in: that is what building is for. Dense segments are put together by
    their keys where these are kept and comparable; keys of removed documents go.

    Raises:
        StoreLocked, OutputError, CorruptStore: see their docstrings.
    """
    with store.writer() as writer:
        before = _sizes(writer.manifest)
        progress("suffix")
        suffix = _compacted_suffix(writer, memory)
        progress("dense")
        dense = _compacted_dense(writer, memory)
        if (suffix, dense) != (writer.manifest.suffix, writer.manifest.dense):
            new = [segment for segment in dense if segment not in writer.manifest.dense]
            writer.change(suffix=suffix, dense=dense, history=[*writer.manifest.history, history_line("compacted")])
            for segment in new:
                remember(writer.store, segment)
        progress("corpus")
        consolidate(writer, _SHARD_DOCUMENTS)
        return Compaction(before, _sizes(writer.manifest))


def _sizes(manifest: Manifest) -> tuple[int, int, int]:
    return len(manifest.corpus), len(manifest.suffix), len(manifest.dense)


def _compacted_suffix(writer: Writer, memory: int | None) -> list[Segment]:
    manifest = writer.manifest
    covered = {name for segment in manifest.suffix for name in segment.shards}
    shards = [shard for shard in manifest.corpus if shard.file in covered]
    groups = portions(shards, most_tokens(manifest.vocab_size, memory))
    there = {tuple(segment.shards): segment for segment in manifest.suffix}
    segments: list[Segment] = []
    for group in groups:
        same = there.get(tuple(shard.file for shard in group))
        segments += [same] if same else write_segments(writer, writer.store, [group], memory=memory)
    return segments


def _compacted_dense(writer: Writer, memory: int | None) -> list[Segment]:
    """Neighbouring segments of equal normalizers together; a segment with removed documents without their keys."""
    segments: list[Segment] = []
    group: list[Segment] = []
    order = {shard.file: place for place, shard in enumerate(writer.manifest.corpus)}
    for segment in writer.manifest.dense:
        if group and not _fits(writer, group, segment, order, memory):
            segments += _one_dense(writer, group)
            group = []
        group.append(segment)
    return [*segments, *_one_dense(writer, group)]


def _fits(
    writer: Writer, group: Sequence[Segment], segment: Segment, order: dict[str, int], memory: int | None
) -> bool:
    first = group[0]
    keys = sum(member.parameters.get("keys", 0) for member in (*group, segment))
    return (
        keys <= most_keys(DenseOptions(dims=first.parameters.get("dims")), memory)
        and all(member.parameters.get("kept") in ("float32", "half") for member in (first, segment))
        and order[group[-1].shards[-1]] < order[segment.shards[0]]
        and load_normalizer(writer.path, first).same(load_normalizer(writer.path, segment))
    )


def _one_dense(writer: Writer, group: Sequence[Segment]) -> list[Segment]:
    if not group or (len(group) == 1 and not group[0].parameters.get("removed")):
        return list(group)
    for segment in group:
        writer.store.check_whole(segment)
        require_sound(writer.store, segment)
    parts = [keys for segment in group if (keys := read_keys(writer.path, segment)) is not None]
    first = group[0]
    if len(parts) < len(group) or first.model is None or not any(len(part.keys) for part in parts):
        return list(group)
    parameters = first.parameters
    about = {name: parameters.get(name) for name in ("max_length", "dtype", "kept", "search")}
    about |= {"index": parameters.get("ann"), "leaves": None}
    normalizer = load_normalizer(writer.path, first)
    return [write_segment(writer, parts, normalizer, first.model, about, lambda stage, done, total: None)]


def rebuild_suffix(store: Store, memory: int | None = None) -> list[Segment]:
    """Sort every suffix segment again from the corpus, whatever state its files are in; equal bytes come of it.

    Args:
        memory: bytes that the process may take, about; None: as many as the machine has.

    Raises:
        UsageError: a segment takes more.
        CorruptStore: the corpus itself is damaged. StoreLocked, OutputError: see their docstrings.
    """
    with store.writer() as writer:
        by_name = {shard.file: shard for shard in writer.manifest.corpus}
        groups = [[by_name[name] for name in segment.shards] for segment in writer.manifest.suffix]
        segments = write_segments(writer, writer.store, groups, memory=memory)
        if segments:
            history = [*writer.manifest.history, history_line("rebuilt the suffix index")]
            writer.change(suffix=segments, history=history)
    return segments
