"""specds profile: what a forward pass of the target over n query tokens costs on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from specds.cli import options, values

_ENOUGH, _MOST = 16, 4096

if TYPE_CHECKING:
    from specds.decode.pricing.curve import CostCurve


def profile(
    target: options.TargetOptions,
    tokens: Annotated[
        str | None, typer.Option(metavar="N,N,…", help="Query tokens of a forward pass, from 1 on; default: 1 to 128.")
    ] = None,
    contexts: Annotated[
        str | None, typer.Option(metavar="N,N,…", help="Context lengths at which it is measured.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Forward passes of each kind; medians are taken.")] = 7,
    as_json: options.Json = False,
) -> None:
    """Measure the verify cost curve T(n) of a model on this machine, and keep it.

    A step over n tokens takes T(n); plain decoding takes T(1) a token. `decode --budget auto` chooses its drafts by
    this curve. Without a profile it makes do with a quick one; run this when nothing else is running.

    [dim]specds profile --model ./my-model --device cuda[/dim]
    """
    import json

    import torch

    from specds.cli.render import bar, note
    from specds.decode.pricing import measurement
    from specds.decode.targets import choose_runtime, make_target
    from specds.errors import UsageError

    language_model = target.target()
    runtime = choose_runtime(language_model, target.runtime)
    with options.reading(language_model):
        decoder = make_target(language_model, runtime)
    counts = values.numbers("--tokens", tokens) if tokens else list(measurement.ROWS)
    lengths = values.numbers("--contexts", contexts) if contexts else list(measurement.CONTEXTS)
    if counts[0] != 1:
        raise UsageError(f"--tokens begins with {counts[0]}", "1 is plain decoding, against which the others count")
    if counts[-1] > _MOST:
        raise UsageError(f"--tokens ends with {counts[-1]}", f"at most {_MOST}")
    longest = language_model.context_length - counts[-1]
    if contexts and lengths[-1] > longest:
        raise UsageError(
            f"--contexts ends with {lengths[-1]}", f"before {counts[-1]} query tokens the model holds {longest} tokens"
        )
    lengths = [context for context in lengths if context <= longest] or [max(1, longest)]
    with bar("measuring", None, "") as update:
        curve = measurement.measure(
            decoder,
            vocabulary=language_model.config.vocab_size,
            rows=counts,
            contexts=lengths,
            repeats=repeats,
            progress=lambda done, total: update(done, total, -1.0),
        )
    if as_json:
        print(json.dumps(curve.record()))
    else:
        _curve(f"{language_model.name}, {language_model.dtype}, {runtime} runtime", curve)
    if counts[-1] < _ENOUGH:
        note(f"not kept: `--budget auto` would never draft more than --tokens goes to, and {_ENOUGH} is too few")
        return
    path = measurement.profile_path(language_model, runtime, torch.get_num_threads())
    measurement.save(curve, path)
    note(f"kept in {path}")


def _curve(title: str, curve: CostCurve) -> None:
    """T(n) as a table and a plot. Goes to stdout: it is what was asked for."""
    from rich.table import Table

    from specds.cli.render import screen

    out = screen(stderr=False)
    table = Table(title=f"T(n): {title}", title_justify="left")
    table.add_column("query tokens", justify="right")
    for context in curve.contexts:
        table.add_column(f"ms at {context:,}", justify="right")
        table.add_column("× T(1)", justify="right")
    longest = float(curve.seconds[-1, -1])
    table.add_column(f"at {curve.contexts[-1]:,}")
    for place, count in enumerate(curve.rows):
        cells = []
        for line in curve.seconds:
            cells += [f"{line[place] * 1e3:.2f}", f"{line[place] / line[0]:.2f}"]
        table.add_row(str(count), *cells, "█" * max(1, round(30 * float(curve.seconds[-1, place]) / longest)))
    out.print(table)
