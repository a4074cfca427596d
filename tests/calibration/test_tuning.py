"""A search finds what is there to be found, and its estimate knows nothing of how it was chosen."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from specds.calibration.answers import Recorded
from specds.calibration.replay import replay, summarise
from specds.calibration.tuning import ALL, tune
from specds.decode.config import read_config, write_config
from specds.decode.drafters import DRAFTERS
from specds.decode.drafters.pld import PromptLookup
from specds.decode.method import Method, parse_budget, parse_methods
from specds.decode.pricing.curve import CostCurve
from specds.decode.registry import choices, load, parse_options
from specds.errors import InputError, UsageError
from specds.model import LanguageModel

from ..conftest import make_model
from ..tools import Run

# Seconds, so that milliseconds of drafting decide nothing: six rows cost hardly more than one, more cost much more.
CURVE = CostCurve((1, 6, 7, 64), (8,), np.array([[1.0, 1.2, 3.0, 40.0]]))


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return make_model()


def copied(seed: int, group: str) -> Recorded:
    """An answer that repeats twelve tokens of its prompt again and again."""
    words = np.random.default_rng(seed).permutation(np.arange(5, 120))[:12].tolist()
    return Recorded(f"{group}{seed}", 0, tuple(words), tuple(words * 4), False, 48, group)


def fresh(seed: int, group: str) -> Recorded:
    """An answer in which every token's last place misleads."""
    rng = np.random.default_rng(seed)
    words = [int(one) for _ in range(5) for one in rng.permutation(np.arange(5, 17))]
    return Recorded(f"{group}{seed}", 0, tuple(words[:12]), tuple(words[12:]), False, 48, group)


def test_the_setting_found_is_as_good_as_the_best_of_a_whole_grid(model: LanguageModel) -> None:
    answers = [copied(seed, "copy") for seed in range(6)]
    found = tune(model, parse_methods("pld?max_ngram=3&min_ngram=1"), answers, CURVE, held_out=0.0, trials=60)
    (best,) = found.best
    grid = [
        Method("pld", {"length": length, "max_ngram": "3", "min_ngram": "1"}, budget=parse_budget(budget))
        for budget, length in itertools.product(
            ("auto", "2", "4", "8", "16", "32", "64"), ("10", *choices(PromptLookup.Options)["length"])
        )
    ]
    rows = list(replay(model, grid, answers, curve=CURVE))
    seconds = [one.seconds or 0.0 for one in summarise(rows)]
    fastest = min(seconds)
    own = summarise(list(replay(model, [best.setting], answers, curve=CURVE)))[0]
    assert own.seconds is not None
    assert own.seconds < 1.02 * fastest
    assert fastest < 0.6 * max(seconds)  # it matters what is chosen
    assert best.tokens_per_second == pytest.approx(own.tokens_per_second, rel=0.01)
    assert best.held_out == 0


def test_every_group_gets_its_own(model: LanguageModel) -> None:
    answers = [make(seed, group) for seed in range(15) for make, group in ((copied, "copy"), (fresh, "new"))]
    answers += [copied(seed, "few") for seed in range(4)]
    found = tune(model, parse_methods("none,pld@5?max_ngram=1"), answers, CURVE)
    best = {one.group: one for one in found.best}
    assert list(best) == [ALL, "copy", "new"]
    assert best["copy"].tokens_per_second > 2 * best["copy"].plain_tokens_per_second
    assert best["new"].tokens_per_second > 0.99 * best["new"].plain_tokens_per_second
    assert [(one.prompts, one.held_out) for one in found.best] == [(23, 11), (10, 5), (10, 5)]
    assert found.unjudged == (("few", 1),)
    for one in found.best:
        assert one.margin.low <= one.margin.value <= one.margin.high


def test_what_is_held_out_chooses_nothing(model: LanguageModel) -> None:
    answers = [copied(seed, "") for seed in range(15)]
    first = tune(model, parse_methods("none,pld"), answers, CURVE, trials=12)
    assert (first.best[0].prompts, first.best[0].held_out) == (10, 5)
    # Whichever five of the fifteen these are, others in their place leave the choice as it is.
    changed = [
        dataclasses.replace(fresh(number, ""), id=answer.id) if number % 3 == 1 else answer
        for number, answer in enumerate(answers)
    ]
    second = tune(model, parse_methods("none,pld"), changed, CURVE, trials=12)
    best = second.best[0]
    assert (best.rejected.setting if best.rejected else best.setting) == first.best[0].setting
    assert second.best[0].tokens_per_second < first.best[0].tokens_per_second / 1.5


