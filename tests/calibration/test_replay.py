"""A replay does step by step what decoding did."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from specds.calibration.answers import Recorded, read_answers, read_pairs
from specds.calibration.replay import NONE, STEP, Replay, replay, summarise
from specds.datastore.build_dense import DenseOptions, build_dense
from specds.datastore.build_suffix import build_suffix
from specds.datastore.creation import create_store
from specds.datastore.store import Store, open_store
from specds.decode.assembly import drafter_class, prepare
from specds.decode.contracts import Step
from specds.decode.counters import Counters
from specds.decode.drafters import DRAFTERS
from specds.decode.engine import Engine
from specds.decode.method import Method, parse_methods
from specds.decode.pricing.curve import CostCurve
from specds.errors import InputError, UsageError
from specds.model import LanguageModel, load_model
from specds.reading.prompts import Prompt, read_prompts
from specds.sampling import Sampling

from ..conftest import STOP, VOCABULARY, fill, make_model
from ..decode.test_loop import PROMPT, generate
from ..tools import Run

LENGTH = 40
CURVE = CostCurve((1, 2, 8, 32), (16, 64), np.array([[1.0, 1.1, 1.6, 4.0], [1.2, 1.3, 1.9, 4.5]]))
REPLAYED = [name for name in DRAFTERS if name != "model"]


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return make_model()


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    shifted = [[(token + shift) % VOCABULARY for token in PROMPT] for shift in (0, 1, 4, 9, 15, 23)]
    return [*shifted, [*PROMPT, *PROMPT]]


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory, model: LanguageModel, prompts: list[list[int]]) -> Store:
    store = create_store(tmp_path_factory.mktemp("stores") / "own.ds", model.tokenizer)
    store = fill(store, [(prompt, generate(model, prompt, LENGTH)) for prompt in prompts[::2]])
    build_suffix(store)
    build_dense(open_store(store.path), model, DenseOptions(index="faiss", dims=16))
    return open_store(store.path)


def method_of(name: str, store: Store, budget: int) -> Method:
    return Method(name, stores=[store] if drafter_class(name).indexes else [], budget=budget, word=name)


def recorded(name: str, prompt: list[int], steps: list[Step], model: LanguageModel, most: int = LENGTH) -> Recorded:
    tokens = tuple(token for step in steps for token in step.tokens)
    return Recorded(name, 0, tuple(prompt), tokens, tokens[-1] in model.stop_tokens, most)


def same(measured: list[Step], replayed: tuple[Step, ...]) -> None:
    assert len(measured) == len(replayed)
    for one, other in zip(measured, replayed, strict=True):
        assert (one.index, one.position, one.tokens) == (other.index, other.position, other.tokens)
        assert one.draft.tokens.tolist() == other.draft.tokens.tolist()
        assert one.draft.parents.tolist() == other.draft.parents.tolist()
        assert one.draft.score.tolist() == other.draft.score.tolist()
        assert one.path[: one.accepted] == other.path[: other.accepted]


@pytest.mark.parametrize("budget", [1, 9, 64])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_replay_is_what_decoding_was(
    budget: int, temperature: float, model: LanguageModel, filled: Store, prompts: list[list[int]]
) -> None:
    sampling = Sampling(temperature, seed=3)
    plain = Engine(model, sampling=sampling)
    answers = [recorded("p", prompt, list(plain.steps(prompt, LENGTH)), model) for prompt in prompts]
    made = Replay(model, [method_of(name, filled, budget) for name in REPLAYED])
    accepted = 0
    engines = {}
    for name in REPLAYED:
        engines[name] = Engine(model, method_of(name, filled, budget), sampling=sampling)
    for prompt, answer in zip(prompts, answers, strict=True):
        for row in made.of(answer):
            measured = list(engines[row.method].steps(prompt, LENGTH))
            same(measured, row.steps)
            assert row.counters.mat == Counters.of(measured).mat
            accepted += row.counters.accepted
    assert accepted > 20
    assert {name for name, passes in made.passes.items() if passes == NONE} == {"none", "pld", "rest"}
    assert {name for name, passes in made.passes.items() if passes == STEP} == {"auto", "recycling", "sam", "respec"}


def test_layers_apart_are_not_confused(model: LanguageModel, filled: Store, prompts: list[list[int]]) -> None:
    plain = Engine(model)
    methods = parse_methods(f"adapld?layer=1,pld-plus?layer=3,dresd:{filled.path},logitspec", 16)
    made = Replay(model, methods)
    for prompt in prompts:
        answer = recorded("p", prompt, list(plain.steps(prompt, LENGTH)), model)
        for method, row in zip(methods, made.of(answer), strict=True):
            engine = Engine(model, method)
            same(list(engine.steps(prompt, LENGTH)), row.steps)


def test_a_budget_by_cost_learns_from_answer_to_answer(model: LanguageModel, prompts: list[list[int]]) -> None:
    """With one curve the engine and the replay draft the same, in the same order of prompts."""
    plain = Engine(model)
    engine = Engine(model, Method("pld", budget=4))
    engine._assembly = prepare(Method("pld"), model).assemble(CURVE)
    made = Replay(model, parse_methods("pld"), curve=CURVE)
    for prompt in prompts * 2:
        answer = recorded("p", prompt, list(plain.steps(prompt, LENGTH)), model)
        same(list(engine.steps(prompt, LENGTH)), made.of(answer)[0].steps)


def test_an_answer_that_stops_where_it_had_to(model: LanguageModel) -> None:
    """Depth is limited by what could have been written, not by what was."""
    answer = Recorded("p", 0, (5, 6, 7, 8, 9, 5, 6, 7), (8, 9, STOP), True, 40)
    (row,) = replay(model, parse_methods("pld", 10), [answer])
    assert [len(step.draft) for step in row.steps[1:]] == [1 + 4]
    assert row.steps[1].tokens == (9, STOP)
    short = replace(answer, stopped=False, most=3)
    (row,) = replay(model, parse_methods("pld", 10), [short])
    assert [len(step.draft) for step in row.steps[1:]] == [1]


def test_predictions_are_the_curves(model: LanguageModel, prompts: list[list[int]]) -> None:
    answers = [recorded("p", prompt, list(Engine(model).steps(prompt, LENGTH)), model) for prompt in prompts]
    plain, pld = summarise(list(replay(model, parse_methods("none,pld@8"), answers, curve=CURVE)))
    assert plain.speedup == pytest.approx(1.0, abs=0.01)
    assert pld.counters.tokens == plain.counters.tokens
    assert pld.seconds is not None
    by_hand = 0.0
    for row in replay(model, parse_methods("pld@8"), answers):
        by_hand += sum(CURVE.at(step.position - 1)[len(step.draft) + 1] for step in row.steps[1:])
        by_hand += CURVE.at(0)[len(row.answer.prompt)]
    # Milliseconds of drafting beside the curve's seconds.
    assert pld.seconds == pytest.approx(by_hand, rel=0.01)


def test_a_curve_goes_on_in_straight_lines() -> None:
    rows = np.array([1, 2, 5, 8, 32, 56])
    for context in (0, 16, 40, 64, 112):
        line = CURVE.predict(rows, np.full(len(rows), context))
        assert line[:5] == pytest.approx(CURVE.at(context)[rows[:5]])
        assert line[5] == pytest.approx(2 * line[4] - np.interp(8, rows, line))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model", "with a model"),
        ("pld!lossy", "lossy"),
        ("rest", "datastore"),
        ("pld", "cost curve"),
        ("pld:x.ds@4", "looks nothing up"),
        ("pld?nonsense=1", "has no option"),
        ("unheard-of", "no drafter"),
    ],
)
def test_what_cannot_be_replayed_is_refused(text: str, message: str, model: LanguageModel) -> None:
    with pytest.raises(UsageError, match=message):
        Replay(model, parse_methods(text))


def test_no_weights_are_read_for_strings(tiny_directory: Path, filled: Store) -> None:
    model = load_model(str(tiny_directory), device="cpu")
    answer = Recorded("p", 0, tuple(PROMPT), (5, 6, 7), False, 3)
    rows = list(replay(model, parse_methods(f"none,pld,rest:{filled.path},sam?fallback=none", 4), [answer]))
    assert len(rows) == 4
    assert model._network is None


@pytest.fixture
def asked(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    rows: list[dict[str, object]] = [
        {
            "id": f"p{number}",
            "prompt": f"w{number} w{number + 1} w{number} w{number + 1}",
            "task": ["odd", "even"][number % 2],
        }
        for number in range(5)
    ]
    rows.append({"id": "two", "turns": ["w7 w8 w7", "w9 w8"]})
    rows.append({"id": "raw", "text": "w7 w8 w7 w8"})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_the_command_repeats_what_decode_measured(
    run_cli: Run, asked: Path, tmp_path: Path, tiny_directory: Path, stocked: dict[str, Path]
) -> None:
    model = ["--model", tiny_directory, "--device", "cpu"]
    answers, store = tmp_path / "answers.jsonl", stocked["faiss"]
    run_cli("decode", "-p", asked, "-d", "none", "--max-new-tokens", 24, *model, "--output", answers)
    methods = f"none,pld,rest:{store},dresd:{store},recycling"
    arguments = ["replay", "--answers", answers, "-p", asked, "--methods", methods, "--budget", 12, *model]
    result = run_cli(*arguments, "--json")
    assert result.code == 0, result.err
    found = {row["method"]: row for row in json.loads(result.out)["methods"]}
    for name, row in found.items():
        drafter, _, place = name.partition(":")
        more = ["--store", place] if place else []
        measured = run_cli("decode", "-p", asked, "-d", drafter, *more, "--budget", 12, "--max-new-tokens", 24, *model)
        counters = [one["counters"] for one in measured.records]
        for field in ("tokens", "steps", "drafted", "accepted"):
            assert row[field] == sum(one[field] for one in counters), (name, field)
    shown = run_cli(*arguments)
    assert shown.code == 0
    assert all(name in shown.out for name in ("pld", "MAT", "at every step"))
    trace = tmp_path / "pld.parquet"
    run_cli(
        "decode",
        "-p",
        asked,
        "-d",
        "pld",
        "--budget",
        2,
        "--max-new-tokens",
        24,
        *model,
        "--parallel",
        1,
        "--trace",
        trace,
    )
    took = pq.read_table(trace).to_pylist()
    alone = float(np.median([one["forward_seconds"] for one in took if one["step"] and not one["drafted"]]))
    by_passes = [
        "replay",
        "--answers",
        answers,
        "-p",
        asked,
        "--methods",
        "none,pld",
        "--cost",
        trace,
        *model,
        "--json",
    ]
    result = run_cli(*by_passes)
    assert result.code == 0, result.err
    assert 0.2 / alone < json.loads(result.out)["methods"][0]["tokens_per_second"] < 2 / alone
    curve = tmp_path / "curve.json"
    curve.write_text(json.dumps(CURVE.record()))
    rows = tmp_path / "rows.jsonl"
    result = run_cli(*arguments[:-6], "--methods", "none,pld", "--cost", curve, "--output", rows, *model, "--json")
    assert result.code == 0, result.err
    one, two = json.loads(result.out)["methods"]
    assert (one["speedup"], two["tokens_per_second"] > 0) == (pytest.approx(1, abs=0.05), True)
    assert [json.loads(line)["id"] for line in rows.read_text().splitlines()[::2]] == [
        *(f"p{number}" for number in range(5)),
        "two",
        "two",
        "raw",
    ]


def test_a_trace_holds_the_answers_too(run_cli: Run, asked: Path, tmp_path: Path, tiny_directory: Path) -> None:
    model = ["--model", tiny_directory, "--device", "cpu"]
    answers, trace = tmp_path / "answers.jsonl", tmp_path / "trace.parquet"
    run_cli("decode", "-p", asked, "-d", "pld", "--budget", 6, *model, "--output", answers, "--trace", trace)
    found = []
    for given in (answers, trace):
        result = run_cli("replay", "--answers", given, "-p", asked, "--methods", "pld", "--budget", 9, "--json", *model)
        assert result.code == 0, result.err
        (row,) = json.loads(result.out)["methods"]
        del row["draft_ms_a_step"]
        found.append(row)
    assert found[0] == found[1]
    trace.write_bytes(b"PAR1")
    run_cli("replay", "--answers", trace, "-p", asked, "--methods", "pld", *model).refused("is not a trace")


def test_answers_to_other_prompts_are_refused(run_cli: Run, asked: Path, tmp_path: Path, tiny_directory: Path) -> None:
    model = ["--model", tiny_directory, "--device", "cpu"]
    answers = tmp_path / "answers.jsonl"
    run_cli("decode", "-p", asked, "-d", "none", "--max-new-tokens", 8, *model, "--output", answers)
    replaying = ["replay", "--answers", answers, "--methods", "pld", "--budget", 4, *model]
    other = tmp_path / "other.jsonl"
    other.write_text('{"id": "p0", "prompt": "w1"}\n')
    run_cli(*replaying, "-p", other).refused("prompt of 6 tokens")
    other.write_text('{"id": "x", "prompt": "w1"}\n')
    run_cli(*replaying, "-p", other).refused("not among the prompts")
    answers.write_text("{}\n")
    run_cli(*replaying, "-p", asked).refused("not an answer of")
    answers.write_text("")
    run_cli(*replaying, "-p", asked).refused("no answers")
    answers.write_text('{"id": "p0", "text": "", "tokens": [4000], "prompt_tokens": 7}\n')
    run_cli(*replaying, "-p", asked).refused("no token ids")
    run_cli(*replaying, "-p", asked, "--cost", other).refused("not a valid cost curve")
    run_cli(*replaying, "-p", asked, "--cost", tmp_path).refused("steps.parquet")


def test_pairs_are_answers_too(tmp_path: Path, tiny_directory: Path) -> None:
    tokenizer = load_model(str(tiny_directory), device="cpu").tokenizer
    path = tmp_path / "pairs.jsonl"
    path.write_text('{"prompt": "w1 w2", "response": "w3 w4", "source": "s"}\n{"text": "w5"}\n')
    found = read_pairs([str(path)], tokenizer)
    (turn,) = found.turns
    assert (turn.tokens[-1], turn.stopped, turn.group, found.failed) == (1, True, "s", 1)
    assert tokenizer.decode(turn.tokens) == "w3 w4"
    with pytest.raises(InputError, match="no prompts with responses"):
        path.write_text('{"text": "w5"}\n')
        read_pairs([str(path)], tokenizer)


def test_the_run_s_length_is_read_off_its_answers(
    run_cli: Run, asked: Path, tmp_path: Path, tiny_directory: Path
) -> None:
    options = ["--model", tiny_directory, "--device", "cpu", "--max-new-tokens", 24]
    answers = tmp_path / "answers.jsonl"
    run_cli("decode", "-p", asked, "-d", "none", *options, "--output", answers)
    tokenizer = load_model(str(tiny_directory), device="cpu").tokenizer
    rows = [row for row in read_prompts([str(asked)]) if isinstance(row, Prompt)]
    found = read_answers(str(answers), rows, tokenizer)
    assert found.lossless
    assert any(not turn.stopped for turn in found.turns)
    assert {turn.most for turn in found.turns} == {24}
