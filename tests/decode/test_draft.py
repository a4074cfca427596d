from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from specds.decode.draft import Draft, chain, empty, merge

from .drafts import build, drafts, is_valid, path_to, paths


@given(drafts())
def test_ancestors_and_depths_follow_the_parents(draft: Draft) -> None:
    seen, depths = draft.ancestors(), draft.depths()
    for node in range(len(draft)):
        above, at = set(), node
        while at >= 0:
            above.add(at)
            at = int(draft.parents[at])
        assert set(np.flatnonzero(seen[node]).tolist()) == above
        assert depths[node] == len(above)


@given(drafts(), st.integers(0, 30), st.none() | st.integers(0, 6))
def test_trim_keeps_a_whole_tree_within_budget_and_depth(draft: Draft, budget: int, depth: int | None) -> None:
    cut = draft.trim(budget, depth)
    assert is_valid(cut)
    assert len(cut) <= budget
    assert paths(cut) <= paths(draft)
    if depth is not None and len(cut):
        assert int(cut.depths().max()) <= depth
    fitting = sum(1 for at in draft.depths() if depth is None or at <= depth)
    assert len(cut) == min(budget, fitting)


def test_trim_keeps_the_likeliest_nodes() -> None:
    draft = Draft(
        np.array([1, 2, 3, 4], np.int32),
        np.array([-1, -1, 0, 1], np.int32),
        np.array([0.3, 0.6, 0.9, 0.9], np.float32),
    )
    assert paths(draft.trim(2)) == {(2,), (2, 4)}


@given(
    st.lists(st.lists(st.integers(0, 3), max_size=6).map(lambda path: np.array(path, np.int64)), max_size=8),
    st.integers(0, 20),
)
def test_merge_is_the_trie_of_its_paths(candidates: list[np.ndarray], budget: int) -> None:
    every = {tuple(path[:end].tolist()) for path in candidates for end in range(1, len(path) + 1)}
    whole = merge(candidates, [1.0] * len(candidates), 1000)
    assert is_valid(whole)
    assert paths(whole) == every
    cut = merge(candidates, [1.0] * len(candidates), budget)
    assert is_valid(cut)
    assert len(cut) == min(budget, len(every))
    assert paths(cut) <= every
    # What is left out is never likelier than what is kept.
    likelihood = {path_to(whole, node): p for node, p in enumerate(whole.path_probability())}
    kept = [likelihood[path] for path in paths(cut)]
    dropped = [likelihood[path] for path in every - paths(cut)]
    assert not kept or not dropped or min(kept) >= max(dropped) - 1e-9


def test_merge_scores_are_shares_of_the_parents_weight() -> None:
    draft = merge([np.array([5, 6]), np.array([5, 7]), np.array([8])], [2.0, 1.0, 1.0], 10)
    score = {path_to(draft, node): float(draft.score[node]) for node in range(len(draft))}
    assert score[(5,)] == np.float32(3 / 5)
    assert score[(5, 6)] == np.float32(2 / 4)
    assert score[(8,)] == np.float32(1 / 5)


def test_equal_inputs_give_equal_drafts() -> None:
    candidates = [np.array([3, 1]), np.array([2, 1]), np.array([1, 1])]
    first, second = (merge(candidates, [1.0, 1.0, 1.0], 4) for _ in range(2))
    assert first.tokens.tolist() == second.tokens.tolist() == [3, 2, 1, 1]


def test_empty_and_chain() -> None:
    assert len(empty()) == 0
    assert empty().ancestors().shape == (0, 0)
    line = chain([4, 5, 6], [0.5, 0.5, 0.5])
    assert line.parents.tolist() == [-1, 0, 1]
    assert line.depths().tolist() == [1, 2, 3]
    assert is_valid(build([(-1, 1), (-1, 1), (0, 2)]))
