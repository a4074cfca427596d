"""The report: one page that asks nobody for anything, and shows what was measured."""

from __future__ import annotations

import base64
import csv
import json
import re
import shutil
import subprocess
from collections import defaultdict
from html.parser import HTMLParser
from pathlib import Path
from statistics import median
from typing import Any
from xml.etree import ElementTree

import pytest

from specds.calibration.bench.figures import LENGTHS
from specds.calibration.bench.report import report
from specds.calibration.bench.results import Row, read_rows, read_steps
from specds.decode.pricing.curve import CostCurve
from specds.decode.pricing.measurement import known
from specds.decode.targets import make_target
from specds.model import LanguageModel

from .conftest import Bench, case

_VOID = {"meta", "link", "br", "circle", "line", "rect", "polyline", "polygon"}
_BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


class Page(HTMLParser):
    """The page's elements; fails where they are not nested well."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None], str]] = []
        self.title = ""
        self.text = ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "svg":
            self.title = dict(attrs).get("aria-label") or ""
        self.elements.append((tag, dict(attrs), self.title))
        if tag not in _VOID or self.get_starttag_text()[-2] != "/":  # type: ignore[index]
            self.open += [] if tag in ("meta", "link", "br") else [tag]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs), self.title))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data

    def marks(self, title: str) -> list[dict[str, str | None]]:
        """The marks of a plot, by the beginning of its title."""
        return [
            attributes
            for _, attributes, plot in self.elements
            if plot.startswith(title) and "data-series" in attributes
        ]


@pytest.fixture
def measured(run_bench: Bench) -> dict[str, Any]:
    cases = [case(number, f"group {number % 2}", reference="#### 4") for number in range(6)]
    return run_bench("none,pld@6,adapld@6,pld@6!lossy?tau=0.2", cases, max_new_tokens=40, curve=True)


def test_every_plotted_number_is_in_the_parquet_files(measured: dict[str, Any], tiny: LanguageModel) -> None:
    page = Page((measured["path"] / "report.html").read_text())
    rows = read_rows(measured["path"])
    steps = [step for batch in read_steps(measured["path"]) for step in batch]
    _check_speedups(page, rows)
    _check_steps(page, steps)
    curve: CostCurve = known(make_target(tiny), tiny, "cpu")
    shown = {
        (float(mark["data-x"] or 0), float(mark["data-y"] or 0))
        for mark in page.marks("Cost of a pass")
        if mark["data-series"] != "in this run"
    }
    # No pass of the run is wider than the lossy one's budget; what matters of the curve is not much more than that.
    widest = max(step["drafted"] + 1 for step in steps if step["step"])
    assert widest <= 8
    expected = {
        (n, t * 1e3)
        for line in curve.seconds
        for n, t in zip(curve.rows, line, strict=True)
        if n <= max(16, 2 * widest)
    }
    assert shown == expected


def _check_speedups(page: Page, rows: list[Row]) -> None:
    per_token = {(row["method"], row["prompt"]): row["seconds"] / row["new_tokens"] for row in rows}
    for group in ("group 0", "group 1", "all"):
        prompts = {row["prompt"] for row in rows if group in (row["group"], "all")}
        marks = page.marks(f"Speedup: {group} ")
        assert [mark["data-series"] for mark in marks] == ["pld@6", "adapld@6", "pld@6!lossy?tau=0.2"]
        for mark in marks:
            each = [per_token["none", one] / per_token[str(mark["data-series"]), one] for one in prompts]
            value, low, high = (float(mark[f"data-{name}"] or 0) for name in ("value", "low", "high"))
            assert value == pytest.approx(median(each))
            assert min(each) - 1e-9 <= low <= value <= high <= max(each) + 1e-9


def _check_steps(page: Page, steps: list[Row]) -> None:
    of: dict[str, list[Row]] = defaultdict(list)
    for step in steps:
        of[step["method"]].append(step)
    shares: dict[str, dict[str, float]] = defaultdict(dict)
    for mark in page.marks("Accepted tokens a step"):
        shares[str(mark["data-series"])][str(mark["data-label"])] = float(mark["data-value"] or 0)
    assert set(shares) == set(of) - {"none"}
    for method, found in shares.items():
        accepted = [step["accepted"] for step in of[method] if step["step"]]
        for label, (low, high) in zip(LENGTHS, [*((n, n) for n in range(5)), (5, 7), (8, 999)], strict=True):
            share = sum(low <= one <= high for one in accepted) / len(accepted)
            assert found.get(label, 0) == pytest.approx(share)
    mat = {(str(mark["data-series"]), float(mark["data-x"] or 0)): mark for mark in page.marks("MAT against budget")}
    for method in shares:
        widest = max(step["drafted"] for step in of[method])
        whole = sum(step["committed"] for step in of[method]) / len(of[method])
        assert float(mat[method, widest]["data-y"] or 0) == pytest.approx(whole)
        assert float(mat[method, 0]["data-y"] or 0) == 1
    depth = page.marks("Acceptance by depth")
    assert depth
    for mark in depth:
        own = [step for step in of[str(mark["data-series"])] if step["step"]]
        before = int(float(mark["data-x"] or 0)) - 1
        tried = [
            step
            for step in own
            if step["accepted"] >= before and ([-1, *step["path"]][before] in step["draft_parents"])
        ]
        rate = sum(step["accepted"] > before for step in tried) / len(tried)
        assert float(mark["data-y"] or 0) == pytest.approx(rate)
        prompts = {step["prompt"] for step in tried}
        assert ("data-low" in mark) is (len(prompts) > 1)
        if len(prompts) > 1:
            rates = [
                sum(step["accepted"] > before for step in tried if step["prompt"] == one)
                / sum(step["prompt"] == one for step in tried)
                for one in prompts
            ]
            low, high = (float(mark[f"data-{name}"] or 0) for name in ("low", "high"))
            assert min(rates) - 1e-9 <= low <= rate <= high <= max(rates) + 1e-9
    assert "polygon" in {tag for tag, _, plot in page.elements if plot == "Acceptance by depth"}
    passes = [mark for mark in page.marks("Cost of a pass") if mark["data-series"] == "in this run"]
    assert passes
    for mark in passes:
        seconds = [
            step["forward_seconds"] + step["verify_seconds"]
            for step in steps
            if step["step"] and step["drafted"] + 1 == float(mark["data-x"] or 0)
        ]
        assert min(seconds) <= float(mark["data-y"] or 0) / 1e3 <= max(seconds)


def test_the_page_needs_nothing_from_outside(measured: dict[str, Any]) -> None:
    text = (measured["path"] / "report.html").read_text()
    page = Page(text)
    tags = {tag for tag, _, _ in page.elements}
    assert not tags & {"script", "img", "iframe", "object", "embed", "audio", "video", "base", "form"}
    for _, attributes, _ in page.elements:
        assert not any(name.startswith("on") for name in attributes)
        for name in ("src", "href", "xlink:href", "srcset", "action", "data"):
            # Nothing but what the page holds itself, to be saved.
            held = "download" in attributes and re.match(r"data:[a-z/+-]+;base64,", attributes.get(name) or "")
            assert held or (attributes.get(name) or "data:,") == "data:,"
    assert not re.search(r"url\(|@import|https?:", text)
    assert "viewport" in text
    assert "prefers-color-scheme: dark" in text
    assert "@media print" in text


def test_what_is_measured_is_text_and_not_markup(measured: dict[str, Any]) -> None:
    text = json.dumps({name: value for name, value in measured.items() if name != "path"})
    hostile = json.loads(text.replace("pld@6!lossy", "<script>alert(1)</script>&").replace("group 1", "<b>'g'</b>"))
    hostile["valid"] = False
    hostile["problems"] = [{"kind": "text", "method": "<em>m</em>", "prompt": "<u>", "text": "</main>"}]
    hostile["sessions"][0]["command"] = "</dd><script src='http://x'>"
    hostile["options"]["group"] = "</pre><script>\x9b2J"
    hostile["differences"] = [
        {"method": "m", "prompt": "\x1b[2J", "differs_turn": 0, "differs_at": 0, "gap": None, "near_tie": False}
    ]
    page = Page(report(hostile))
    assert not {tag for tag, _, _ in page.elements} & {"script", "em", "u"}
    assert "<script>alert(1)</script>&" in page.text
    assert "\\x1b[2J" in page.text
    assert all(one.isprintable() or one == "\n" for one in page.text)
    assert "Not valid." in page.text


def _estimates(value: float, low: float | None, high: float | None) -> dict[str, Any]:
    return {"speedup": {"none": {"value": value, "low": low, "high": high}}}


@pytest.mark.parametrize(
    ("pld", "adapld", "lossy", "says", "best"),
    [
        (
            (1.5, 1.2, 1.9),
            (2.0, 1.8, 2.2),
            (1.9, 1.8, 2.0),
            "adapld@6 is the fastest: 2.00 × plain decoding",
            "adapld@6",
        ),
        ((1.9, 1.2, 2.9), (2.0, 1.8, 2.2), (1.9, 1.8, 2.0), "Within its interval: pld@6.", "adapld@6"),
        ((1.1, 0.8, 1.9), (1.0, 0.8, 2.2), (0.9, 0.8, 1.0), "No method is surely faster than plain decoding", "pld@6"),
        ((0.7, 0.6, 0.9), (0.8, 0.6, 0.9), (0.9, 0.8, 1.0), "Plain decoding is the fastest: adapld@6", "none"),
        ((1.5, 1.2, 1.9), (1.3, 1.2, 1.9), (3.0, 2.8, 3.1), "pld@6!lossy?tau=0.2, which is not lossless", "pld@6"),
    ],
)
def test_the_page_begins_with_what_came_of_it(
    measured: dict[str, Any], pld: Any, adapld: Any, lossy: Any, says: str, best: str
) -> None:
    values = {"pld@6": pld, "adapld@6": adapld, "pld@6!lossy?tau=0.2": lossy}
    for group in measured["groups"]:
        for name, value in values.items():
            group["methods"][name] |= _estimates(*value)
    text = report(measured)
    headline = re.search(r'class="headline">(.*?)</p>', text)
    assert headline is not None
    assert says in headline[1]
    (row,) = re.findall(r'<tr class="best"><th scope="row">(.*?) <span', text)
    assert row == best
    # Three prompts a group.
    assert "group 0 (3), group 1 (3): fewer than 5 prompts" in Page(text).text
    assert "headline" not in re.sub("(?s)<style>.*</style>", "", report({**measured, "valid": False}))


def test_all_panels_have_one_axis(measured: dict[str, Any]) -> None:
    for place, group in enumerate(measured["groups"]):
        group["methods"]["pld@6"] |= _estimates(place + 1.5, None, None)
    page = report(measured)
    panels = re.findall(r'<svg class="plot"[^>]*aria-label="Speedup[^>]*>(.*?)</svg>', page)
    ticks = {tuple(re.findall(r'class="tick" x="([^"]*)"[^>]*>([^<]*)<', panel)) for panel in panels}
    assert len(panels) == 3
    assert len(ticks) == 1


def test_tables_and_plots_can_be_saved(measured: dict[str, Any]) -> None:
    summary = json.loads(json.dumps({name: value for name, value in measured.items() if name != "path"}))
    summary = json.loads(json.dumps(summary).replace("pld@6!lossy", "=pld_6%!lossy&"))
    links = [attributes for tag, attributes, _ in Page(report(summary)).elements if tag == "a"]
    files = {str(one["download"]): base64.b64decode((one["href"] or "").partition(",")[2]).decode() for one in links}
    assert len(files) == len(links) >= 9
    rows = list(csv.DictReader(files["overview.csv"].splitlines()))
    for row, method in zip(rows, summary["methods"], strict=True):
        own = summary["groups"][-1]["methods"][method["name"]]
        assert row["method"].lstrip("'") == method["name"]
        assert not row["method"].startswith("=")  # to a spreadsheet that would be a formula
        for column, figure in (("× plain", own["speedup"]["none"]), ("MAT", own["mat"])):
            assert [float(row[column + end]) for end in ("", " low", " high")] == list(figure.values())
    latex = files["overview.tex"]
    assert r"=pld\_6\%!lossy\&?tau=0.2 & " in latex
    body = [line for line in latex.splitlines() if line.endswith(r"\\")]
    assert [len(re.findall(r"(?<!\\)&", line)) for line in body] == [8] * (1 + len(rows))
    for name, file in files.items():
        if name.endswith(".svg"):
            drawing = ElementTree.fromstring(file)
            assert drawing.tag == "{http://www.w3.org/2000/svg}svg"
            assert "var(" not in file  # what draws for papers knows no variables
            assert "hue1 {" in file.replace("'", "")


def test_a_result_without_drafts_or_answers_still_has_a_page(run_bench: Bench) -> None:
    for cases in ([case(1)], [case(number, str(number)) for number in range(2)]):
        page = Page((run_bench("none", cases)["path"] / "report.html").read_text())
        assert "Valid." in page.text


@pytest.mark.skipif(_BROWSER is None, reason="no headless browser here")
def test_a_browser_shows_it_without_a_complaint_or_a_request(measured: dict[str, Any], tmp_path: Path) -> None:
    page = measured["path"] / "report.html"
    shown, complaints = _browse(page, tmp_path)
    assert "CONSOLE" not in complaints, complaints
    # What the browser made of it holds every mark.
    assert shown.count("data-series") == page.read_text().count("data-series") > 10
    # The page forbids requests, and the browser would say if one was tried.
    asking = tmp_path / "asking.html"
    asking.write_text(page.read_text().replace("<main>", "<main><img src='https://127.0.0.1:9/x.png'>"))
    assert "CONSOLE" in _browse(asking, tmp_path)[1]


@pytest.mark.skipif(_BROWSER is None, reason="no headless browser here")
def test_nothing_is_cut_on_a_phone(measured: dict[str, Any], tmp_path: Path) -> None:
    cut = "e=>e.getBoundingClientRect().right>innerWidth||e.clientWidth&&e.scrollWidth>e.clientWidth+1"
    asked = f"document.title=[...document.querySelectorAll('main,table,td,th,figure,p')].filter({cut}).length+' cut'"
    page = re.sub("<meta http-equiv[^>]*>", "", (measured["path"] / "report.html").read_text())
    phone = tmp_path / "phone.html"
    phone.write_text(page.replace("</main>", f"</main><script>{asked}</script>"))
    assert "<title>0 cut</title>" in _browse(phone, tmp_path)[0]


def _browse(page: Path, folder: Path) -> tuple[str, str]:
    """The page's elements as a browser sees them, on a phone, and what it complains of."""
    command = [str(_BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom"]
    command += [f"--user-data-dir={folder / 'profile'}", "--window-size=360,800", "--no-first-run"]
    command += ["--disable-background-networking", "--disable-component-update", "--host-rules=MAP * ~NOTFOUND"]
    done = subprocess.run([*command, page.as_uri()], capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, done.stderr
