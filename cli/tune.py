"""specds tune: the drafter, options and budget that would have been fastest on recorded answers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specds.cli import options, values
from specds.printing import printable

if TYPE_CHECKING:
    from specds.calibration.tuning import Tuning
    from specds.decode.method import Method


def tune(
    answers: options.Answers,
    methods: options.Methods,
    prompts: options.PromptOptions,
    target: options.TargetOptions,
    cost: Annotated[
        Path, typer.Option(help="T(n) of the machine that will decode: what `specds profile --json` printed there.")
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the options for `decode --config` to this file.")
    ] = None,
    group: Annotated[str | None, typer.Option(help="The prompts' field that tells tasks apart.")] = None,
    trials: Annotated[int, typer.Option(min=1, help="Most settings tried of a method.")] = 40,
    held_out: Annotated[
        float,
        typer.Option(help="Share of each group's prompts kept for the estimate; default: a third.", show_default=False),
    ] = 1 / 3,
    max_new_tokens: options.RecordedLength = None,
    as_json: options.Json = False,
) -> None:
    """Search drafters' options and budgets by replaying recorded answers, for the most tokens a second.

    From the defaults on, one option after another is changed, and what helps stays. An option or a budget that a
    method's word gives is left as it is. `decode` without a configuration, which is drafter auto, is always tried,
    with and without the stores named: that takes as long as decoding. The table shows the benefit of the fastest
    setting on prompts that it was not chosen by, for all prompts and for each group of 5 or more to judge by. Where
    it is not surely as fast there as the default, the default is what is written.

    [dim]specds tune --answers A.jsonl -p F.jsonl --cost C.json --methods pld -o T.json[/dim]
    [dim]specds decode -p todo.jsonl --config T.json > answers.jsonl[/dim]
    """
    import json

    from specds.calibration.tuning import ALL, summary
    from specds.calibration.tuning import tune as tuned
    from specds.cli.render import bar, note
    from specds.datastore.provenance import provenance
    from specds.decode.assembly import check_files, check_method
    from specds.decode.config import write_config
    from specds.decode.method import distinct, parse_methods

    chosen = distinct(parse_methods(methods))
    for method in chosen:
        check_method(method)
        check_files(method)
    curve = values.cost_curve(cost)
    assert curve is not None
    language_model = target.target()
    recorded = values.recorded(answers, prompts, language_model, most=max_new_tokens, group=group)
    with bar("tuning", None) as update:
        found = tuned(
            language_model,
            chosen,
            recorded.turns,
            curve,
            held_out=held_out,
            trials=trials,
            runtime=target.runtime,
            progress=lambda done: update(done, None, -1.0),
        )
    if as_json:
        few = dict(found.unjudged)
        print(json.dumps({"trials": found.trials, "best": summary(found), "unjudged": few}))
    else:
        _table(found)
    if output is None:
        return

    settings = {one.group: one.setting for one in found.best}
    made = provenance()
    about = {"command": made.command, "version": made.version, "date": made.date, "model": language_model.name}
    write_config(output, settings.pop(ALL), settings, {**about, "best": summary(found)})
    note(f"specds decode --config {output}" + (f", or {output}#GROUP for one of them" if settings else ""))


def _table(found: Tuning) -> None:
    """What `specds tune` found. Goes to stdout: it is what was asked for."""
    from rich.markup import escape
    from rich.table import Table

    from specds.cli.render import screen

    held_out = any(one.held_out for one in found.best)
    judged = "held-out prompts" if held_out else "the prompts it was chosen by"
    table = Table(title=f"the fastest of {found.trials:,} settings, on {judged}", title_justify="left")
    table.add_column("prompts")
    table.add_column("drafter")
    for column in ("chosen by", "judged on", "tokens/s", "untuned", "default", "margin", "95 %", "× plain"):
        table.add_column(column, justify="right", no_wrap=True)
    for one in found.best:
        tuned = one.setting != one.default
        table.add_row(
            escape(printable(one.group)),
            one.setting.drafter,
            f"{one.prompts:,}",
            f"{one.held_out or one.prompts:,}",
            f"{one.tokens_per_second:.1f}",
            f"{one.untuned_tokens_per_second:.1f}",
            f"{one.default_tokens_per_second:.1f}",
            f"{one.margin.value - 1:+.1%}" if tuned else "–",
            f"{one.margin.low - 1:+.1%} to {one.margin.high - 1:+.1%}" if tuned else "–",
            f"{one.tokens_per_second / one.plain_tokens_per_second:.2f}",
        )
    out = screen(stderr=False)
    out.print(table)
    for one in found.best:
        said = f"{printable(one.group)}: {_decode_options(one.setting)}"
        if one.setting == one.default:
            said += "  (as without a configuration)"
        out.print(said, markup=False, soft_wrap=True)
        if one.rejected:
            margin = one.rejected.margin
            out.print(
                f"  {one.rejected.setting.name} was the fastest where it was chosen; on {judged} it is "
                f"{margin.value - 1:+.1%} ({margin.low - 1:+.1%} to {margin.high - 1:+.1%}) against decoding without a "
                "configuration, so that the default stays",
                markup=False,
                soft_wrap=True,
            )
    if found.unjudged:
        names = ", ".join(f"{printable(name)} ({count})" for name, count in found.unjudged)
        out.print(f"too few prompts to be judged, so that `all` holds for them: {names}", markup=False, soft_wrap=True)


def _decode_options(setting: Method) -> str:
    from specds.decode.method import written_budget

    words = [f"--drafter {setting.drafter}", *(f"--store {path}" for path in setting.paths)]
    options = [f"--set {name}={value}" for name, value in setting.options.items()]
    return " ".join([*words, f"--budget {written_budget(setting.budget)}", *options])
