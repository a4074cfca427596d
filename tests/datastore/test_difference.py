"""The difference of two stores is that of two plain Python lists."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specds.datastore.build_suffix import build_suffix
from specds.datastore.corpus import Document, add_documents
from specds.datastore.creation import create_store
from specds.datastore.difference import Difference, difference
from specds.datastore.manifest import Identity
from specds.datastore.store import Store, open_store
from specds.errors import CorruptStore
from specds.tokenizer import Tokenizer, wrap_tokenizer

from ..conftest import fill, make_tokenizer
from ..tools import damage, random_documents, reseal

Row = tuple[str, str, tuple[int, ...], tuple[int, ...]]

tokens = st.lists(st.integers(0, 1), max_size=2).map(tuple)
rows = st.lists(
    st.tuples(st.sampled_from("abcdefg"), st.sampled_from("xy"), tokens, tokens),
    max_size=7,
    unique_by=lambda row: row[0],
)


def make(path: Path, tokenizer: Tokenizer, documents: list[Row], model: Identity | None = None) -> Store:
    store = create_store(path, tokenizer)
    with store.writer() as writer:
        made = [
            Document(doc_id, source, np.array(prompt, np.int32), np.array(response, np.int32))
            for doc_id, source, prompt, response in documents
        ]
        add_documents(writer, made, origin="generated" if model else "ingested", model=model)
    return open_store(path)


def counts(found: Difference, where: str) -> dict[str, tuple[int, int]]:
    pairs = {name: getattr(source, where) for name, source in found.sources.items()}
    return {name: (one.documents, one.tokens) for name, one in pairs.items() if one.documents}


@settings(max_examples=80)
@given(rows, rows)
def test_documents_are_told_apart_as_lists_are(
    tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer, first: list[Row], second: list[Row]
) -> None:
    folder = tmp_path_factory.mktemp("pair")
    one, other = make(folder / "one.ds", tokenizer, first), make(folder / "other.ds", tokenizer, second)
    found = difference(one, other)
    mine, others = ({row[0]: row for row in side} for side in (first, second))
    texts = [Counter(row[2:] for row in side) for side in (first, second)]
    # What is in only one store is what the multisets of texts say, whatever the ids.
    assert Counter(mine[doc_id][2:] for doc_id in found.first) == texts[0] - texts[1]
    assert Counter(others[doc_id][2:] for doc_id in found.second) == texts[1] - texts[0]
    same = {doc_id for doc_id in mine.keys() & others.keys() if mine[doc_id][2:] == others[doc_id][2:]}
    assert not same & {*found.first, *found.second, *found.changed}
    assert set(found.changed) == set(found.first) & set(found.second)
    pairs = [(doc_id, doc_id) for doc_id in same] + found.renamed
    assert all(mine[a][2:] == others[b][2:] for a, b in pairs)
    assert sorted([a for a, _ in pairs] + found.first) == sorted(mine)
    assert sorted([b for _, b in pairs] + found.second) == sorted(others)
    assert sorted(found.relabelled) == sorted(a for a, b in pairs if mine[a][1] != others[b][1])
    for where, ids, side in (
        ("first", found.first, mine),
        ("second", found.second, others),
        ("both", [a for a, _ in pairs], mine),
    ):
        expected: dict[str, tuple[int, int]] = {}
        for doc_id in ids:
            documents, total = expected.get(side[doc_id][1], (0, 0))
            expected[side[doc_id][1]] = documents + 1, total + sum(map(len, side[doc_id][2:]))
        assert counts(found, where) == expected
    if found.same_contents:
        assert Counter(row[1:] for row in first) == Counter(row[1:] for row in second)
    back = difference(other, one)
    assert (len(back.first), len(back.second)) == (len(found.second), len(found.first))
    assert difference(one, one).same_contents


def test_ids_of_another_tokenizer_are_other_tokens(tmp_path: Path, tokenizer: Tokenizer) -> None:
    documents: list[Row] = [("a", "x", (5,), (6, 7))]
    one = make(tmp_path / "one.ds", tokenizer, documents, Identity("tiny", "f1"))
    other = make(tmp_path / "other.ds", wrap_tokenizer(make_tokenizer(90), "small"), documents)
    found = difference(one, other)
    assert not found.same_tokenizer
    assert not found.same_contents
    assert found.first == found.second == found.changed == ["a"]
    assert found.models == ([Identity("tiny", "f1")], [])


def test_indexes_are_compared_by_what_they_cover_and_their_parameters(
    new_store: Callable[..., Store], stocked: dict[str, Path]
) -> None:
    one, other = new_store(random_documents(5)), new_store(random_documents(5))
    assert difference(one, other).indexes == []
    build_suffix(one)
    one = open_store(one.path)
    (index,) = difference(one, other).indexes
    assert (index.kind, index.segments, index.differs, index.parameters) == ("suffix", (1, 0), True, {})
    build_suffix(other)
    (index,) = difference(one, open_store(other.path)).indexes
    assert not index.differs
    kinds = [open_store(stocked[kind]) for kind in ("scann", "faiss")]
    suffix, dense = difference(*kinds).indexes
    assert difference(*kinds).same_contents
    assert not suffix.differs
    assert dense.differs
    assert dense.parameters["ann"] == (["scann"], ["faiss"])
    assert dense.models[0] == dense.models[1] != []


def test_a_forged_corpus_is_refused(new_store: Callable[..., Store]) -> None:
    one, other = new_store(random_documents(5)), new_store(random_documents(5))
    damage(other.path / "corpus/part-00001.parquet", "halved")
    reseal(other.path)
    for pair in ((one, open_store(other.path)), (open_store(other.path), one)):
        with pytest.raises(CorruptStore):
            difference(*pair)


def test_what_was_added_is_found(new_store: Callable[..., Store]) -> None:
    one, other = new_store(random_documents(5)), new_store(random_documents(5))
    other = fill(other, [([5], [6]), ([], [7, 8])], source="more")
    found = difference(one, other)
    assert (found.first, found.second) == ([], ["more-0", "more-1"])
    assert counts(found, "second") == {"more": (2, 4)}
    assert counts(found, "both") == {"test": (5, one.manifest.tokens)}
