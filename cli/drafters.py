"""specds drafters: what there is to choose from, and every option."""

from __future__ import annotations

from typing import Any


def drafters() -> None:
    """List the drafters and verifiers, with the options that --set and --verifier-set take.

    [dim]specds decode -p todo.jsonl -s code.ds -d dresd --set drafts=3 --set length=20[/dim]
    """
    from specds.cli.render import screen
    from specds.decode.assembly import drafter_class
    from specds.decode.drafters import DRAFTERS
    from specds.decode.registry import load
    from specds.decode.verifiers import VERIFIERS

    out = screen(stderr=False)
    for name in DRAFTERS:
        kind = drafter_class(name)
        verb = "needs" if kind.store_required else "takes"
        index = " or ".join(kind.indexes)
        needs = f"  [dim]({verb} --store with a {index} index)[/dim]" if index else ""
        out.print(f"[bold]{name}[/bold]: {kind.summary}{needs}")
        if kind.source:
            out.print(f"  {kind.source}")
        for table in _options(kind.Options):
            out.print(table)
    out.print()
    for name in VERIFIERS:
        verifier = load(VERIFIERS, name, "verifier")
        text = "lossless" if verifier.lossless else "lossy"
        out.print(f"[bold]--verifier {name}[/bold] ({text}): {verifier.summary}")
        for table in _options(verifier.Options):
            out.print(table)


def _options(cls: Any) -> list[Any]:
    """A table of options; nothing where there are none."""
    from rich.table import Table

    from specds.decode.registry import describe_options

    table = Table(box=None, show_header=False, padding=(0, 2, 0, 2))
    for option, default, help in describe_options(cls):
        table.add_row(f"{option}={default}", help)
    return [table] if table.row_count else []
