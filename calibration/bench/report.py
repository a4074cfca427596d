"""A result as one page: tables and plots, without script or network, for a screen, a phone or paper."""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specds.calibration.bench.figures import ALL, FEW, GENERATE, LEAST_TRIED, LENGTHS
from specds.calibration.bench.headline import best_of, caution, counted, headline
from specds.calibration.bench.judge import PLAIN
from specds.calibration.bench.plots import (
    Interval,
    Line,
    Plot,
    escape,
    interval_ticks,
    intervals,
    lines,
    settled,
    shares,
)
from specds.calibration.bench.tables import Figure, Grid, Row
from specds.printing import printable

_MOST_PROBLEMS = 20
_STYLE, _PLOT_STYLE = (Path(__file__).with_name(name) for name in ("report.css", "plot.css"))
# Of the cost curve at least so many rows are shown, and twice as many as the widest pass of the run had.
_LEAST_ROWS = 16


def report(summary: dict[str, Any]) -> str:
    """The page of a summary."""
    model = summary["options"]["model"]
    groups, methods = summary["groups"], [method["name"] for method in summary["methods"]]
    hue = {name: number for number, name in enumerate(methods)}
    plot_style = _PLOT_STYLE.read_text()
    parts = [_head(summary)]
    if groups:
        parts.append(headline(summary, groups[-1]))
    parts.append(_verdict(summary))
    if groups:
        parts += [
            _overview(summary, groups[-1]),
            _speedups(summary),
            _by_group("Speedup and MAT by task", summary),
            _quality(summary, groups[-1]),
            _drafts(summary, groups[-1], hue),
        ]
    parts += [_differences(summary), _run(summary), _words()]
    page = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        # Nothing may be asked for, whatever a prompt's or a method's name holds.
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
        'img-src data:">'
        '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
        f"<title>specds bench: {escape(model['name'])}</title><style>{plot_style}{_STYLE.read_text()}</style></head>\n"
        f"<body><main>{''.join(filter(None, parts))}</main></body></html>\n"
    )
    # What an id or a name holds that is not printable (an escape sequence, a lone surrogate) is spelled out.
    return printable(page, lines=True)


def _head(summary: dict[str, Any]) -> str:
    options = summary["options"]
    model, sampling = options["model"], options["sampling"]
    how = "greedy" if not sampling["temperature"] else f"temperature {sampling['temperature']:g}"
    machine = summary["sessions"][-1]["machine"] if summary["sessions"] else {}
    line = (
        f"{model['name']}, {model['dtype']}, {options['runtime']} runtime, {how}, at most "
        f"{options['max_new_tokens']} tokens a turn. {summary['prompts']['compared']} prompts, "
        f"{len(summary['methods'])} methods, {counted(options['repeats'], 'repeat')}. "
        f"{machine.get('gpu') or machine.get('processor', '')}"
        + (f", {counted(machine['threads'], 'thread')}." if "threads" in machine else "")
    )
    return f"<header><h1>How fast, and is it the same text?</h1><p>{escape(line)}</p></header>"


def _verdict(summary: dict[str, Any]) -> str:
    if summary["valid"]:
        ties = sum(difference["near_tie"] for difference in summary["differences"])
        text = "Every text that should be plain decoding's is, token for token"
        text += f", up to {counted(ties, 'near-tie')}." if ties else "."
        return (
            f'<p class="verdict good"><strong>Valid.</strong> {text} Steps, passes and clocks agree with what was seen '
            "from outside.</p>"
        )
    problems = summary["problems"]
    items = "".join(
        f"<li><b>{escape(problem['kind'])}</b> {escape(problem['method'])}"
        + (f", prompt {escape(problem['prompt'])}" if problem["prompt"] is not None else "")
        + f": {escape(problem['text'])}</li>"
        for problem in problems[:_MOST_PROBLEMS]
    )
    more = (
        f"<p>… and {len(problems) - _MOST_PROBLEMS} more in summary.json.</p>" if len(problems) > _MOST_PROBLEMS else ""
    )
    return (
        f'<div class="verdict bad"><strong>Not valid.</strong> {counted(len(problems), "problem")}; do not rely on '
        f"these figures.<ul>{items}</ul>{more}</div>"
    )


