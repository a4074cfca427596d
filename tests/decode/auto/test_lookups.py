"""What a step asks a store for."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specds.datastore.build_dense import DenseOptions, build_dense
from specds.datastore.dense import DenseIndex
from specds.datastore.store import open_store
from specds.datastore.suffix import SuffixIndex
from specds.datastore.suffix_array import build_suffix_array
from specds.datastore.suffix_parts import Parts
from specds.decode.auto.lookups import SuffixLookup, neighbours, suffix_trees, weighted_tree
from specds.model import LanguageModel

from ...datastore.test_dense import NewStore, states_of
from ...tools import random_documents


def test_one_call_finds_what_the_steps_of_it_find(
    new_store: NewStore, tiny: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = random_documents(40, longest=20)
    store = new_store(documents)
    build_dense(store, tiny, DenseOptions(dims=16))
    index = open_store(store.path).dense_index(tiny.fingerprint)
    found = 0
    for prompt, response in documents[:15]:
        text = prompt + response
        for at, state in enumerate(states_of(tiny, text)[:-1]):
            for token in (text[at + 1], 0, 127, 10**6):
                at_once = neighbours([index], state, token, 7, 5)
                with monkeypatch.context() as patch:
                    patch.setattr(DenseIndex, "alone", lambda *_: None)
                    by_steps = neighbours([index], state, token, 7, 5)
                assert (at_once is None) == (by_steps is None)
                if at_once is None or by_steps is None:
                    continue
                found += 1
                for own, other in zip(at_once.continuations, by_steps.continuations, strict=True):
                    np.testing.assert_array_equal(own, other)
                assert at_once[1:] == by_steps[1:]
    assert found > 50


@given(st.integers(0, 1 << 30))
@settings(max_examples=30, deadline=None)
def test_trees_of_a_match_are_the_index_own(seed: int) -> None:
    random = np.random.default_rng(seed)
    text = random.integers(0, 5, 300).astype(np.uint16)
    text[::37] = 65535
    index = SuffixIndex(Parts([(text, build_suffix_array(text))]))
    tail = random.integers(0, 5, 12)
    trees = suffix_trees(index, tail)
    match = index.match(tail, 16, 1)
    shorter = min(max(2, match.length // 2), 4)
    expected = {0: (match.length, 12, 40), 1: (shorter, 4, 16), 2: (1, 2, 8)}
    assert trees.keys() == {0} | ({1} if match.length > 2 else set()) | ({2} if match.length > 1 else set())
    for number, tree in trees.items():
        length, depth, nodes = expected[number]
        match = index.match(tail[-length:], length, 1)
        assert (tree.total, tree.length) == (match.occurrences, length)
        for own, other in zip(tree[:3], index.continuations(match, depth, nodes), strict=True):
            assert own.tolist() == other.tolist()


def test_the_store_that_came_true_is_asked() -> None:
    """Both know the text's end as well; what one says of it is never right."""
    wrong, right = (
        SuffixIndex(Parts([(text, build_suffix_array(text))]))
        for text in (np.array([1, 2, 9, 65535] * 3, np.uint16), np.array([1, 2, 3, 65535] * 3, np.uint16))
    )
    lookup = SuffixLookup([wrong, right], 16)
    text = np.array([1, 2])
    firsts = []
    for _ in range(3):
        firsts.append(int(lookup.ask(text)[0].tokens[0]))
        lookup.observe(3)
    assert firsts == [9, 3, 3]
    lookup.skip()
    lookup.observe(9)  # nothing was asked
    assert int(lookup.ask(text)[0].tokens[0]) == 3


@given(st.integers(0, 1 << 30))
@settings(max_examples=30, deadline=None)
def test_neighbours_become_one_tree_weighed_by_similarity(seed: int) -> None:
    random = np.random.default_rng(seed)
    block = random.integers(-1, 3, (int(random.integers(1, 9)), 4))
    similarity = np.sort(random.random(len(block)).astype(np.float32))[::-1].copy()
    tokens, parents, mass, total, top, margin = weighted_tree(block, similarity)
    weights = np.exp(12.0 * (similarity.astype(np.float64) - similarity[0]))
    expected: Counter[tuple[int, ...]] = Counter()
    for row, weight in zip(block.tolist(), weights.tolist(), strict=True):
        path = row[: row.index(-1)] if -1 in row else row
        for end in range(1, len(path) + 1):
            expected[tuple(path[:end])] += weight
    found = {}
    for node in range(len(tokens)):
        path, at = [], node
        while at >= 0:
            path.append(int(tokens[at]))
            at = parents[at]
        found[tuple(path[::-1])] = mass[node]
    assert found.keys() == expected.keys()
    assert all(found[path] == pytest.approx(expected[path]) for path in found)
    assert total == pytest.approx(weights.sum())
    assert top == similarity[0]
    assert margin == pytest.approx(similarity[0] - (similarity[1] if len(block) > 1 else -1.0))
