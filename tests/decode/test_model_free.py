"""Drafters that live on the text and the target's own logits: SAM-Decoding, Token Recycling, LogitSpec."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specds.datastore.build_suffix import build_suffix
from specds.datastore.store import Store, open_store
from specds.decode.contracts import TOP, Resources, Signal, Step
from specds.decode.counters import Counters
from specds.decode.draft import Draft, chain, empty
from specds.decode.drafters.logitspec import LogitSpec
from specds.decode.drafters.recycling import Recycling
from specds.decode.drafters.respec import ReSpec
from specds.decode.drafters.sam import Sam
from specds.decode.engine import Engine
from specds.decode.method import Method
from specds.decode.top import entropies, top_ids
from specds.errors import UsageError

from ..conftest import make_model


def step(tokens: list[int], draft: Draft | None = None, path: tuple[int, ...] = (), top: object = None) -> Step:
    draft = empty() if draft is None else draft
    signals = {} if top is None else dict.fromkeys((Signal.TOPK, Signal.TREE_TOPK), np.asarray(top, np.int32))
    return Step(1, 0, draft, path, tuple(tokens), signals, 0.0, 0.0, 0.0, 0.0)


def paths(draft: Draft) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    for token, parent in zip(draft.tokens.tolist(), draft.parents.tolist(), strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return found


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 4), st.integers(1, 300), st.integers(1, 12), st.booleans(), st.integers(0, 1 << 30))
def test_top_ids_are_those_of_sorting(rows: int, vocabulary: int, count: int, ties: bool, seed: int) -> None:
    logits = np.random.default_rng(seed).normal(size=(rows, vocabulary)).astype(np.float32)
    if ties:
        logits = np.round(logits)
    expected = np.full((rows, count), -1)
    order = np.argsort(-logits, axis=1, kind="stable")[:, :count]
    expected[:, : order.shape[1]] = order
    assert top_ids(torch.from_numpy(logits), count).tolist() == expected.tolist()
    if not ties:
        assert top_ids(torch.from_numpy(logits).double(), count).tolist() == expected.tolist()


@pytest.mark.parametrize("spread", [0.0, 1.0, 8.0, 200.0])
def test_entropies_are_those_of_the_distributions(spread: float) -> None:
    logits = torch.from_numpy((np.random.default_rng(0).normal(size=(5, 3000)) * spread).astype(np.float32))
    expected = torch.distributions.Categorical(logits=logits.double()).entropy().numpy()
    np.testing.assert_allclose(entropies(logits, range(5)), expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(entropies(logits.double(), range(5)), expected, rtol=1e-3, atol=1e-4)


def sure(tokens: list[int], entropy: list[float], draft: Draft | None = None, path: tuple[int, ...] = ()) -> Step:
    draft = empty() if draft is None else draft
    return Step(1, 0, draft, path, tuple(tokens), {Signal.ENTROPY: np.array(entropy, np.float32)}, 0.0, 0.0, 0.0, 0.0)


def test_respec_retrieves_only_where_the_target_is_sure() -> None:
    drafter = ReSpec(ReSpec.Options(fallback="none", length=3))
    drafter.start([1, 2, 3, 4, 5, 9])
    drafter.observe(sure([2], [4.0]))
    assert len(drafter.propose(10)) == 0
    drafter.observe(sure([2], [0.1]))
    assert drafter.propose(10).tokens.tolist() == [3, 4, 5] or len(drafter.propose(10)) > 0
    drafter.observe(sure([77], [0.0]))
    assert len(drafter.propose(10)) == 0  # it never stood before


def test_respec_takes_the_key_of_least_entropy_and_length() -> None:
    # Eq. 2 by hand: mean entropies 0.1, 0.2, 1.3; plus 1/k: 1.1, 0.7, 1.63: the key has two tokens.
    drafter = ReSpec(ReSpec.Options(fallback="none", length=1, weight=1.0))
    drafter.start([7, 8, 50, 6, 8, 60, 5, 7])
    drafter.observe(sure([3, 7, 8], [3.5, 0.3, 0.1]))
    assert drafter.propose(10).tokens.tolist() == [50]
    # With λ = 0 the key is one token, and both places are drafted from.
    drafter = ReSpec(ReSpec.Options(fallback="none", length=1, weight=0.0))
    drafter.start([7, 8, 50, 6, 8, 60, 5, 7])
    drafter.observe(sure([3, 7, 8], [3.5, 0.3, 0.1]))
    assert sorted(drafter.propose(10).tokens.tolist()) == [50, 60]


def test_respec_learns_which_places_serve() -> None:
    drafter = ReSpec(ReSpec.Options(fallback="none", length=2, rate=0.5, least_score=0.2, candidates=2, weight=0.0))
    drafter.start([8, 10, 11, 8, 20, 21, 8, 30, 31, 5])

    def ask() -> list[int]:
        drafter.observe(sure([8], [0.0]))
        return [path[0] for path in paths(drafter.propose(20)) if len(path) == 1]

    assert sorted(ask()) == [20, 30]  # equal scores: the latest two
    draft = drafter.propose(20)
    branch = next(node for node, path in enumerate(paths(draft)) if path == (20,))
    leaf = next(node for node, path in enumerate(paths(draft)) if path == (20, 21))
    drafter.observe(sure([20, 21, 5], [0.0] * 3, draft, (branch, leaf)))
    # 20 21 was right: 0.5 → 0.75; 30 31 was not: 0.5 → 0.25; 10 11 was not tried: 0.5.
    assert sorted(ask())[:2] != sorted([20, 30])
    assert 20 in ask()


def ranked(*best: int) -> list[int]:
    """A row of the signal: these tokens, then some that nobody asks for."""
    return [*best, *range(900, 900 + TOP - len(best))]


def test_recycling_weaves_the_kept_successors_into_a_tree() -> None:
    drafter = Recycling(Recycling.Options(successors=2, depth=3))
    drafter.start([5, 6])
    assert len(drafter.propose(10)) == 0  # nothing is known yet
    drafter.observe(step([7], top=[ranked(7, 8)]))  # 6 was forwarded: 7 or 8 come next; 7 was picked
    assert len(drafter.propose(10)) == 0  # of 7 nothing is known
    # A pass over 7 and a draft 8 → 6: its rows say what follows 7, 8 and 6, though nothing of it was accepted.
    drafter.observe(step([6], chain([8, 6], [0.5, 0.5]), (), [ranked(6, 9), ranked(1, 2), ranked(7, 5)]))
    draft = drafter.propose(100)
    assert set(paths(draft)) == {
        (7,), (7, 6), (7, 6, 7), (7, 6, 5), (7, 9), (5,),
    }  # fmt: skip
    assert paths(draft)[0] == (7,)
    assert (np.diff(draft.path_probability()) <= 1e-9).all() or len(draft) > 0
    small = drafter.propose(2)
    assert paths(small) == [(7,), (5,)]
    # The last forwarding of a token counts.
    drafter.observe(step([6], chain([6], [0.5]), (), [ranked(1), ranked(3, 4)]))
    assert paths(drafter.propose(2))[0] == (3,)


def test_recycling_forgets_the_last_request() -> None:
    drafter = Recycling(Recycling.Options())
    drafter.start([5])
    drafter.observe(step([5], top=[ranked(5)]))
    assert len(drafter.propose(5))
    drafter.start([5])
    assert len(drafter.propose(5)) == 0


def test_logitspec_guesses_with_the_runners_up_of_the_last_pick() -> None:
    drafter = LogitSpec(LogitSpec.Options(length=4))
    drafter.start([1, 2, 3, 4, 9, 2, 7, 8, 5])
    # 2 was picked, and 7 and 6 were next to it: after 2 comes 3 (copied, the earliest), or 7 8 5 (known after 2), or 6.
    drafter.observe(step([2], top=[ranked(2, 7, 6)]))
    found = paths(drafter.propose(100))
    assert {(3,), (3, 4), (3, 4, 9), (7,), (7, 8), (7, 8, 5), (6,)} <= set(found)
    assert found[0] == (3,)
    # The row that the last token was picked from: after two accepted nodes it is the second one's.
    drafter.observe(step([50, 51, 52], chain([50, 51], [0.5, 0.5]), (0, 1), [ranked(50), ranked(51), ranked(52, 77)]))
    assert (77,) in paths(drafter.propose(100))
    # Cut at a stop token inside the path, the row is that of the cut.
    drafter.observe(step([50, 51], chain([50, 51], [0.5, 0.5]), (0, 1), [ranked(50), ranked(51, 66)]))
    assert (66,) in paths(drafter.propose(100))


def test_sam_copies_after_the_longest_match_as_far_as_it_reaches() -> None:
    text = list(range(100, 150))
    drafter = Sam(Sam.Options(threshold=3, growth=2.0, fallback="none"))
    drafter.start([*text, 7, 8, 9])
    assert len(drafter.propose(50)) == 0
    drafter.observe(step([102, 103]))
    assert len(drafter.propose(50)) == 0  # two tokens match, three must
    drafter.observe(step([104]))
    assert drafter.propose(50).tokens.tolist() == list(range(105, 112))  # 1 + 3 · 2
    assert drafter.propose(4).tokens.tolist() == list(range(105, 109))
    drafter.observe(step([105]))
    assert drafter.propose(50).tokens.tolist() == list(range(106, 115))


def test_sam_takes_a_store_that_knows_much_more_and_the_fallback_where_nobody_knows(
    new_store: Callable[..., Store],
) -> None:
    store = new_store([([5], [10, 11, 12, 13, 14, 15, 16, 17])])
    build_suffix(store)
    index = open_store(store.path).suffix_index()
    drafter = Sam(Sam.Options(threshold=3, bias=2, fallback="pld"), Resources((index,)))
    drafter.start([10, 11, 12, 13])
    assert drafter.propose(3).tokens.tolist() == [14, 15, 16]
    # The text's own match of 4 is longer than the store's 4 less the bias.
    drafter.start([10, 11, 12, 13, 90, 91, 10, 11, 12, 13])
    assert drafter.propose(3).tokens.tolist() == [90, 91, 10]
    drafter.start([70, 71, 70])
    assert drafter.propose(2).tokens.tolist() == [71, 70]  # prompt lookup
    with pytest.raises(UsageError, match="that is itself"):
        Sam(Sam.Options(fallback="sam"))
    with pytest.raises(UsageError, match="datastore of its own"):
        Sam(Sam.Options(fallback="rest"))
    with pytest.raises(UsageError, match="no fallback drafter"):
        Sam(Sam.Options(fallback="nobody"))


@pytest.mark.parametrize("name", ["recycling", "logitspec", "sam", "respec", "pld-plus", "adapld"])
@pytest.mark.parametrize("runtime", ["cpu", "generic", "cuda"])
def test_they_accept_something_on_a_model_that_repeats_itself(name: str, runtime: str) -> None:
    model = make_model(stop=False)
    engine = Engine(model, Method(name, budget=12), runtime=runtime)
    steps = list(engine.steps([9, 30, 12, 5, 77, 9, 30, 12], 120))
    assert Counters.of(steps).accepted > 5
    assert [token for one in steps for token in one.tokens] == [
        one.tokens[0]
        for one in Engine(model, Method("none"), runtime=runtime).steps([9, 30, 12, 5, 77, 9, 30, 12], 120)
    ]