@pytest.mark.parametrize("methods", ["pld@3?length=2", "none"])
def test_nothing_slower_than_no_configuration_comes_out(methods: str, model: LanguageModel) -> None:
    answers = [copied(seed, "") for seed in range(15)]
    found = tune(model, parse_methods(methods), answers, CURVE)
    (best,) = found.best
    # Two nodes at a time, or none, where `auto` copies six: what the method's word fixes is much slower.
    assert best.setting == best.default == Method("auto")
    assert (best.margin.value, best.rejected) == (1, None)
    assert best.tokens_per_second > 1.2 * best.plain_tokens_per_second


def test_what_was_fastest_only_where_it_was_chosen_is_rejected(model: LanguageModel) -> None:
    # Rows cost nothing, so that the longest copy is the fastest where the prompt is copied whole. Every third answer is
    # held out, and there nothing is.
    curve = CostCurve((1, 64), (8,), np.array([[1.0, 1.05]]))
    words = [np.random.default_rng(seed).permutation(np.arange(5, 120))[:60].tolist() for seed in range(15)]
    answers = [
        fresh(seed, "") if seed % 3 == 1 else Recorded(str(seed), 0, tuple(copy), tuple(copy), False, 60)
        for seed, copy in enumerate(words)
    ]
    (best,) = tune(model, parse_methods("pld@64?max_ngram=1&min_ngram=1&length=64"), answers, curve).best
    assert best.rejected is not None
    assert (best.rejected.setting.drafter, best.setting.drafter) == ("pld", "auto")
    assert best.rejected.margin.low < 1
    assert best.tokens_per_second == best.default_tokens_per_second


@pytest.mark.parametrize(
    ("prompts", "held_out", "hint"), [(12, 1 / 3, "14 or more, or --held-out 0.42"), (4, 0.0, "5")]
)
def test_too_few_prompts_are_refused_before_anything_runs(
    prompts: int, held_out: float, hint: str, model: LanguageModel
) -> None:
    answers = [copied(seed, "") for seed in range(prompts)]
    with pytest.raises(InputError, match="prompts are there to judge by") as caught:
        tune(model, parse_methods("pld"), answers, CURVE, held_out=held_out, progress=lambda done: pytest.fail("ran"))
    assert hint in caught.value.hint


def test_what_a_word_fixes_stays(model: LanguageModel) -> None:
    answers = [copied(seed, "") for seed in range(5)]
    (best,) = tune(model, parse_methods("pld@5?length=5"), answers, CURVE, held_out=0.0).best
    tuned = best.rejected.setting if best.rejected else best.setting
    if tuned.drafter == "pld":
        assert (tuned.budget, dict(tuned.options)["length"]) == ("5", "5")
        assert best.untuned.name in ("pld@5?length=5", "auto@auto")
    assert tune(model, parse_methods("pld"), answers, CURVE, held_out=0.0, trials=5).trials == 6


