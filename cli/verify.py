"""specds verify: is every byte of a store what it was?"""

from __future__ import annotations

import typer

from specds.cli import options


def verify(
    store: options.StorePath,
) -> None:
    """Read a whole store: compare sizes and checksums with its manifest, and the indexes' numbers with the vocabulary.

    Prints what is wrong, a line each, and exits with 1; prints nothing and exits with 0 when all is well.

    [dim]specds verify code.ds && specds decode -p todo.jsonl -s code.ds -d rest[/dim]
    """
    from specds.cli.render import note, working
    from specds.datastore.contents import strange_numbers
    from specds.datastore.integrity import find_problems
    from specds.datastore.store import open_store

    with working("reading"):
        problems, files, size = find_problems(store)
        problems = problems or strange_numbers(open_store(store))
    for problem in problems:
        print(problem)
    if problems:
        raise typer.Exit(1)
    note(f"{store}: {files} files, {size:,} bytes, all as they were written")
