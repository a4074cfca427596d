"""What is in a store, as JSON."""

from __future__ import annotations

import dataclasses
from typing import Any

from specds.datastore.manifest import Segment
from specds.datastore.store import Store


def describe(store: Store) -> dict[str, Any]:
    """Its documents, indexes and history in figures and names, as `specds inspect --json` prints them."""
    manifest = store.manifest
    sources: dict[str, dict[str, int]] = {}
    for shard in manifest.corpus:
        for name, count in shard.sources.items():
            entry = sources.setdefault(name, {"documents": 0, "tokens": 0})
            entry["documents"] += count.documents
            entry["tokens"] += count.tokens
    return {
        "path": str(store.path),
        "tokenizer": {
            "name": manifest.tokenizer.name,
            "fingerprint": manifest.tokenizer.fingerprint,
            "vocab_size": manifest.vocab_size,
        },
        "documents": manifest.documents,
        "tokens": manifest.tokens,
        "prompt_tokens": sum(shard.prompt_tokens for shard in manifest.corpus),
        "response_tokens": sum(shard.response_tokens for shard in manifest.corpus),
        "sources": sources,
        "corpus": [
            {
                "file": shard.file,
                "documents": shard.documents,
                "origin": shard.origin,
                "model": shard.model and {"name": shard.model.name, "fingerprint": shard.model.fingerprint},
                "sampling": shard.sampling,
                "sources": sorted(shard.sources),
                "licence": shard.licence,
                "command": shard.provenance.command,
                "version": shard.provenance.version,
                "date": shard.provenance.date,
            }
            for shard in manifest.corpus
        ],
        "indexes": [
            _segment_record(store, kind, segment) for kind, segments in manifest.indexes.items() for segment in segments
        ],
        "uncovered": {
            kind: [shard.file for shard in manifest.uncovered(kind)]
            for kind, segments in manifest.indexes.items()
            if segments
        },
        "history": [dataclasses.asdict(change) for change in manifest.history],
        "bytes": store.size(),
        "files": len(manifest.files),
    }


def _segment_record(store: Store, kind: str, segment: Segment) -> dict[str, Any]:
    return {
        "kind": kind,
        "directory": segment.directory,
        "tokens": segment.tokens,
        "shards": segment.shards,
        "model": segment.model and {"name": segment.model.name, "fingerprint": segment.model.fingerprint},
        "parameters": segment.parameters,
        "quality": segment.quality,
        "bytes": sum(store.manifest.files[name].size for name in store.manifest.files_of(segment)),
        "command": segment.provenance.command,
        "version": segment.provenance.version,
        "date": segment.provenance.date,
    }
