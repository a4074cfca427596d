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
        tuning = tuned(
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
        few = dict(tuning.unjudged)
        print(json.dumps({"trials": tuning.trials, "best": summary(tuning), "unjudged": few}))
    else:
        _table(tuning)
    if output is None:
        return

    settings = {best.group: best.setting for best in tuning.best}
    now = provenance()
    about = {"command": now.command, "version": now.version, "date": now.date, "model": language_model.name}
    write_config(output, settings.pop(ALL), settings, {**about, "best": summary(tuning)})
    note(f"specds decode --config {output}" + (f", or {output}#GROUP for one of them" if settings else ""))


def _table(tuning: Tuning) -> None:
    """What `specds tune` found. Goes to stdout: it is what was asked for."""
    from rich.markup import escape
    from rich.table import Table

    from specds.cli.render import screen

    held_out = any(best.held_out for best in tuning.best)
    judged = "held-out prompts" if held_out else "the prompts it was chosen by"
    table = Table(title=f"the fastest of {tuning.trials:,} settings, on {judged}", title_justify="left")
    table.add_column("prompts")
    table.add_column("drafter")
    for column in ("chosen by", "judged on", "tokens/s", "untuned", "default", "margin", "95 %", "× plain"):
        table.add_column(column, justify="right", no_wrap=True)
    for best in tuning.best:
        tuned = best.setting != best.default
        table.add_row(
            escape(printable(best.group)),
            best.setting.drafter,
            f"{best.prompts:,}",
            f"{best.held_out or best.prompts:,}",
            f"{best.tokens_per_second:.1f}",
            f"{best.untuned_tokens_per_second:.1f}",
            f"{best.default_tokens_per_second:.1f}",
            f"{best.margin.value - 1:+.1%}" if tuned else "–",
            f"{best.margin.low - 1:+.1%} to {best.margin.high - 1:+.1%}" if tuned else "–",
            f"{best.tokens_per_second / best.plain_tokens_per_second:.2f}",
        )
    out = screen(stderr=False)
    out.print(table)
    for best in tuning.best:
        said = f"{printable(best.group)}: {_decode_options(best.setting)}"
        if best.setting == best.default:
            said += "  (as without a configuration)"
        out.print(said, markup=False, soft_wrap=True)
        if best.rejected:
            margin = best.rejected.margin
            out.print(
                f"  {best.rejected.setting.name} was the fastest where it was chosen; on {judged} it is "
                f"{margin.value - 1:+.1%} ({margin.low - 1:+.1%} to {margin.high - 1:+.1%}) against decoding without a "
                "configuration, so that the default stays",
                markup=False,
                soft_wrap=True,
            )
    if tuning.unjudged:
        names = ", ".join(f"{printable(name)} ({count})" for name, count in tuning.unjudged)
        out.print(f"too few prompts to be judged, so that `all` holds for them: {names}", markup=False, soft_wrap=True)


def _decode_options(setting: Method) -> str:
    from specds.decode.method import written_budget

    words = [f"--drafter {setting.drafter}", *(f"--store {path}" for path in setting.paths)]
    options = [f"--set {name}={value}" for name, value in setting.options.items()]
    return " ".join([*words, f"--budget {written_budget(setting.budget)}", *options])
