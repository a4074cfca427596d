"""specds build-suffix: the static suffix index (REST)."""

from __future__ import annotations

from specds.cli import options, values


def build_suffix(
    store: options.StorePath,
    memory: options.Memory = None,
) -> None:
    """Build a store's static suffix index, or take in what was added since, for the drafter `rest`.

    Finds every occurrence of the context's last tokens in microseconds. Documents that are in the index stay
    there; new ones become a segment, which takes in the last ones that are no larger. Until it is done, readers
    see the index as it was.

    [dim]specds build-suffix code.ds --memory 2GB[/dim]
    """
    import time

    from specds.cli.render import bar, note
    from specds.datastore.build_suffix import build_suffix as run
    from specds.datastore.store import open_store

    began = time.perf_counter()
    opened = open_store(store)
    limit = values.size("memory", memory)
    with bar("sorting suffixes", opened.manifest.tokens, "tokens/s") as update:
        built = run(opened, memory=limit, progress=lambda done, total: update(done, total, -1.0))
    if not built:
        note(f"{store}: the suffix index covers all documents already")
        return
    manifest = open_store(store).manifest
    note(
        f"{store}: sorted {sum(segment.tokens for segment in built):,} tokens in {time.perf_counter() - began:.1f} s; "
        f"the suffix index has {sum(segment.tokens for segment in manifest.suffix):,}, "
        f"in {len(manifest.suffix)} segments"
    )
