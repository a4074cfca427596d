"""Equal documents and shared passages are exactly those that brute force finds."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specds.datastore.corpus import Document, add_documents, read_documents
from specds.datastore.creation import create_store
from specds.datastore.duplicates import _repeated, find_boilerplate, find_duplicates
from specds.datastore.manifest import SourceCount
from specds.datastore.store import Store, open_store
from specds.errors import CorruptStore, UsageError
from specds.tokenizer import Tokenizer, wrap_tokenizer

from ..conftest import fill, make_tokenizer
from ..tools import damage, reseal

Texts = list[list[int]]


def marked(responses: Texts, length: int, keep: int) -> list[list[bool]]:
    """Which tokens are in a passage that stands in `keep` responses before."""
    held: dict[tuple[int, ...], set[int]] = defaultdict(set)
    found = []
    for number, text in enumerate(responses):
        marks = [False] * len(text)
        for place in range(len(text) - length + 1):
            passage = tuple(text[place : place + length])
            if len(held[passage] - {number}) >= keep:
                marks[place : place + length] = [True] * length
            held[passage].add(number)
        found.append(marks)
    return found


@st.composite
def corpora(draw: st.DrawFn) -> Texts:
    """Responses made of a few pieces again and again, or of few values."""
    values = st.integers(0, draw(st.integers(0, 3)))
    pieces = draw(st.lists(st.lists(values, max_size=8), min_size=1, max_size=4))
    joined = st.lists(st.sampled_from(pieces), max_size=4).map(lambda picks: [one for piece in picks for one in piece])
    return draw(st.lists(joined | st.lists(values, max_size=10), max_size=8))


@settings(max_examples=400)
@given(corpora(), st.integers(1, 6), st.integers(1, 3), st.sampled_from([np.uint16, np.uint32]))
def test_repeated_passages_are_those_of_brute_force(
    responses: Texts, length: int, keep: int, dtype: type[np.uint16] | type[np.uint32]
) -> None:
    separator = np.iinfo(dtype).max
    # The largest id lies next to the separator.
    texts = [[separator - 1 if one == 3 else one for one in text] for text in responses]
    tokens = np.array([one for text in texts for one in [*text, separator]], dtype)
    starts = np.cumsum([0, *(len(text) + 1 for text in texts)], dtype=np.int64)
    marks = _repeated(tokens, starts, length, keep)
    found = [marks[start : start + len(text)].tolist() for start, text in zip(starts[:-1], texts, strict=True)]
    assert found == marked(texts, length, keep)
    assert not marks[tokens == separator].any()


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.lists(st.integers(0, 2), max_size=3), st.sampled_from("ab")), max_size=8),
    corpora(),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 5),
    st.sets(st.integers(0, 7), max_size=3),
)
def test_cuts_pieces_and_savings_of_a_store(
    tmp_path_factory: pytest.TempPathFactory,
    tokenizer: Tokenizer,
    heads: list[tuple[list[int], str]],
    responses: Texts,
    length: int,
    keep: int,
    shortest: int,
    without: set[int],
) -> None:
    rows = [
        Document(f"d{number}", source, np.array(prompt, np.int32), np.array(response, np.int32))
        for number, ((prompt, source), response) in enumerate(zip(heads, responses, strict=False))
    ]
    store = create_store(tmp_path_factory.mktemp("cut") / "s.ds", tokenizer)
    with store.writer() as writer:
        for part in (rows[:3], rows[3:]):
            add_documents(writer, part, origin="ingested")
    store = open_store(store.path)
    left_out = {f"d{number}" for number in without}
    kept = [row for row in rows if row.doc_id not in left_out]
    found = find_boilerplate(store, length=length, keep=keep, shortest=shortest, without=left_out)
    cuts = {cut.doc_id: cut for cut in found.cuts}
    saved: Counter[tuple[str, str]] = Counter()
    for row, marks in zip(kept, marked([row.response.tolist() for row in kept], length, keep), strict=True):
        if not any(marks):
            assert row.doc_id not in cuts
            continue
        cut = cuts.pop(row.doc_id)
        assert cut.source == row.source
        covered = {place for start, end in cut.spans for place in range(start, end)}
        assert covered == {place for place, mark in enumerate(marks) if mark}
        assert all(before[1] < after[0] for before, after in zip(cut.spans, cut.spans[1:], strict=False)), "maximal"
        whole = "".join("x" if mark else "." for mark in marks)
        assert [whole[start:end] for start, end in cut.pieces] == [
            run for run in whole.split("x") if len(run) >= shortest
        ]
        made = cut.apply(row)
        assert len({one.doc_id for one in made}) == len(made) == len(cut.pieces)
        assert [one.response.tolist() for one in made] == [row.response[a:b].tolist() for a, b in cut.pieces]
        prompts = [one.prompt.tolist() for one in made]
        assert prompts == [row.prompt.tolist() if start == 0 else [] for start, _ in cut.pieces]
        if made:
            assert made[0].doc_id == row.doc_id
        before = len(row.prompt) + len(row.response)
        saved[row.source, "tokens"] += before - sum(len(one.prompt) + len(one.response) for one in made)
        saved[row.source, "documents"] += not made
    assert not cuts
    assert {name: (one.documents, one.tokens) for name, one in found.saved.items()} == {
        name: (saved[name, "documents"], saved[name, "tokens"]) for name, _ in saved
    }


def test_a_licence_header_stays_once(new_store: Callable[..., Store]) -> None:
    header = list(range(40, 80))
    bodies = [[number] * 20 for number in (5, 6, 7)]
    store = new_store([([3, 4], header + body) for body in bodies])
    found = find_boilerplate(store)
    assert [cut.doc_id for cut in found.cuts] == ["test-1", "test-2"]
    assert [cut.spans for cut in found.cuts] == [((0, 40),)] * 2
    assert found.saved == {"test": SourceCount(0, 2 * 42)}
    left = [cut.apply(document)[0] for cut, document in zip(found.cuts, list(read_documents(store))[1:], strict=True)]
    assert [one.response.tolist() for one in left] == bodies[1:]
    assert [cut.doc_id for cut in find_boilerplate(store, keep=2).cuts] == ["test-2"]
    assert find_boilerplate(store, keep=3).cuts == find_boilerplate(store, length=41).cuts == ()
    # What is cut once is not found again.
    again = new_store([([3, 4], header + bodies[0]), *(([], one.response.tolist()) for one in left)])
    assert find_boilerplate(again).cuts == ()


def test_ids_beyond_16_bits(tmp_path: Path) -> None:
    large = create_store(tmp_path / "large.ds", wrap_tokenizer(make_tokenizer(70_000), "large"))
    store = fill(large, [([], [69_999, 4_463, 1]), ([], [4_463, 69_999]), ([], [2, 69_999, 4_463, 2])])
    assert [(cut.doc_id, cut.spans) for cut in find_boilerplate(store, length=2, shortest=1).cuts] == [
        ("test-2", ((1, 3),))
    ]


texts = st.lists(st.integers(0, 1), max_size=2)


@settings(max_examples=60)
@given(st.lists(st.tuples(texts, texts), max_size=12), st.booleans())
def test_duplicates_are_those_of_brute_force(
    tmp_path_factory: pytest.TempPathFactory,
    tokenizer: Tokenizer,
    documents: list[tuple[list[int], list[int]]],
    prompts: bool,
) -> None:
    store = create_store(tmp_path_factory.mktemp("equal") / "s.ds", tokenizer)
    for source, part in (("a", documents[:5]), ("b", documents[5:])):
        store = fill(store, part, source)
    named = [(f"a-{n}", one) for n, one in enumerate(documents[:5])]
    named += [(f"b-{n}", one) for n, one in enumerate(documents[5:])]
    expected = []
    for place, (doc_id, (prompt, response)) in enumerate(named):
        for _, (other_prompt, other) in named[:place]:
            if other == response and (other_prompt == prompt or not (prompts or not response)):
                expected.append(doc_id)
                break
    found = find_duplicates(store, prompts=prompts)
    assert list(found.doc_ids) == expected
    lengths = {doc_id: len(prompt) + len(response) for doc_id, (prompt, response) in named}
    for source, count in found.saved.items():
        mine = [doc_id for doc_id in expected if doc_id.startswith(source)]
        assert (count.documents, count.tokens) == (len(mine), sum(lengths[doc_id] for doc_id in mine))
    assert sum(count.documents for count in found.saved.values()) == len(expected)


@pytest.mark.parametrize("wrong", [{"length": 0}, {"keep": 0}, {"shortest": -1}])
def test_numbers_below_one_are_refused(wrong: dict[str, int], new_store: Callable[..., Store]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        find_boilerplate(new_store([([], [5, 6])]), **wrong)


@pytest.mark.parametrize("how", ["halved", "emptied", "flipped"])
def test_a_corpus_forged_with_fitting_checksums_is_refused(how: str, new_store: Callable[..., Store]) -> None:
    store = new_store([([5], [6, 7, 8] * 30)] * 3)
    damage(store.path / "corpus/part-00001.parquet", how)
    reseal(store.path)
    forged = open_store(store.path)
    for search in (find_duplicates, find_boilerplate):
        with pytest.raises(CorruptStore):
            search(forged)
