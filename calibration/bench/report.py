"""A result as one page: tables and plots, without script or network, for a screen, a phone or paper."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from specds.calibration.bench.figures import ALL, GENERATE, LEAST_TRIED, LENGTHS
from specds.calibration.bench.judge import PLAIN
from specds.calibration.bench.plots import Interval, Line, intervals, legend, lines, shares
from specds.printing import printable

_MOST_PROBLEMS = 20
_STYLE = Path(__file__).with_name("report.css")


def report(summary: dict[str, Any]) -> str:
    """The page of a summary."""
    model = summary["options"]["model"]
    groups, methods = summary["groups"], [one["name"] for one in summary["methods"]]
    hue = {name: number for number, name in enumerate(methods)}
    parts = [_head(summary), _verdict(summary)]
    if groups:
        parts += [
            _overview(summary, groups[-1]),
            _section(
                "Speedup by task",
                _speedups(groups),
                "Median over prompts of plain decoding's time per token over the method's; bars are 95 % intervals by "
                "bootstrap over prompts, paired.",
            ),
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
        f"<title>specds bench: {escape(model['name'])}</title><style>{_STYLE.read_text()}</style></head>\n"
        f"<body><main>{''.join(filter(None, parts))}</main></body></html>\n"
    )
    # What an id or a name holds that is no character to be seen (an escape sequence, a lone surrogate) is spelled out.
    return printable(page, lines=True)


def _head(summary: dict[str, Any]) -> str:
    options = summary["options"]
    model, sampling = options["model"], options["sampling"]
    how = "greedy" if not sampling["temperature"] else f"temperature {sampling['temperature']:g}"
    machine = summary["sessions"][-1]["machine"] if summary["sessions"] else {}
    line = (
        f"{model['name']}, {model['dtype']}, {options['runtime']} runtime, {how}, at most "
        f"{options['max_new_tokens']} tokens a turn. {summary['prompts']['compared']} prompts, "
        f"{len(summary['methods'])} methods, {_count(options['repeats'], 'repeat')}. "
        f"{machine.get('gpu') or machine.get('processor', '')}, {machine.get('threads', '?')} threads."
    )
    return f"<header><h1>How fast, and is it the same text?</h1><p>{escape(line)}</p></header>"


def _verdict(summary: dict[str, Any]) -> str:
    if summary["valid"]:
        ties = sum(one["near_tie"] for one in summary["differences"])
        text = "Every text that should be plain decoding's is, token for token"
        text += f", up to {_count(ties, 'near-tie')}." if ties else "."
        return (
            f'<p class="verdict good"><strong>Valid.</strong> {text} Steps, passes and clocks agree with what was seen '
            "from outside.</p>"
        )
    problems = summary["problems"]
    items = "".join(
        f"<li><b>{escape(one['kind'])}</b> {escape(one['method'])}"
        + (f", prompt {escape(one['prompt'])}" if one["prompt"] is not None else "")
        + f": {escape(one['text'])}</li>"
        for one in problems[:_MOST_PROBLEMS]
    )
    more = (
        f"<p>… and {len(problems) - _MOST_PROBLEMS} more in summary.json.</p>" if len(problems) > _MOST_PROBLEMS else ""
    )
    return (
        f'<div class="verdict bad"><strong>Not valid.</strong> {_count(len(problems), "problem")}; do not rely on '
        f"these figures.<ul>{items}</ul>{more}</div>"
    )


def _overview(summary: dict[str, Any], group: dict[str, Any]) -> str:
    generate = any(one["name"] == GENERATE for one in summary["methods"])
    columns = ["method", "× plain", *(["× generate"] if generate else []), "tokens/s", "MAT"]
    columns += ["accepted of path", "of nodes", "nodes a step", "drafting", "same text"]
    rows = []
    for one in summary["methods"]:
        own = group["methods"][one["name"]]
        cells = [_estimate(own["speedup"][PLAIN], 2)]
        cells += [_estimate(own["speedup"][GENERATE], 2)] if generate else []
        cells += [_estimate(own["tokens_per_second"], 1), _estimate(own["mat"], 2)]
        cells += [_percent(own[name]) for name in ("acceptance", "node_acceptance")]
        drafted = own["drafted_per_step"]
        cells += [f"{drafted['value']:.1f}" if drafted else "–", _percent(own["drafting"], 2)]
        lossy = "" if one["lossless"] else "<br><small>not promised</small>"
        cells.append(f"{own['same']} of {own['answers']}{lossy}")
        kind = " <small>peer</small>" if one["peer"] else ""
        rows.append((escape(one["name"]) + kind, cells))
    return _section(
        f"All prompts ({group['prompts']})" if group["group"] == ALL else escape(group["group"]), _table(columns, rows)
    )


def _by_group(title: str, summary: dict[str, Any]) -> str:
    groups = summary["groups"]
    if len(groups) < 2:
        return ""
    columns = ["method", *(f"{group['group']} ({group['prompts']})" for group in groups)]
    rows = []
    for one in summary["methods"]:
        cells = []
        for group in groups:
            own = group["methods"][one["name"]]
            mat = f"MAT {own['mat']['value']:.2f}" if own["mat"] else "MAT –"
            cells.append(f"{_estimate(own['speedup'][PLAIN], 2)}<br>{mat}")
        rows.append((escape(one["name"]), cells))
    return _section(title, _table(columns, rows))


def _speedups(groups: Sequence[dict[str, Any]]) -> str:
    figures = []
    for group in groups:
        rows = [Interval(name, **own["speedup"][PLAIN]) for name, own in group["methods"].items() if name != PLAIN]
        if rows:
            title = f"{group['group']} ({_count(group['prompts'], 'prompt')})"
            figures.append(_figure(title, intervals(f"Speedup: {title}", rows, 1.0, "× plain decoding")))
    return f'<div class="plots">{"".join(figures)}</div>'


def _quality(summary: dict[str, Any], group: dict[str, Any]) -> str:
    lossy = [one["name"] for one in summary["methods"] if not one["lossless"]]
    if not lossy:
        return ""
    rows = []
    for name in [PLAIN, *lossy]:
        own = group["methods"][name]
        graded = f" <small>of {own['graded']}</small>" if own["graded"] else ""
        cells = [_estimate(own["speedup"][PLAIN], 2), f"{own['log_p']:.3f}" if own["log_p"] is not None else "–"]
        cells += [f"{own['same']} of {own['answers']}"]
        cells += [f"{own[key]:.3f}" if own[key] is not None else "–" for key in ("rouge_l_plain", "rouge_l")]
        cells += [(f"{own['correct']:.1%}" if own["correct"] is not None else "–") + graded]
        rows.append((escape(name), cells))
    columns = ["method", "× plain", "log p a token", "unchanged", "ROUGE-L to plain", "to reference", "correct"]
    text = (
        "Methods that do not promise plain decoding's text: what it is worth. log p is the mean log-probability of the "
        "text's tokens under the target."
    )
    return _section("Quality", _table(columns, rows), text)


def _drafts(summary: dict[str, Any], group: dict[str, Any], hue: dict[str, int]) -> str:
    steps = {name: summary["steps"][name] for name in hue if name in summary["steps"]}
    drafting = {name: own for name, own in steps.items() if len(own["budget"]) > 1}
    figures = []
    if drafting:
        rows = [(name, own["shares"]) for name, own in drafting.items()]
        keys = "".join(f'<li><i class="step{place}"></i>{label}</li>' for place, label in enumerate(LENGTHS))
        figures.append(
            _figure(
                "Accepted tokens a step",
                shares("Accepted tokens a step", rows, LENGTHS, "share of steps") + f'<ul class="legend">{keys}</ul>',
                "How many drafted tokens a step accepts, prefills left out.",
            )
        )
        depth = [
            Line(name, [(one["depth"], one["rate"]) for one in own["depth"] if one["rate"] is not None], hue[name])
            for name, own in drafting.items()
        ]
        depth = [line for line in depth if line.points]
        if depth:
            figures.append(
                _figure(
                    "Acceptance by depth",
                    lines("Acceptance by depth", depth, "depth in the draft", "accepted there") + legend(depth),
                    f"Of the steps that accepted all before a depth and drafted there, the share that accepted a "
                    f"token. Depths tried less than {LEAST_TRIED} times are not shown.",
                )
            )
        mat = [
            Line(name, [(one["budget"], one["mat"]) for one in own["budget"]], hue[name])
            for name, own in drafting.items()
        ]
        figures.append(
            _figure(
                "MAT against budget",
                lines("MAT against budget", mat, "nodes verified a step, at most", "MAT", doubling=True, least=1.0)
                + legend(mat),
                "What the same steps would have accepted, had only their likeliest nodes been verified. An estimate: "
                "the steps after them would have been others. The last point is what was measured.",
            )
        )
    figures.append(_cost(summary))
    return _section("Drafts and passes", f'<div class="plots">{"".join(filter(None, figures))}</div>')


def _cost(summary: dict[str, Any]) -> str:
    curve = summary["cost"]
    series = []
    if curve:
        series += [
            Line(
                f"behind {context:,} tokens", [(n, t * 1e3) for n, t in zip(curve["rows"], seconds, strict=True)], place
            )
            for place, (context, seconds) in enumerate(zip(curve["contexts"], curve["seconds"], strict=True))
        ]
    seen = [(one["rows"], one["seconds"] * 1e3) for one in summary["passes"]]
    if seen:
        series.append(Line("in this run", seen, len(series), marks=True))
    if not series:
        return ""
    return _figure(
        "Cost of a pass",
        lines("Cost of a pass", series, "rows: the last token and the drafted ones", "ms", doubling=True)
        + legend(series),
        "Lines are T(n) as `specds profile` measures it; dots are medians of this run's passes, verification included.",
    )


def _differences(summary: dict[str, Any]) -> str:
    found = summary["differences"]
    if not found:
        return ""
    rows = []
    for one in found[:_MOST_PROBLEMS]:
        gap = "–" if one["gap"] is None else f"{one['gap']:.5f}"
        cells = [escape(one["prompt"]), str(one["differs_turn"]), str(one["differs_at"]), gap]
        cells.append("yes" if one["near_tie"] else "<b>no</b>")
        rows.append((escape(one["method"]), cells))
    columns = ["method", "prompt", "turn", "token", "gap in logits", "near-tie"]
    text = (
        "Where a lossless method's text leaves plain decoding's. Up to a gap of "
        f"{summary['near_tie']:g} logits rounding decides."
    )
    if len(found) > _MOST_PROBLEMS:
        text += f" {len(found) - _MOST_PROBLEMS} more stand in summary.json."
    return _section("Differences", _table(columns, rows), text)


def _run(summary: dict[str, Any]) -> str:
    blocks = []
    if len({json.dumps([one["machine"], one["versions"], one["git"]]) for one in summary["sessions"]}) > 1:
        blocks.append('<p class="warning">This run was stopped and gone on with on another machine or version.</p>')
    for one in summary["sessions"]:
        commit = f"{one['git']['commit'][:12]}{' with changes' if one['git']['changed'] else ''}" if one["git"] else "–"
        facts = {"date": one["date"], "command": one["command"], "git": commit, **one["machine"], **one["versions"]}
        items = "".join(
            f"<dt>{escape(name)}</dt><dd>{escape(str(value))}</dd>"
            for name, value in facts.items()
            if value is not None
        )
        blocks.append(f"<dl>{items}</dl>")
    options = escape(json.dumps(summary["options"], indent=1, ensure_ascii=False))
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


def _figure(title: str, body: str, text: str = "") -> str:
    return (
        f"<figure><h3>{escape(title)}</h3>{body}{f'<figcaption>{escape(text)}</figcaption>' if text else ''}</figure>"
    )


def _table(columns: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]]) -> str:
    """Cells are HTML; column names are not."""
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in columns)
    body = "".join(
        f'<tr><th scope="row">{name}</th>{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>' for name, cells in rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _estimate(one: dict[str, float | None] | None, digits: int) -> str:
    if one is None:
        return "–"
    if one["low"] is None:
        return f"{one['value']:.{digits}f}"
    return f"{one['value']:.{digits}f}<br><small>{one['low']:.{digits}f}–{one['high']:.{digits}f}</small>"


def _percent(one: dict[str, float | None] | None, digits: int = 1) -> str:
    return "–" if one is None else f"{one['value']:.{digits}%}"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" + ("" if number == 1 else "s")
