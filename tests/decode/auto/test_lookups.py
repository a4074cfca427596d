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
from specds.datastore.suffix_lookup import Parts
from specds.decode.auto.lookups import _prefixes, neighbours, suffix_trees
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
                for one, other in zip(at_once.branches, by_steps.branches, strict=True):
                    np.testing.assert_array_equal(one, other)
                assert (at_once.weight, at_once.similarity, at_once.margin) == (
                    by_steps.weight,
                    by_steps.similarity,
                    by_steps.margin,
                )
    assert found > 50


@given(st.integers(0, 1 << 30))
@settings(max_examples=30, deadline=None)
def test_trees_of_a_match_are_the_index_own(seed: int) -> None:
    random = np.random.default_rng(seed)
    text = random.integers(0, 5, 300).astype(np.uint16)
    text[::37] = 65535
    index = SuffixIndex(Parts([(text, build_suffix_array(text))]))
    tail = random.integers(0, 5, 12)
    found = suffix_trees(index.parts, tail)
    match = index.match(tail, 16, 1)
    assert found[0][1:] == (match.occurrences, match.length)
    tokens, parents, counts = index.continuations(match, 12, 40)
    for mine, own in zip(found[0][0], (tokens, parents, counts), strict=True):
        assert mine.tolist() == own.tolist()
    if match.length > 1:
        last = index.match(tail[-1:], 1, 1)
        assert found[2][1:] == (last.occurrences, 1)


@given(st.integers(0, 1 << 30))
@settings(max_examples=30, deadline=None)
def test_neighbours_become_one_tree_weighed_by_similarity(seed: int) -> None:
    random = np.random.default_rng(seed)
    block = random.integers(-1, 3, (int(random.integers(1, 9)), 4))
    similarity = np.sort(random.random(len(block)).astype(np.float32))[::-1].copy()
    tokens, parents, mass, total, top, margin = _prefixes(block, similarity)
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