@pytest.mark.parametrize(
    ("methods", "changes", "message"),
    [
        ("pld", {"held_out": 1.0}, "held-out is 1.0"),
        ("pld!greedy", {}, "names a verifier"),
        ("model", {}, "with a model"),
    ],
)
def test_what_cannot_be_tuned(methods: str, changes: dict[str, float], message: str, model: LanguageModel) -> None:
    with pytest.raises(UsageError, match=message):
        tune(model, parse_methods(methods), [copied(seed, "") for seed in range(15)], CURVE, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", DRAFTERS)
def test_every_value_that_a_search_tries_is_allowed(name: str) -> None:
    found = load(DRAFTERS, name, "drafter")
    defaults = parse_options(found.Options, {}, name)
    for option, values in choices(found.Options).items():
        parsed = []
        for value in values:
            try:
                parsed.append(getattr(parse_options(found.Options, {option: value}, name), option))
            except UsageError as error:
                assert "at most" in error.hint  # an empty range: with another option changed it is none
        assert getattr(defaults, option) not in parsed


def test_a_configuration_is_read_as_it_was_written(tmp_path: Path) -> None:
    store = tmp_path / "stores" / "code.ds"
    store.mkdir(parents=True)
    one = Method("rest", {"length": "20"}, (store,))
    other = Method("pld", budget=8)
    path = tmp_path / "tuned.json"
    write_config(path, one, {"math": other}, {})
    read = read_config(str(path))
    assert (read.drafter, read.options, read.budget) == ("rest", {"length": "20"}, None)
    assert read.paths[0].resolve() == store.resolve()
    assert read_config(f"{path}#math") == other
    # The two move together.
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    (tmp_path / "stores").rename(moved / "stores")
    path.rename(moved / "tuned.json")
    assert read_config(str(moved / "tuned.json")).paths[0].exists()
    with pytest.raises(InputError, match="no group 'art'"):
        read_config(f"{moved / 'tuned.json'}#art")


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        '{"format": "specds decode options 1"}',
        '{"format": "specds decode options 1", "drafter": "pld", "store": "x", "set": {}, "budget": "1"}',
        '{"format": "specds decode options 1", "drafter": "pld", "store": [], "set": {"length": 3}, "budget": "1"}',
    ],
)
def test_what_is_no_configuration_is_refused(content: str, tmp_path: Path, run_cli: Run) -> None:
    path = tmp_path / "tuned.json"
    path.write_text(content)
    run_cli("decode", "-p", path, "--config", path).refused(str(path))


def test_the_command_writes_what_decode_takes(
    run_cli: Run, tmp_path: Path, tiny_directory: Path, stocked: dict[str, Path]
) -> None:
    model = ["--model", tiny_directory, "--device", "cpu"]
    prompts, answers, cost = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl", tmp_path / "cost.json"
    rows = [{"id": f"p{n}", "prompt": f"w{n} w{n + 1} w{n}", "task": f"t{n % 2}"} for n in range(30)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    cost.write_text(json.dumps(CURVE.record()))
    run_cli("decode", "-p", prompts, "-d", "none", "--max-new-tokens", 12, *model, "--output", answers)
    config, store = tmp_path / "tuned.json", stocked["faiss"]
    tuning = ["tune", "--answers", answers, "-p", prompts, "--cost", cost, "--methods", f"rest:{store}", *model]
    result = run_cli(*tuning, "--group", "task", "--trials", 6, "--output", config)
    assert result.code == 0, result.err
    assert all(word in result.out for word in ("held-out", "margin", "default", "t0", "t1"))
    record = json.loads(config.read_text())
    assert sorted(record["groups"]) == ["t0", "t1"]
    assert [one["margin"]["low"] >= 1 for one in record["about"]["best"]] == [True] * 3
    again = run_cli(*tuning, "--group", "task", "--trials", 6, "--json")
    assert [one["group"] for one in json.loads(again.out)["best"]] == ["all", "t0", "t1"]

    decoding = ["decode", "-p", prompts, "--max-new-tokens", 12, *model]
    config.write_text(
        json.dumps({**record, "drafter": "rest", "store": [str(store)], "set": {"length": "1"}, "budget": "1"})
    )
    tuned = run_cli(*decoding, "--config", config)
    by_hand = run_cli(*decoding, "-d", "rest", "-s", store, "--set", "length=1", "--budget", 1)
    wider = run_cli(*decoding, "--config", config, "--budget", 9, "--set", "length=9")
    wide = run_cli(*decoding, "-d", "rest", "-s", store, "--set", "length=9", "--budget", 9)

    def drafted(*results: object) -> list[list[int]]:
        return [[one["counters"]["drafted"] for one in result.records] for result in results]  # type: ignore[attr-defined]

    assert len({str(one) for one in drafted(tuned, by_hand)}) == 1
    assert len({str(one) for one in drafted(wider, wide)}) == 1
    assert drafted(tuned) != drafted(wider)
    other = run_cli(*decoding, "--config", config, "-d", "pld")
    assert {one["drafter"] for one in other.records} == {"pld"}
