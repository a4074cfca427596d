"""specds replay: what drafters and stores would have had accepted of answers that are there already."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specds.cli import options, values


def replay(
    answers: options.Answers,
    methods: options.Methods,
    prompts: options.PromptOptions,
    target: options.TargetOptions,
    budget: options.ReplayBudget = None,
    cost: options.Cost = None,
    max_new_tokens: options.RecordedLength = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many answers.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write a JSON line an answer and method to this file.")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Replay drafters on recorded answers: the accepted tokens that decoding would count, without decoding.

    The table says for each method what decoding with it would have counted: MAT and acceptance are exact for answers
    of a lossless run and a fixed --budget. pld, rest and others that look at tokens only need no model; those that
    look at hidden states or likely tokens run it once over each answer; auto and recycling (also as the fallback of sam
    and respec) run it at every step, as decoding does. With --cost the table predicts speed, too.

    [dim]specds decode -p some.jsonl -d none --output plain.jsonl[/dim]
    [dim]specds replay --answers plain.jsonl -p some.jsonl --methods pld,rest:code.ds[/dim]
    """
    import contextlib
    import dataclasses
    import itertools
    import json

    from specds.calibration.replay import Replay, summarise
    from specds.cli.render import bar, replay_table
    from specds.decode.assembly import check_files, check_method
    from specds.decode.method import distinct, parse_methods

    curve = values.cost_curve(cost)
    chosen = distinct(parse_methods(methods, values.replay_budget(budget, curve)))
    for method in chosen:
        check_method(method)
        check_files(method)
    language_model = target.target()
    recorded = values.recorded(answers, prompts, language_model, most=max_new_tokens)
    replayer = Replay(language_model, chosen, curve=curve, runtime=target.runtime)
    rows = []
    turns = list(itertools.islice(recorded.turns, limit))
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(output.open("w")) if output is not None else None
        update = stack.enter_context(bar("replaying", len(turns)))
        for number, turn in enumerate(turns, 1):
            for row in replayer.of(turn):
                rows.append(dataclasses.replace(row, steps=()))  # they hold on to the model's states
                if file is not None:
                    file.write(json.dumps(row.record()) + "\n")
            update(number, None, -1.0)
    summaries = summarise(rows)
    if as_json:
        print(json.dumps({"answers": len(turns), "methods": [summary.row() for summary in summaries]}))
    else:
        replay_table(f"{len(turns):,} answers of {language_model.name}", summaries)
