"""Figures against brute force."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specds.calibration.bench.compare import overlaps
from specds.calibration.bench.figures import BUDGETS, DEPTHS, LEAST_TRIED, _Seen, middle, ratio, resamples
from specds.calibration.bench.judge import differs
from specds.calibration.bench.plots import log_ticks, nice_ticks
from specds.calibration.bench.quality import common, correct, rouge_l
from specds.decode.draft import Draft

from ...decode.drafts import drafts

numbers = st.floats(0.1, 10)


@given(st.lists(st.tuples(numbers, numbers), min_size=1, max_size=12))
@settings(max_examples=30)
def test_estimates_are_what_they_say_and_lie_in_their_intervals(pairs: list[tuple[float, float]]) -> None:
    top, bottom = (np.array(values) for values in zip(*pairs, strict=True))
    samples = resamples(len(pairs))
    assert (samples == resamples(len(pairs))).all()
    for found, value in (
        (ratio(top, bottom, samples), top.sum() / bottom.sum()),
        (middle(top / bottom, samples), np.median(top / bottom)),
    ):
        assert found is not None
        assert found["value"] == pytest.approx(value)
        if len(pairs) == 1:
            assert found["low"] is None
        else:
            assert found["low"] is not None
            assert found["high"] is not None
            assert found["low"] <= found["high"]
            assert (top / bottom).min() - 1e-9 <= found["low"]
            assert found["high"] <= (top / bottom).max() + 1e-9
    same = middle(top / top, samples)
    assert same["low"] in (None, 1.0)
    assert same["high"] == same["low"]


def test_intervals_hold_the_truth_about_as_often_as_they_say() -> None:
    random = np.random.default_rng(1)
    held = 0
    for _ in range(60):
        one = middle(random.normal(2.0, 1.0, 40), resamples(40))
        assert one["low"] is not None
        assert one["high"] is not None
        held += one["low"] <= 2.0 <= one["high"]
    assert 50 <= held <= 60


def test_a_ratio_of_what_is_not_known_is_none() -> None:
    samples = resamples(2)
    one, none = np.ones(2), np.array([1.0, np.nan])
    assert ratio(none, one, samples) is ratio(one, none, samples) is ratio(one, np.zeros(2), samples) is None


@st.composite
def steps(draw: st.DrawFn) -> tuple[Draft, list[int], bool]:
    """A draft, an accepted path in it, and whether a stop token among the accepted ended the step."""
    draft = draw(drafts(most=12))
    scores = draw(st.lists(st.sampled_from([0.2, 0.5, 0.9]), min_size=len(draft), max_size=len(draft)))
    draft = Draft(draft.tokens, draft.parents, np.array(scores, np.float32))
    path: list[int] = []
    while True:
        children = np.flatnonzero(draft.parents == (path[-1] if path else -1)).tolist()
        if not children or not draw(st.booleans()):
            break
        path.append(draw(st.sampled_from(children)))
    return draft, path, bool(path) and draw(st.booleans())


@given(st.lists(steps(), min_size=1, max_size=8))
@settings(max_examples=60)
def test_what_steps_show_is_what_brute_force_counts(case: list[tuple[Draft, list[int], bool]]) -> None:
    seen = _Seen()
    empty: dict[str, Any] = {"step": 0, "accepted": 0, "drafted": 0, "committed": 1}
    seen.add(empty)
    for number, (draft, path, cut) in enumerate(case):
        seen.add(
            {
                "step": number + 1,
                "prompt": str(number % 3),
                "drafted": len(draft),
                "accepted": len(path),
                "committed": len(path) + (not cut),
                "draft_parents": draft.parents.tolist(),
                "draft_scores": draft.score.tolist(),
                "path": path,
                "forward_seconds": 0.25,
                "verify_seconds": 0.25,
            }
        )
    found = seen.figures()
    most = max(len(draft) for draft, _, _ in case)
    for one in found["budget"]:
        tokens = 1
        for draft, path, cut in case:
            kept = draft.trim(one["budget"])
            # The accepted path as far as the trimmed draft still holds it.
            held, node = 0, -1
            for token in draft.tokens[path].tolist():
                if (node, token) not in kept.children():
                    break
                node = kept.children()[node, token]
                held += 1
            tokens += min(held + 1, len(path) + (not cut))
        assert one["mat"] == pytest.approx(tokens / (len(case) + 1))
    budgets = [budget for budget in BUDGETS if budget < most]
    assert [one["budget"] for one in found["budget"]] == [0, *budgets, *([most] if most else [])]
    lengths = [len(path) for _, path, _ in case]
    assert found["lengths"] == [lengths.count(length) for length in range(max(lengths) + 1)]
    assert sum(found["shares"]) == pytest.approx(1)
    for one in found["depth"]:
        tried = [
            path
            for draft, path, _ in case
            if len(path) >= one["depth"] - 1 and one["depth"] - 1 in _depths_that_go_on(draft, path)
        ]
        assert one["tried"] == len(tried)
        assert one["accepted"] == sum(len(path) >= one["depth"] for path in tried)
        shown = len(tried) >= LEAST_TRIED and one["depth"] <= DEPTHS
        assert one["rate"] == (pytest.approx(one["accepted"] / len(tried)) if shown else None)
        if one["low"] is not None:
            assert one["low"] <= one["rate"] <= one["high"]
    assert all(one["seconds"] == 0.5 and one["steps"] >= 3 for one in found["cost"])


def _depths_that_go_on(draft: Draft, path: list[int]) -> list[int]:
    """How many nodes of the path lie before a drafted child."""
    return [depth for depth, node in enumerate([-1, *path]) if node in draft.parents.tolist()]


@given(st.lists(st.sampled_from("abc"), max_size=8), st.lists(st.sampled_from("abc"), max_size=8))
def test_the_longest_common_subsequence_is_the_longest(one: list[str], other: list[str]) -> None:
    best = max(
        length
        for length in range(len(one) + 1)
        for some in itertools.combinations(one, length)
        if _is_subsequence(some, other)
    )
    assert common(one, other) == best
    f = rouge_l(" ".join(one), " ".join(other))
    assert f == pytest.approx(2 * best / (len(one) + len(other)) if one and other else float(one == other))


def _is_subsequence(some: tuple[str, ...], other: list[str]) -> bool:
    rest = iter(other)
    return all(letter in rest for letter in some)


@pytest.mark.parametrize(
    ("text", "reference", "expected"),
    [
        ("so it is 1,200 dollars.", "a\n#### 1200", True),
        ("#### 12, because 3 + 9", "#### 12.00", True),
        ("12 and then 13", "#### 12", False),
        ("I do not know", "#### 12", False),
        ("thus \\boxed{\\frac{1}{2}}", "We get $\\boxed{ \\frac{1}{2} }.$", True),
        ("thus 5", "\\boxed{5}", True),
        ("thus 5", "\\boxed{5", None),
        ("-3", "#### -3", True),
        ("anything", "print('x')", None),
    ],
)
def test_answers_are_graded_where_the_reference_marks_one(text: str, reference: str, expected: bool | None) -> None:
    assert correct(text, reference) is expected


@given(st.lists(st.lists(st.integers(0, 2), max_size=4), min_size=1, max_size=3), st.data())
def test_the_first_difference_is_the_first(one: list[list[int]], data: st.DataObject) -> None:
    other = [data.draw(st.lists(st.integers(0, 2), max_size=4) | st.just(turn)) for turn in one]
    found = differs(one, other)
    if found is None:
        assert one == other
        return
    turn, at = found
    assert one[:turn] == other[:turn]
    assert one[turn][:at] == other[turn][:at]
    assert one[turn][at : at + 1] != other[turn][at : at + 1]


def test_intervals_overlap_if_they_share_a_point() -> None:
    def interval(low: float | None, high: float | None) -> dict[str, float | None]:
        return {"value": 0, "low": low, "high": high}

    assert overlaps(interval(1, 2), interval(2, 3)) is True
    assert overlaps(interval(2, 3), interval(1, 1.5)) is False
    assert overlaps(interval(1, 4), interval(2, 3)) is True
    assert overlaps(interval(None, None), interval(2, 3)) is overlaps(None, interval(2, 3)) is None


@given(st.integers(0, 10**7), st.integers(0, 10**7), st.integers(2, 8))
def test_ticks_hold_the_range_between_them(one: int, other: int, count: int) -> None:
    low, high = sorted((one / 1000, other / 1000))
    ticks = nice_ticks(low, high, count)
    assert ticks == sorted(set(ticks))
    assert ticks[0] <= low + 1e-6 * max(1, high)
    assert ticks[-1] >= high - 1e-6 * max(1, high)
    assert len(ticks) <= 2 * count + 2


@given(st.floats(1e-4, 1e6), st.floats(1, 1e7))
def test_ticks_of_a_logarithmic_axis_hold_the_range_between_them(low: float, ratio: float) -> None:
    ticks = log_ticks(low, low * ratio)
    assert ticks == sorted(set(ticks))
    assert len(ticks) >= 2
    assert ticks[0] <= low * (1 + 1e-6)
    assert ticks[-1] >= low * ratio * (1 - 1e-6)
    assert len(ticks) <= 14
