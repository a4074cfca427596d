"""What a step asks a store for."""

from __future__ import annotations

import numpy as np
import pytest

from specds.datastore.build_dense import DenseOptions, build_dense
from specds.datastore.dense import DenseIndex
from specds.datastore.store import open_store
from specds.decode.lookups import neighbours
from specds.model import LanguageModel

from ..datastore.test_dense import NewStore, states_of
from ..tools import random_documents


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
