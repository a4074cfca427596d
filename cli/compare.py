"""specds compare: two results of specds bench side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def compare(
    first: Annotated[Path, typer.Argument(help="A result's directory.")],
    second: Annotated[Path, typer.Argument(help="Another.")],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Show two results side by side: what was changed, both figures, and whether their intervals overlap.

    Where both hold the same prompts, the last column is the second's tokens/s over the first's, prompt by prompt.

    [dim]specds compare before after[/dim]
    """
    import json

    from specds.calibration.bench.compare import compare as read
    from specds.cli.render import result_comparison

    found = read(first, second)
    if as_json:
        print(json.dumps(found))
    else:
        result_comparison(found)
