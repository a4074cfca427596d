"""Keys by the token that follows: all of them compared, whatever the positions say."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from specds.datastore import by_token
from specds.datastore.build_dense import DenseOptions, build_dense
from specds.datastore.by_token import ByToken
from specds.datastore.rewriting import remove
from specds.datastore.store import open_store
from specds.model import LanguageModel

from ..conftest import fill
from ..tools import random_documents
from .test_dense import NewStore, states_of, unit

END, GONE = 65535, 2**32 - 1


def expected(
    keys: NDArray[np.float32], positions: NDArray[Any], tokens: NDArray[Any], query: NDArray[np.float32], token: int
) -> dict[int, float]:
    """Similarity by position, by brute force."""
    real = [row for row, at in enumerate(positions.tolist()) if at < len(tokens) and tokens[at] == token != END]
    return {int(positions[row]): float(keys[row] @ query) for row in real}


@given(st.data(), st.integers(0, 400), st.integers(1, 6), st.integers(0, 2**32 - 1))
def test_the_nearest_of_those_followed_by_a_token_are_found(data: Any, count: int, kinds: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    keys = unit(max(count, 1), seed=seed)[:count].reshape(count, 16)
    tokens = rng.integers(0, kinds, max(count, 1) + 3).astype(np.uint16)
    tokens[rng.random(len(tokens)) < 0.1] = END
    positions = rng.permutation(len(tokens))[:count].astype(np.uint32)
    positions[rng.random(count) < 0.1] = GONE
    made = ByToken(keys, positions, tokens)
    query = unit(1, seed=seed + 1)[0]
    token = data.draw(st.sampled_from([-1, 0, 1, kinds - 1, kinds, END, 70000]))
    k = data.draw(st.integers(1, 500))
    found = made.search(query, token, k)
    assert found is not None
    similarity, where = found
    right = expected(keys, positions, tokens, query, token)
    assert len(where) == min(k, len(right)) == len(set(where.tolist()))
    assert (np.diff(similarity) <= 0).all()
    np.testing.assert_allclose(similarity, [right[at] for at in where.tolist()], atol=0.01)
    np.testing.assert_allclose(similarity, sorted(right.values(), reverse=True)[:k], atol=0.01)


def test_too_many_are_left_to_an_approximate_search(monkeypatch: pytest.MonkeyPatch) -> None:
    made = ByToken(unit(50), np.arange(50, dtype=np.uint32), np.repeat([3, 4], [40, 10]).astype(np.uint16))
    monkeypatch.setattr(by_token, "MOST_COMPARED", 20)
    assert made.search(unit(1)[0], 3, 5) is None
    found = made.search(unit(1)[0], 4, 5)
    assert found is not None
    assert len(found[0]) == 5


def test_keys_and_queries_that_are_no_numbers_are_like_nothing() -> None:
    keys = unit(40)
    keys[3, 2], keys[5, 0], keys[7], keys[11] = np.nan, np.inf, 0.0, 3e38
    made = ByToken(keys, np.arange(40, dtype=np.uint32), np.full(40, 1, np.uint16))
    few = made.search(keys[0], 1, 3)
    assert few is not None
    assert len(few[0]) == 3
    found = made.search(keys[0], 1, 40)
    assert found is not None
    assert np.isfinite(found[0]).all()
    assert found[1][0] == 0
    assert {float(found[0][found[1].tolist().index(row)]) for row in (3, 5, 7, 11)} == {0.0}
    for wrong in (np.nan, np.inf):
        nothing = made.search(np.full(16, wrong, np.float32), 1, 5)
        assert nothing is not None
        assert not len(nothing[0])


def test_ids_that_no_vocabulary_has_take_no_memory() -> None:
    tokens = np.array([7, 2**32 - 2, 1 << 23, 2**32 - 1, 7], np.uint32)
    made = ByToken(unit(5), np.arange(5, dtype=np.uint64), tokens)
    assert len(made.table.starts) == 9
    found = made.search(unit(1)[0], 7, 9)
    assert found is not None
    assert sorted(found[1].tolist()) == [0, 4]
    for token in (2**32 - 2, 1 << 23):
        found = made.search(unit(1)[0], token, 9)
        assert found is not None
        assert not len(found[0])


@pytest.mark.parametrize("kind", ["scann", "faiss"])
@pytest.mark.parametrize("kept", ["float32", "half", "int8"])
def test_an_index_finds_what_a_filtered_search_of_all_finds(
    kind: str, kept: str, new_store: NewStore, tiny: LanguageModel
) -> None:
    """In two segments, of which some documents were removed."""
    documents = random_documents(30)
    store = new_store(documents[:20])
    build_dense(store, tiny, DenseOptions(kind, dims=16, kept=kept))
    fill(open_store(store.path), documents[20:], source="later")
    build_dense(open_store(store.path), tiny, DenseOptions())
    remove(open_store(store.path), ids=["test-1", "later-2"])
    index = open_store(store.path).dense_index(tiny.fingerprint)
    assert len(index.parts) == 2
    assert all((part.by_token() is None) == (kept == "int8") for part in index.parts)
    for prompt, response in documents[:6]:
        text = prompt + response
        for at, state in enumerate(states_of(tiny, text)[:-1]):
            # Without keys these are among the nearest of all, so all must be asked for.
            most = 5 if kept != "int8" else 100_000
            similarity, positions = index.search_followed_by(state, text[at + 1], most)
            every, where = index.search(state, 100_000)
            right = index.starting_with(where, text[at + 1])[:most]
            np.testing.assert_allclose(similarity, every[right], atol=0.02)
            assert index.following(positions, 1)[:, 0].tolist() == [text[at + 1]] * len(positions)