def _overview(summary: dict[str, Any], group: dict[str, Any]) -> str:
    generate = any(method["name"] == GENERATE for method in summary["methods"])
    columns = ["method", "× plain", *(["× generate"] if generate else []), "tokens/s", "MAT"]
    columns += ["accepted of path", "of nodes", "nodes a step", "drafting", "same text"]
    best = best_of(summary, group)
    rows = []
    for method in summary["methods"]:
        figures = group["methods"][method["name"]]
        cells: list[Any] = [Figure.of(figures["speedup"][PLAIN], 2)]
        cells += [Figure.of(figures["speedup"][GENERATE], 2)] if generate else []
        cells += [Figure.of(figures["tokens_per_second"], 1), Figure.of(figures["mat"], 2)]
        cells += [Figure.of(figures[name], 1, percent=True, alone=True) for name in ("acceptance", "node_acceptance")]
        cells += [
            Figure.of(figures["drafted_per_step"], 1, alone=True),
            Figure.of(figures["drafting"], 2, percent=True, alone=True),
        ]
        cells.append(f"{figures['same']} of {figures['answers']}" + ("" if method["lossless"] else ", lossy"))
        kind = frozenset({-1} if method["name"] == best else ())
        rows.append(Row(method["name"], cells, "peer" if method["peer"] else "", kind))
    title = f"All prompts ({group['prompts']})" if group["group"] == ALL else group["group"]
    return _section(title, _table(Grid("overview", columns, rows)))


def _by_group(title: str, summary: dict[str, Any]) -> str:
    groups = summary["groups"]
    if len(groups) < 2:
        return ""
    columns = ["method", *(f"{group['group']} ({group['prompts']})" for group in groups)]
    best = [best_of(summary, group) for group in groups]
    rows = []
    for method in summary["methods"]:
        figures = [group["methods"][method["name"]] for group in groups]
        cells = [(Figure.of(some["speedup"][PLAIN], 2), Figure.of(some["mat"], 2, alone=True)) for some in figures]
        marked = frozenset(place for place, name in enumerate(best) if name == method["name"])
        rows.append(Row(method["name"], cells, best=marked))
    return _section(
        title, _table(Grid("by-task", columns, rows, ("", "MAT"))), "The fastest of each task stands in bold."
    )


def _speedups(summary: dict[str, Any]) -> str:
    groups = summary["groups"]
    rows = {
        group["group"]: [
            Interval(name, **figures["speedup"][PLAIN], best=name == best_of(summary, group))
            for name, figures in group["methods"].items()
            if name != PLAIN
        ]
        for group in groups
    }
    every = [row for some in rows.values() for row in some]
    if not every:
        return ""
    ticks = interval_ticks(every, 1.0)
    figures = []
    for group in groups:
        title = f"{group['group']} ({counted(group['prompts'], 'prompt')})"
        plot = intervals(f"Speedup: {title}", rows[group["group"]], 1.0, "× plain decoding", ticks)
        few = f"⚠ Fewer than {FEW} prompts." if group["prompts"] < FEW else ""
        figures.append(_figure(title, plot, few))
    return _section(
        "Speedup by task",
        (caution(groups) if len(groups) > 1 else "") + f'<div class="plots">{"".join(figures)}</div>',
        "Median over prompts of plain decoding's time per token over the method's; bars are 95 % intervals by "
        "bootstrap over prompts, paired. All panels have one axis; the fastest has a ring.",
    )


