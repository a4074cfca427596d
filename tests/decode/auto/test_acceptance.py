"""The fitted probabilities of drafts: what they are fitted to, how right they are, and files that are broken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specds.calibration.acceptance import Fit, Nodes, chances, collect, fit, reliability
from specds.decode.auto.acceptance import Acceptance, calibration_path, choose_acceptance, load_acceptance, shipped
from specds.decode.auto.features import FEATURES, SOURCES
from specds.decode.engine import Engine
from specds.decode.method import Method
from specds.errors import InputError, PromptError, UsageError
from specds.reading.prompts import BadRow, Prompt

from ...conftest import VOCABULARY, make_model
from ..test_loop import PROMPT

SMALL = Fit(trees=20, leaves=6, least=20)


def some_nodes(count: int = 4_000, seed: int = 0) -> tuple[Nodes, np.ndarray]:
    """Nodes whose true probability is known."""
    random = np.random.default_rng(seed)
    features = np.full((count, len(FEATURES)), -1, np.float32)
    features[:, FEATURES.index("context share")] = random.random(count)
    features[:, FEATURES.index("recycling rank")] = random.integers(0, 8, count)
    true = features[:, FEATURES.index("context share")] * (1.0 / (1 + features[:, FEATURES.index("recycling rank")]))
    return Nodes(features, random.random(count) < true, (np.arange(count) // 40).astype(np.int32)), true


def test_what_is_fitted_is_near_the_truth_and_says_how_near() -> None:
    nodes, true = some_nodes()
    found = fit(nodes, {"model": "m"}, SMALL)
    assert np.abs(chances(found.ensemble, nodes.features) - true).mean() < 0.05
    held = nodes.prompt % SMALL.held_out == SMALL.held_out - 1
    assert found.reliability is not None
    again = reliability(chances(found.ensemble, nodes.features[held]), nodes.right[held])
    assert found.reliability.error == pytest.approx(again.error, abs=1e-3)
    assert found.reliability.error < 0.06
    assert sum(found.reliability.counts) == held.sum()
    assert found.about["nodes"] == 4_000
    assert found.about["prompts"] == 100


def test_arrays_say_what_scikit_learn_says() -> None:
    from sklearn.ensemble import HistGradientBoostingClassifier

    from specds.calibration.acceptance import _ensemble

    nodes, _ = some_nodes(2_000)
    forest = HistGradientBoostingClassifier(max_iter=15, max_leaf_nodes=6, random_state=0, early_stopping=False)
    forest.fit(nodes.features, nodes.right)
    expected = forest.predict_proba(nodes.features)[:, 1]
    off = np.abs(chances(_ensemble(forest), nodes.features) - np.minimum(expected, 0.985))
    # A number that lies on a threshold may fall on the other side of it in fewer bits.
    assert (off > 1e-3).mean() < 0.005


def test_reliability_is_counted_by_hand() -> None:
    chance = np.array([0.02, 0.02, 0.52, 0.53, 0.97, 1.0])
    found = reliability(chance, np.array([False, False, True, False, True, True]))
    assert found.error == pytest.approx((2 * 0.02 + 2 * 0.025 + 2 * 0.015) / 6)
    assert found.likely == pytest.approx((2 * 0.025 + 2 * 0.015) / 4)
    assert found.counts[0] == 2
    assert found.counts[-1] == 2


def test_too_few_nodes_are_refused() -> None:
    nodes, _ = some_nodes(30)
    with pytest.raises(UsageError, match="30 candidates"):
        fit(nodes, {}, SMALL)


def test_saved_is_loaded_as_it_was(tmp_path: Path) -> None:
    made = fit(some_nodes()[0], {"model": "m", "fingerprint": "f" * 64}, SMALL)
    made.save(tmp_path / "a.json")
    found = load_acceptance(tmp_path / "a.json")
    assert found.about == made.about
    assert found.reliability == made.reliability
    features = some_nodes(500, 1)[0].features
    assert np.abs(chances(found.ensemble, features) - chances(made.ensemble, features)).max() < 1e-3


def test_what_lies_beside_a_store_is_taken_for_its_own_model(tmp_path: Path) -> None:
    store = tmp_path / "code.ds"
    made = fit(some_nodes()[0], {"fingerprint": "mine"}, SMALL)
    made.save(calibration_path(store))
    assert calibration_path(store) == tmp_path / "code.ds.drafts.json"
    assert choose_acceptance("", [tmp_path / "other.ds", store], "mine").about["fingerprint"] == "mine"
    assert choose_acceptance("", [store], "another") is shipped()
    assert choose_acceptance(str(calibration_path(store)), [], "another").about["fingerprint"] == "mine"
    with pytest.raises(InputError, match="is not a calibration of drafts"):
        choose_acceptance(str(tmp_path / "none.json"), [], "mine")


def test_the_shipped_one_is_right_on_what_it_was_not_fitted_to() -> None:
    measured = shipped().reliability
    assert measured is not None
    assert measured.error <= 0.03
    assert sum(measured.counts) > 10_000
    assert {"model", "nodes", "prompts"} <= set(shipped().about)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("drafts") / "a.json"
    fit(some_nodes(1_000)[0], {"model": "m"}, Fit(trees=3, leaves=4, least=20)).save(path)
    found: dict[str, Any] = json.loads(path.read_text())
    return found


BROKEN: list[tuple[str, Any]] = [
    ("format", "specds acceptance 2"),
    ("format", None),
    ("features", ["depth"]),
    ("features", None),
    ("base", "NaN"),
    ("base", 1e300),
    ("base", None),
    ("roots", [0, 10**9]),
    ("roots", [-1]),
    ("roots", [0.5, "1"]),
    ("roots", None),
    ("roots", {"0": 0}),
    ("feature", [99] * 3),
    ("threshold", []),
    ("left", [0, 0, 0]),
    ("right", [True] * 9),
    ("about", [1]),
    ("reliability", {}),
    ("reliability", {"edges": [0, 1], "counts": [1], "promised": [2, 3], "accepted": [1], "error": 0, "likely": 0}),
    ("reliability", {"edges": [0, 1], "counts": [-1], "promised": [0], "accepted": [1], "error": 0, "likely": 0}),
]


@pytest.mark.parametrize(("name", "value"), BROKEN)
def test_a_broken_file_is_refused_by_name(name: str, value: Any, whole: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text(json.dumps({**whole, name: value}))
    with pytest.raises(InputError, match=r"bad\.json is not a calibration of drafts"):
        load_acceptance(path)


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"null", b"[" * 100_000, b"\xff", b" " * (5 << 20)])
def test_other_content_is_refused_by_name(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    with pytest.raises(InputError, match="is not a calibration of drafts"):
        load_acceptance(path)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_tree_that_goes_round_or_out_is_refused(whole: dict[str, Any], data: st.DataObject) -> None:
    from specds.decode.auto import acceptance

    record = json.loads(json.dumps(whole))
    for _ in range(data.draw(st.integers(1, 3))):
        name = data.draw(st.sampled_from(["roots", "feature", "left", "right", "threshold"]))
        place = data.draw(st.integers(0, len(record[name]) - 1))
        record[name][place] = data.draw(st.integers(-3, 200) | st.floats(-1e9, 1e9))
    try:
        found: Acceptance = acceptance._parse(json.dumps(record).encode())
    except (ValueError, KeyError, TypeError, OverflowError):
        return
    # What is let in gives a probability for anything, and ends.
    chance = chances(found.ensemble, np.random.default_rng(0).random((50, len(FEATURES))).astype(np.float32) * 20 - 5)
    assert ((chance >= 0) & (chance <= 1)).all()


def test_watching_decoding_keeps_every_candidate_after_what_was_committed() -> None:
    model = make_model(stop=False)
    engine = Engine(model, Method("auto", budget=24))
    plain = Engine(model, Method("auto", budget=24))
    text = " ".join(f"w{token % VOCABULARY}" for token in PROMPT)
    prompts = [Prompt(str(n), (({"role": "user", "content": f"{text} w{n}"},),)) for n in range(6)]
    state = collect(engine, prompts, 24, rows=4)
    assert [len(one) > 0 for one in state.nodes] == [True] * 6
    answers = [plain.answer(prompt, 24) for prompt in prompts]
    assert state.tokens == sum(answer.counters.tokens for answer in answers)
    nodes = Nodes.join(state.nodes)
    # Of the candidates after one node at most one is right.
    assert 0 < nodes.right.sum() < len(nodes)
    assert set(nodes.prompt.tolist()) >= set(range(6))
    agreement = nodes.features[:, FEATURES.index("agreement")]
    assert ((agreement >= 1) & (agreement <= len(SOURCES))).all()
    # Of several at once each request's own candidates are kept, also of turns, of one step, and beside a failure.
    turns = Prompt("turns", tuple(({"role": "user", "content": f"{text} w{n}"},) for n in (7, 8)))
    mixed = [prompts[0], turns, BadRow("bad", PromptError("no prompt")), *prompts[1:]]
    alone, beside = (collect(engine, mixed, 24, rows=4, parallel=parallel) for parallel in (1, 3))
    assert [name for name, _ in beside.failed] == ["bad"]
    for one, other in zip(alone.nodes, beside.nodes, strict=True):
        assert one.right.tolist() == other.right.tolist()
        assert np.array_equal(one.features, other.features)
    with pytest.raises(UsageError, match="fixed budget"):
        collect(Engine(model, Method("pld", budget=4)), prompts, 8)
