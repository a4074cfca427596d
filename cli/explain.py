"""specds explain: where the speed of a run came from."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specds.cli import options, values
from specds.printing import printable

if TYPE_CHECKING:
    from specds.calibration.explanation import Explanation


def explain(
    trace: Annotated[Path, typer.Argument(help="What `specds decode --trace` wrote.")],
    prompts: options.OptionalPromptOptions,
    target: options.TargetOptions,
    store: options.Stores = None,
    cost: options.Cost = None,
    as_json: options.Json = False,
) -> None:
    """Show which sources proposed the tokens that were accepted, what each cost, and what the run would be without it.

    From the trace alone it says what the forward passes that were made would have lost. With the prompts that were
    decoded (and the stores) drafter auto is also replayed on the answers without each source in turn, and drafts what
    the others know instead; that takes as long as decoding for each source.

    [dim]specds decode -p some.jsonl -s code.ds --trace T.parquet > answers.jsonl[/dim]
    [dim]specds explain T.parquet[/dim]
    [dim]specds explain T.parquet -p some.jsonl -s code.ds --cost cost.json[/dim]
    """
    import dataclasses
    import json

    from specds.calibration.explanation import explain as explained
    from specds.calibration.trace import lacking
    from specds.cli.render import bar, note, replay_table

    explanation = explained(str(trace))
    if lacks := lacking(str(trace)):
        note(f"note: {trace} lacks the steps of {lacks:,} answers of its run")
    summaries = []
    if prompts.prompts:
        from specds.calibration.replay import Replay, summarise
        from specds.decode.method import parse_method

        curve = values.cost_curve(cost)
        language_model = target.target()
        turns = values.recorded(str(trace), prompts, language_model).turns
        name = ":".join(["auto", *map(str, store or [])])
        names = [source.name for source in explanation.sources if source.name != "model"]
        words = [name, *(f"{name}?without={left_out}" for left_out in names)]
        budget = values.replay_budget(None, curve)
        methods = [parse_method(word, budget) for word in words]
        replay = Replay(language_model, methods, curve=curve, runtime=target.runtime)
        rows = []
        with bar("replaying", len(turns)) as update:
            for number, turn in enumerate(turns, 1):
                rows += [dataclasses.replace(row, steps=()) for row in replay.of(turn)]
                update(number, None, -1.0)
        summaries = summarise(rows)
    if as_json:
        record = dataclasses.asdict(explanation)
        print(json.dumps({**record, **({"replayed": [summary.row() for summary in summaries]} if summaries else {})}))
        return
    _table(str(trace), explanation)
    if summaries:
        replay_table("replayed without each source", summaries)


def _table(title: str, explanation: Explanation) -> None:
    """What `specds explain` found. Goes to stdout: it is what was asked for."""
    from rich.markup import escape
    from rich.table import Table

    from specds.cli.render import screen

    out = screen(stderr=False)
    out.print(f"[bold]{escape(printable(title))}[/bold]  drafter {escape(printable(explanation.drafter))}")
    steps = max(explanation.steps, 1)
    out.print(
        f"{explanation.tokens:,} tokens in {explanation.steps:,} steps: "
        f"{explanation.tokens / steps:.2f} a step, {explanation.drafted / steps:.1f} drafted, "
        f"{explanation.accepted / max(explanation.drafted, 1):.0%} of these accepted"
    )
    faster = explanation.plain / explanation.seconds if explanation.seconds else 0.0
    out.print(
        f"{explanation.seconds:.2f} s, {explanation.drafting / max(explanation.seconds, 1e-9):.1%} of it drafting; "
        f"about {explanation.plain:.2f} s without drafts ({faster:.2f}×); "
        f"one more query token takes {1e3 * explanation.row:.2f} ms"
    )
    if explanation.passes < explanation.steps:
        out.print(
            f"{explanation.steps / explanation.passes:.1f} requests shared a forward pass on average: seconds are "
            "shares of passes, by query tokens, and without drafts as many would share them"
        )
    table = Table(title="by source; a token can have several", title_justify="left")
    table.add_column("source", overflow="fold")
    for column in ("drafted", "accepted", "rate", "only it", "asking, ms", "without it, s", "slower"):
        table.add_column(column, justify="right", no_wrap=True)
    for source in explanation.sources:
        table.add_row(
            escape(printable(source.name)),
            f"{source.drafted:,}",
            f"{source.accepted:,}",
            f"{source.accepted / source.drafted:.0%}" if source.drafted else "–",
            f"{source.alone:,}",
            "–" if source.seconds is None else f"{1e3 * source.seconds:.1f}",
            f"{source.without:.2f}",
            f"{source.without / explanation.seconds - 1:+.1%}" if explanation.seconds else "–",
        )
    out.print(table)
