"""specds compact: many small parts become few large ones."""

from __future__ import annotations

from specds.cli import options, values


def compact(
    store: options.StorePath,
    memory: options.Memory = None,
) -> None:
    """Put a store's segments together, and its small corpus files.

    Answers stay the same, lookups get faster, and what is left of removed documents goes. Readers see the
    store as it was until it is done.

    [dim]specds compact code.ds[/dim]
    """
    from specds.cli.render import note, working
    from specds.datastore.compaction import compact as run
    from specds.datastore.store import open_store

    limit = values.size("memory", memory)
    opened = open_store(store)
    before = opened.size()
    with working("compacting"):
        done = run(opened, memory=limit)
    names = ("corpus files", "suffix segments", "dense segments")
    said = [f"{was} → {now} {name}" for was, now, name in zip(done.before, done.after, names, strict=True) if was]
    note(f"{store}: {', '.join(said)}; {before:,} → {open_store(store).size():,} bytes")
