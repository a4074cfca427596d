"""Building the suffix index: segment by segment, in bounded memory, only what is new."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from specds.datastore.corpus import check_claims, token_dtype, token_stream
from specds.datastore.manifest import Segment, Shard
from specds.datastore.mapped import write_array
from specds.datastore.provenance import provenance
from specds.datastore.segments import portions, require_memory, to_join, usable_memory
from specds.datastore.store import Store, require_tokens
from specds.datastore.suffix_array import build_suffix_array
from specds.datastore.writer import Writer, writing

# Bytes a token that building takes at its peak: the text, a working copy, the result, tables.
_BYTES = {"uint16": 10, "uint32": 18}


def build_suffix(
    store: Store,
    *,
    memory: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Segment]:
    """Index the corpus files that the suffix index does not cover yet; the new segments, none if there is nothing new.

    A new segment takes in the last ones that are no larger than it, so that there are never many.

    Args:
        memory: bytes that the process may take, about; None: half of the machine's. A corpus that is too large for
            one segment becomes several, which answer together as one would.
        progress: called with (tokens indexed, tokens in all).

    Raises:
        UsageError: the corpus is empty, or one of its files takes more than `memory`.
        StoreLocked: another process is writing. OutputError: it cannot be written.
        CorruptStore: the corpus cannot be read.
    """
    with store.writer() as writer:
        manifest = writer.manifest
        require_tokens(writer.store)
        most = most_tokens(manifest.vocab_size, memory)
        new = manifest.uncovered("suffix")
        if not new:
            return []
        joined = to_join(manifest.suffix, sum(shard.tokens for shard in new), most)
        covered = {name for segment in joined for name in segment.shards} | {shard.file for shard in new}
        shards = [shard for shard in manifest.corpus if shard.file in covered]
        built = write_segments(writer, writer.store, portions(shards, most), progress, memory)
        writer.change(suffix=[*(segment for segment in manifest.suffix if segment not in joined), *built])
    return built


def most_tokens(vocab_size: int, memory: int | None) -> int:
    """Tokens of the largest segment that can be built in so much memory."""
    each = _BYTES[token_dtype(vocab_size).__name__]
    most = usable_memory(memory) // each
    # From 2^31 positions on the result takes 8 bytes a token.
    return most if most < 1 << 31 else max((1 << 31) - 1, usable_memory(memory) // (each + 8))


def write_segments(
    writer: Writer,
    store: Store,
    groups: Sequence[Sequence[Shard]],
    progress: Callable[[int, int], None] = lambda done, total: None,
    memory: int | None = None,
) -> list[Segment]:
    """Write a segment over each group of corpus files, which `Writer.change` then makes part of the store.

    Args:
        store: whose manifest names the files; it may be one that is not written yet.
        memory: bytes that the process may take, about; None: as many as the machine has.

    Raises:
        UsageError: a group takes more. CorruptStore: as `token_stream`.
    """
    for group in groups:
        for shard in group:
            check_claims(store, shard)
        entries = sum(shard.tokens + shard.documents for shard in group)
        each = _BYTES[token_dtype(store.manifest.vocab_size).__name__] + (8 if entries >= 1 << 31 else 0)
        require_memory(f"indexing {group[0].file}", entries * each, memory)
    total = sum(shard.tokens for group in groups for shard in group)
    built: list[Segment] = []
    for group in groups:
        built.append(_write_segment(writer, store, group))
        progress(sum(segment.tokens for segment in built), total)
    return built


def _write_segment(writer: Writer, store: Store, shards: Sequence[Shard]) -> Segment:
    stream = token_stream(store, shards)
    directory = writer.segment_path("suffix")
    with writing(directory):
        write_array(directory / "tokens.bin", stream.tokens, below=writer.path)
        suffixes = build_suffix_array(stream.tokens)
        write_array(directory / "sa.bin", suffixes, below=writer.path)
    return Segment(
        directory=directory.relative_to(store.path).as_posix(),
        shards=[shard.file for shard in shards],
        tokens=sum(shard.tokens for shard in shards),
        model=None,
        parameters={
            "token_dtype": str(stream.tokens.dtype),
            "suffix_dtype": str(suffixes.dtype),
            "positions": len(stream.tokens),
            "separator": stream.separator,
        },
        quality={},
        provenance=provenance(),
    )