def _quality(summary: dict[str, Any], group: dict[str, Any]) -> str:
    lossy = [method["name"] for method in summary["methods"] if not method["lossless"]]
    if not lossy:
        return ""
    rows = []
    for name in [PLAIN, *lossy]:
        figures = group["methods"][name]
        cells: list[Any] = [Figure.of(figures["speedup"][PLAIN], 2), Figure(figures["log_p"], digits=3)]
        cells.append(f"{figures['same']} of {figures['answers']}")
        cells += [Figure(figures[key], digits=3) for key in ("rouge_l_plain", "rouge_l")]
        cells += [Figure(figures["correct"], digits=1, percent=True), str(figures["graded"])]
        rows.append(Row(name, cells))
    columns = ["method", "× plain", "log p a token", "unchanged", "ROUGE-L to plain", "to reference", "correct", "of"]
    text = (
        "How good the texts of lossy methods are. log p is the mean log-probability of the text's tokens under the "
        "target."
    )
    return _section("Quality", _table(Grid("quality", columns, rows)), text)


def _drafts(summary: dict[str, Any], group: dict[str, Any], hue: dict[str, int]) -> str:
    steps = {name: summary["steps"][name] for name in hue if name in summary["steps"]}
    drafting = {name: counts for name, counts in steps.items() if len(counts["budget"]) > 1}
    figures = []
    if drafting:
        title = "Accepted tokens a step"
        plot = shares(title, [(name, counts["shares"]) for name, counts in drafting.items()], LENGTHS, "share of steps")
        figures.append(_figure(title, plot, "How many drafted tokens a step accepts, prefills left out."))
        depth = [_acceptance(name, counts["depth"], hue[name]) for name, counts in drafting.items()]
        depth = [line for line in depth if line.points]
        if depth:
            title = "Acceptance by depth"
            figures.append(
                _figure(
                    title,
                    lines(title, depth, "depth in the draft", "accepted there"),
                    f"Of the steps that accepted all before a depth and drafted there, the share that accepted a "
                    f"token, with 95 % intervals by bootstrap over prompts. Depths tried less than {LEAST_TRIED} times "
                    "are not shown.",
                )
            )
        title = "MAT against budget"
        mat = [
            Line(name, [(size["budget"], size["mat"]) for size in counts["budget"]], hue[name])
            for name, counts in drafting.items()
        ]
        figures.append(
            _figure(
                title,
                lines(title, mat, "nodes verified a step, at most", "MAT", doubling=True, least=1.0),
                "What the same steps would have accepted, had only their likeliest nodes been verified. An estimate: "
                "the steps after them would have been others. The last point is what was measured.",
            )
        )
    figures.append(_cost(summary))
    return _section("Drafts and passes", f'<div class="plots">{"".join(filter(None, figures))}</div>')


def _acceptance(name: str, depths: Sequence[dict[str, Any]], hue: int) -> Line:
    shown = [level for level in depths if level["rate"] is not None]
    band = [None if level["low"] is None else (level["low"], level["high"]) for level in shown]
    return Line(name, [(level["depth"], level["rate"]) for level in shown], hue, band=band)


def _cost(summary: dict[str, Any]) -> str:
    curve, series = summary["cost"], []
    seen = [(size["rows"], size["seconds"] * 1e3) for size in summary["passes"] if size["seconds"] > 0]
    reach = 2.0 ** math.ceil(math.log2(max(_LEAST_ROWS, *(2 * rows for rows, _ in seen)))) if seen else math.inf
    if curve:
        for place, (context, seconds) in enumerate(zip(curve["contexts"], curve["seconds"], strict=True)):
            points = [(n, t * 1e3) for n, t in zip(curve["rows"], seconds, strict=True) if n <= reach and t > 0]
            series.append(Line(f"at context length {context:,}", points, place))
    if seen:
        series.append(Line("in this run", seen, len(series), marks=True))
    series = [line for line in series if line.points]
    if not series:
        return ""
    beyond = curve and max(curve["rows"]) > reach
    return _figure(
        "Cost of a pass",
        lines(
            "Cost of a pass", series, "query tokens: the last one and the drafted ones", "ms", doubling=True, log=True
        ),
        "Lines are T(n) as `specds profile` measures it; dots are medians of this run's passes, verification included. "
        "Both axes are logarithmic."
        + (f" What passes of more than {reach:.0f} query tokens cost stands in summary.json." if beyond else ""),
    )


