"""specds profile: what a pass of the target over n tokens costs on this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from specds.cli import options

_ENOUGH, _MOST = 16, 4096


def profile(
    target: options.TargetOptions,
    tokens: Annotated[
        str | None, typer.Option(metavar="N,N,…", help="Query tokens of a pass, from 1 on; default: 1 to 128.")
    ] = None,
    contexts: Annotated[
        str | None, typer.Option(metavar="N,N,…", help="Context lengths at which it is measured.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Forward passes of each kind; medians are taken.")] = 7,
    as_json: Annotated[bool, typer.Option("--json", help="The curve as JSON on stdout.")] = False,
) -> None:
    """Measure the verify cost curve T(n) of a model on this machine, and keep it.

    A step over n tokens takes T(n); plain decoding takes T(1) a token. `decode --budget auto` chooses its drafts by
    this curve. Without a profile it makes do with a quick one; run this when nothing else is running.

    [dim]specds profile --model ./my-model --device cuda[/dim]
    """
    import json

    import torch

    from specds.cli.render import bar, cost_curve, note
    from specds.decode.pricing import measurement
    from specds.decode.targets import choose_runtime, make_target
    from specds.errors import UsageError

    language_model = target.target()
    runtime = choose_runtime(language_model, target.runtime)
    with options.reading(language_model):
        decoder = make_target(language_model, runtime)
    counts = options.numbers("--tokens", tokens) if tokens else list(measurement.ROWS)
    behind = options.numbers("--contexts", contexts) if contexts else list(measurement.CONTEXTS)
    if counts[0] != 1:
        raise UsageError(f"--tokens begins with {counts[0]}", "1 is plain decoding, against which the others count")
    if counts[-1] > _MOST:
        raise UsageError(f"--tokens ends with {counts[-1]}", f"at most {_MOST}")
    longest = language_model.context_length - counts[-1]
    if contexts and behind[-1] > longest:
        raise UsageError(
            f"--contexts ends with {behind[-1]}", f"before {counts[-1]} query tokens the model holds {longest} tokens"
        )
    behind = [context for context in behind if context <= longest] or [max(1, longest)]
    with bar("measuring", None, "") as update:
        curve = measurement.measure(
            decoder,
            vocabulary=language_model.config.vocab_size,
            rows=counts,
            contexts=behind,
            repeats=repeats,
            progress=lambda done, total: update(done, total, -1.0),
        )
    if as_json:
        print(json.dumps(curve.record()))
    else:
        cost_curve(f"{language_model.name}, {language_model.dtype}, {runtime} runtime", curve)
    if counts[-1] < _ENOUGH:
        note(f"not kept: `--budget auto` would never draft more than --tokens goes to, and {_ENOUGH} is too few")
        return
    path = measurement.profile_path(language_model, runtime, torch.get_num_threads())
    measurement.save(curve, path)
    note(f"kept in {path}")