def _differences(summary: dict[str, Any]) -> str:
    differences = summary["differences"]
    if not differences:
        return ""
    rows = []
    for difference in differences[:_MOST_PROBLEMS]:
        cells: list[Any] = [difference["prompt"], str(difference["differs_turn"]), str(difference["differs_at"])]
        cells += [Figure(difference["gap"], digits=5), "yes" if difference["near_tie"] else "no"]
        rows.append(Row(difference["method"], cells))
    columns = ["method", "prompt", "turn", "token", "gap in logits", "near-tie"]
    text = (
        "Where a lossless method's text leaves plain decoding's. Up to a gap of "
        f"{summary['near_tie']:g} logits rounding decides."
    )
    if len(differences) > _MOST_PROBLEMS:
        text += f" {len(differences) - _MOST_PROBLEMS} more stand in summary.json."
    return _section("Differences", _table(Grid("differences", columns, rows)), text)


def _run(summary: dict[str, Any]) -> str:
    blocks = []
    where = {json.dumps([session["machine"], session["versions"], session["git"]]) for session in summary["sessions"]}
    if len(where) > 1:
        blocks.append('<p class="warning">This run was stopped and gone on with on another machine or version.</p>')
    for session in summary["sessions"]:
        commit = (
            f"{session['git']['commit'][:12]}{' with changes' if session['git']['changed'] else ''}"
            if session["git"]
            else "–"
        )
        facts = {
            "date": session["date"],
            "command": session["command"],
            "git": commit,
            **session["machine"],
            **session["versions"],
        }
        items = "".join(
            f"<dt>{escape(name)}</dt><dd>{escape(str(value))}</dd>"
            for name, value in facts.items()
            if value is not None
        )
        blocks.append(f"<dl>{items}</dl>")
    written = json.dumps(summary["options"], indent=1, ensure_ascii=False)
    options = "\n".join(map(escape, written.split("\n")))
    blocks.append(f"<details><summary>Options</summary><pre>{options}</pre></details>")
    return _section("The run", "".join(blocks))


def _words() -> str:
    words = {
        "MAT": "mean accepted tokens: committed tokens per forward pass of the target, the prompt's pass included",
        "accepted of path": "accepted tokens over the length of the best drafted path",
        "of nodes": "accepted tokens over all drafted nodes",
        "drafting": "share of the time spent in the drafter",
        "tokens/s": "token ids over wall time, the prompt's pass included",
        "× plain": "against plain decoding on the same runtime, prompt by prompt",
        "× generate": "against transformers' model.generate",
    }
    items = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in words.items())
    text = (
        "Small numbers are 95 % intervals by bootstrap over prompts; the same prompts are drawn for all methods. A row "
        "for each prompt, method and repeat stands in results.parquet, a row for each pass in steps.parquet, all "
        "plotted numbers in summary.json."
    )
    return _section("Words", f"<dl>{items}</dl>", text)


def _section(title: str, body: str, text: str = "") -> str:
    return f"<section><h2>{escape(title)}</h2>{f'<p>{escape(text)}</p>' if text else ''}{body}</section>"


def _figure(title: str, plot: Plot, text: str = "") -> str:
    file = plot.file(settled(_PLOT_STYLE.read_text()))
    save = _save(("SVG", f"{_file_name(plot.title)}.svg", "image/svg+xml", file))
    caption = f"<figcaption>{escape(text)}</figcaption>" if text else ""
    return f"<figure><h3>{escape(title)}</h3>{plot.inline()}{caption}{save}</figure>"


def _table(grid: Grid) -> str:
    return grid.html() + _save(
        ("CSV", f"{grid.name}.csv", "text/csv", grid.csv()), ("LaTeX", f"{grid.name}.tex", "text/x-tex", grid.latex())
    )


def _save(*files: tuple[str, str, str, str]) -> str:
    """Links that hold the files themselves, so that they can be saved wherever the page lies."""
    links = (
        f'<a download="{escape(name)}" href="data:{kind};base64,{base64.b64encode(text.encode()).decode()}">{what}</a>'
        for what, name, kind, text in files
    )
    return f'<p class="save">Save: {"".join(links)}</p>'


def _file_name(title: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")
