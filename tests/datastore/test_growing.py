"""Stores that grow and shrink: after every step they answer as a store made anew of what they hold."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from specds.datastore import ann
from specds.datastore.build_dense import DenseOptions, build_dense
from specds.datastore.build_suffix import build_suffix
from specds.datastore.compaction import compact, rebuild_suffix
from specds.datastore.corpus import Document, add_documents, read_documents
from specds.datastore.creation import create_store
from specds.datastore.duplicates import find_duplicates
from specds.datastore.integrity import find_problems
from specds.datastore.manifest import Segment
from specds.datastore.merging import merge
from specds.datastore.rewriting import Removal, remove, rewrite
from specds.datastore.segments import portions, to_join
from specds.datastore.store import Store, open_store
from specds.datastore.suffix import Match
from specds.errors import CorruptStore, ForeignTokenizer, UsageError
from specds.model import LanguageModel
from specds.tokenizer import Tokenizer, wrap_tokenizer

from ..conftest import NewStore, fill, make_model, make_tokenizer
from ..tools import corpus_of, random_documents, snapshot, strays
from .test_dense import states_of

Held = dict[str, tuple[str, list[int], list[int]]]

tokens = st.lists(st.integers(2, 6), max_size=6)
documents = st.lists(st.tuples(tokens, tokens.filter(bool), st.sampled_from("abc")), min_size=1, max_size=4)


def occurrences(texts: list[list[int]], wanted: list[int]) -> int:
    """How often a text stands in others."""
    return sum(
        text[start : start + len(wanted)] == wanted for text in texts for start in range(len(text) - len(wanted) + 1)
    )


def best_match(texts: list[list[int]], context: list[int], shortest: int) -> tuple[int, int]:
    """Length and occurrences of the longest suffix of a context that something follows, by looking everywhere."""
    for length in range(len(context), shortest - 1, -1):
        wanted = context[len(context) - length :]
        if any(occurrences([text[:-1]], wanted) for text in texts if text):
            return length, occurrences(texts, wanted)
    return 0, 0


class Growing(RuleBasedStateMachine):
    """Add, build, remove, compact, merge, dedupe and reopen, against a plain dictionary of documents."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp())
        self.tokenizer = wrap_tokenizer(make_tokenizer(), "tiny")
        self.held: Held = {}
        self.indexed: set[str] = set()
        self.removed: set[str] = set()
        self.number = 0

    def teardown(self) -> None:
        shutil.rmtree(self.root)

    @initialize()
    def make(self) -> None:
        self.path = create_store(self.root / "0.ds", self.tokenizer).path

    def add_to(self, store: Store, new: list[tuple[list[int], list[int], str]]) -> Held:
        made: Held = {}
        for prompt, response, source in new:
            self.number += 1
            made[f"d{self.number}"] = (source, prompt, response)
        rows = [
            Document(name, source, np.array(prompt, np.int32), np.array(response, np.int32))
            for name, (source, prompt, response) in made.items()
        ]
        with store.writer() as writer:
            add_documents(writer, rows, origin="ingested")
        return made

    @rule(new=documents)
    def add(self, new: list[tuple[list[int], list[int], str]]) -> None:
        self.held |= self.add_to(open_store(self.path), new)

    @precondition(lambda self: self.held)
    @rule()
    def build(self) -> None:
        build_suffix(open_store(self.path))
        self.indexed = set(self.held)

    @rule(source=st.sampled_from("abc"))
    def remove_source(self, source: str) -> None:
        if any(one[0] == source for one in self.held.values()):
            remove(open_store(self.path), sources=[source])
            self.held = {name: one for name, one in self.held.items() if one[0] != source}
            self.removed.add(source)
        elif source in self.removed:
            assert remove(open_store(self.path), sources=[source]).done
        else:
            with pytest.raises(UsageError):
                remove(open_store(self.path), sources=[source])

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def remove_documents(self, data: st.DataObject) -> None:
        gone = data.draw(st.lists(st.sampled_from(sorted(self.held)), min_size=1, unique=True))
        remove(open_store(self.path), ids=gone)
        self.held = {name: one for name, one in self.held.items() if name not in gone}

    @rule()
    def compact(self) -> None:
        compact(open_store(self.path))
        assert len(open_store(self.path).manifest.suffix) <= 1

    @rule()
    def dedupe(self) -> None:
        store = open_store(self.path)
        gone = set(find_duplicates(store).doc_ids)
        rewrite(store, lambda one: () if one.doc_id in gone else (one,), "removed copies")
        self.held = {name: one for name, one in self.held.items() if name not in gone}

    @precondition(lambda self: self.indexed)
    @rule()
    def rebuild(self) -> None:
        rebuild_suffix(open_store(self.path))

    @rule(new=documents, twins=st.booleans(), built=st.booleans())
    def merge_with(self, new: list[tuple[list[int], list[int], str]], twins: bool, built: bool) -> None:
        self.number += 1
        other = create_store(self.root / f"other-{self.number}.ds", self.tokenizer)
        made = self.add_to(other, new)
        if twins and self.held:
            name = min(self.held)
            source, prompt, response = self.held[name]
            with open_store(other.path).writer() as writer:
                row = Document(name, source, np.array(prompt, np.int32), np.array(response, np.int32))
                add_documents(writer, [row], origin="ingested")
        if built:
            build_suffix(open_store(other.path))
            self.indexed |= made.keys()
        self.number += 1
        out = self.root / f"{self.number}.ds"
        merger = merge([open_store(self.path), open_store(other.path)], out)
        assert merger.twice == (twins and bool(self.held))
        self.held |= made
        # What was removed before stands in the history, which came along.
        self.path = out

    @invariant()
    def it_answers_as_the_documents_say(self) -> None:
        store = open_store(self.path)
        assert find_problems(self.path)[0] == []
        assert strays(self.path) == []
        found = {one.doc_id: (one.source, one.prompt.tolist(), one.response.tolist()) for one in read_documents(store)}
        assert found == self.held
        covered = [name for segment in store.manifest.suffix for name in segment.shards]
        texts = [one.prompt.tolist() + one.response.tolist() for one in read_documents(store, covered)]
        assert {one.doc_id for one in read_documents(store, covered)} == self.indexed & self.held.keys()
        if not store.manifest.suffix:
            return
        index = store.suffix_index()
        for context in ([2, 3], [2, 2, 2], [3, 4, 5, 6], [6, 5, 4], *(text[:-1] for text in texts[:3])):
            match = index.match(np.array(context, np.int64), min_match=1)
            assert (match.length, match.occurrences) == best_match(texts, context[-16:], 1), context
            if not match.length:
                continue
            drafted, parents, counts = (part.tolist() for part in index.continuations(match, 3, 64))
            paths: list[list[int]] = []
            for token, parent in zip(drafted, parents, strict=True):
                paths.append([*(paths[parent] if parent >= 0 else context[-match.length :]), token])
            assert counts == [occurrences(texts, path) for path in paths]


TestGrowing = Growing.TestCase
TestGrowing.settings = settings(
    max_examples=30, stateful_step_count=12, deadline=None, suppress_health_check=list(HealthCheck)
)


@pytest.mark.parametrize("kind", ann.KINDS)
def test_a_dense_index_that_grew_finds_what_one_built_at_once_finds(
    kind: str, new_store: NewStore, tiny: LanguageModel
) -> None:
    first, second, third = random_documents(30), random_documents(12, seed=1), random_documents(50, seed=2)
    store = new_store(first)
    for number, more in enumerate((None, second, third)):
        if more:
            store = fill(open_store(store.path), more, source=f"more-{number}")
        build_dense(store, tiny, DenseOptions(kind, dims=16))
    index = open_store(store.path).dense_index(tiny.fingerprint)
    # The third batch is larger than what was there, and has taken it in.
    assert len(index.parts) == 1
    compare_with_brute_force(index, tiny, [prompt + response for prompt, response in [*first, *second, *third]])
    # A small one stays by itself, and is found too.
    store = fill(open_store(store.path), random_documents(5, seed=3), source="last")
    build_dense(store, tiny)
    index = open_store(store.path).dense_index(tiny.fingerprint)
    assert len(index.parts) == 2
    assert index.parts[0].normalizer is index.parts[1].normalizer
    texts = [prompt + response for prompt, response in [*first, *second, *third, *random_documents(5, seed=3)]]
    compare_with_brute_force(index, tiny, texts)
    compact(open_store(store.path))
    index = open_store(store.path).dense_index(tiny.fingerprint)
    assert len(index.parts) == 1
    compare_with_brute_force(index, tiny, texts)


def compare_with_brute_force(index: object, model: LanguageModel, texts: list[list[int]]) -> None:
    """The ten nearest, by the index's own normalizer over all states of the texts."""
    from specds.datastore.dense import DenseIndex

    assert isinstance(index, DenseIndex)
    normalizer = index.parts[0].normalizer
    keys = np.concatenate([normalizer.keys(states_of(model, text)[:-1]) for text in texts if len(text) > 1])
    follows = [tuple(text[at + 1 : at + 4]) for text in texts for at in range(len(text) - 1)]
    for seed in range(5):
        state = np.random.default_rng(seed).normal(size=len(normalizer.mean)).astype(np.float32)
        exact = keys @ normalizer.key(state)
        best = np.argsort(-exact, kind="stable")[:10]
        similarity, positions = index.search(state, 10)
        np.testing.assert_allclose(similarity, exact[best], atol=2e-3)
        found = [tuple(one.tolist()) for one in index.continuations(positions, 3)]
        near = {follows[row] for row in np.flatnonzero(exact >= exact[best[-1]] - 2e-3)}
        assert set(found) <= near


@pytest.mark.parametrize("kept", ["float32", "half", "int8"])
@pytest.mark.parametrize("kind", ann.KINDS)
def test_removed_documents_are_not_found_in_a_dense_index(
    kind: str, kept: str, new_store: NewStore, tiny: LanguageModel
) -> None:
    documents = random_documents(40)
    store = fill(new_store(documents[:25]), documents[25:], source="other")
    build_dense(store, tiny, DenseOptions(kind, dims=16, kept=kept))
    remove(open_store(store.path), sources=["other"])
    remove(open_store(store.path), ids=["test-3", "test-4"])
    left = [*documents[:3], *documents[5:25]]
    texts = [prompt + response for prompt, response in left]

    def check() -> None:
        index = open_store(store.path).dense_index(tiny.fingerprint)
        for text in (prompt + response for prompt, response in documents):
            for state in states_of(tiny, text)[:-1]:
                similarity, positions = index.search(state, 5)
                assert len(similarity) == 5
                for follows in index.continuations(positions, 4):
                    assert occurrences(texts, follows.tolist()), "a text that was removed"
        for text in texts[::5]:
            if len(text) > 1:
                similarity, _ = index.search(states_of(tiny, text)[0], 1)
                assert similarity[0] > 0.98

    check()
    (segment,) = open_store(store.path).manifest.dense
    assert segment.parameters["removed"] > 0
    compact(open_store(store.path))
    (segment,) = open_store(store.path).manifest.dense
    # Where keys are kept well enough, compaction takes the last trace of the removed ones.
    assert (segment.parameters["removed"] == 0) == (kept != "int8")
    check()
    assert find_problems(store.path)[0] == []


def test_a_rebuilt_suffix_index_is_the_same_byte_for_byte(new_store: NewStore) -> None:
    store = new_store(random_documents(50))
    build_suffix(store)
    build_suffix(fill(open_store(store.path), random_documents(20, seed=1), source="more"))
    before = sorted(digests(store).values())
    assert len(before) == 4
    files = open_store(store.path).manifest.files
    for name in [name for name in files if name.startswith("suffix/")]:
        (store.path / name).write_bytes(b"damaged")
    with pytest.raises(CorruptStore):
        open_store(store.path)
    rebuild_suffix(open_store(store.path, corpus_only=True))
    assert find_problems(store.path)[0] == []
    assert sorted(digests(store).values()) == before


def digests(store: Store) -> dict[str, str]:
    """The suffix index's files."""
    return {name: one for name, one in snapshot(store.path).items() if name.startswith("suffix/")}


def test_a_damaged_segment_is_not_taken_over(new_store: NewStore, tiny: LanguageModel, tmp_path: Path) -> None:
    """What copies or joins files checks them: damage must not get a new checksum."""
    store = new_store([([], [2 + (7 * number + number * number) % 120 for number in range(40_000)])])
    build_suffix(store)
    build_dense(store, tiny, DenseOptions("faiss", dims=8, max_length=40))
    store = open_store(store.path)
    for name in (store.manifest.suffix[0].directory + "/sa.bin",):
        data = bytearray((store.path / name).read_bytes())
        data[len(data) // 2] ^= 1
        (store.path / name).write_bytes(data)
    other = new_store([([5], [6])])
    with pytest.raises(CorruptStore, match=r"sa\.bin"):
        merge([open_store(store.path), other], tmp_path / "out.ds")
    assert open_store(tmp_path / "out.ds").manifest.documents == 0


def test_segments_are_as_large_as_memory_allows(new_store: NewStore) -> None:
    store = new_store()
    for number in range(12):
        store = fill(store, random_documents(20, seed=number), source=f"s{number}")
    tokens = store.manifest.tokens
    # A quarter of the memory is the least that data gets; ten bytes a token.
    built = build_suffix(store, memory=4 * 10 * (tokens // 4))
    assert len(built) in (4, 5, 6)
    assert sum(segment.tokens for segment in built) == tokens
    whole = Store(store.path, open_store(store.path).manifest).suffix_index()
    other = new_store()
    for number in range(12):
        other = fill(other, random_documents(20, seed=number), source=f"s{number}")
    build_suffix(other)
    single = open_store(other.path).suffix_index()
    for _, response in random_documents(30, seed=3):
        context = np.array(response, np.int64)
        one, two = whole.match(context, min_match=1), single.match(context, min_match=1)
        assert (one.length, one.occurrences) == (two.length, two.occurrences)
        assert trees_of(whole, one) == trees_of(single, two)


def trees_of(index: object, match: Match) -> list[list[int]]:
    """The continuation tree as lists."""
    from specds.datastore.suffix import SuffixIndex

    assert isinstance(index, SuffixIndex)
    return [part.tolist() for part in index.continuations(match)]


def segment_of(size: int) -> Segment:
    from specds.datastore.manifest import Provenance

    return Segment(f"suffix/{size:06d}", [], size, None, {}, {}, Provenance("", "", ""))


def test_a_new_segment_takes_in_the_ones_that_are_no_larger() -> None:
    segments = [segment_of(size) for size in (1000, 90, 30, 9)]
    assert to_join(segments, 8, 10**9) == []
    assert [one.tokens for one in to_join(segments, 10, 10**9)] == [9]
    assert [one.tokens for one in to_join(segments, 21, 10**9)] == [30, 9]
    assert [one.tokens for one in to_join(segments, 30, 10**9)] == [30, 9]
    assert [one.tokens for one in to_join(segments, 60, 10**9)] == [90, 30, 9]
    assert [one.tokens for one in to_join(segments, 60, 100)] == [30, 9]


def test_there_are_never_many_segments(new_store: NewStore) -> None:
    store = new_store()
    most = 0
    for number in range(40):
        store = fill(open_store(store.path), [([], [5, 6, 7 + number])], source=f"s{number}")
        build_suffix(store)
        most = max(most, len(open_store(store.path).manifest.suffix))
    assert most <= 6


def test_portions_hold_every_file_once(new_store: NewStore) -> None:
    store = new_store()
    for number in range(5):
        store = fill(store, random_documents(1 + 3 * number, seed=number), source=f"s{number}")
    shards = store.manifest.corpus
    for most in (1, 20, 100, 10**6):
        groups = portions(shards, most)
        assert [shard for group in groups for shard in group] == shards
        assert all(len(group) == 1 or sum(shard.tokens for shard in group) <= most for group in groups)


def test_merging_stores_of_two_tokenizers_is_refused(new_store: NewStore, tmp_path: Path) -> None:
    other = wrap_tokenizer(make_tokenizer(64), "other-model")
    foreign = fill(create_store(tmp_path / "foreign.ds", other), [([5], [6])])
    with pytest.raises(ForeignTokenizer):
        merge([new_store([([5], [6])]), foreign], tmp_path / "out.ds")
    assert not (tmp_path / "out.ds").exists()


def test_merging_takes_the_indexes_along(
    new_store: NewStore, tiny: LanguageModel, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    one, two = new_store(random_documents(20)), fill(new_store(), random_documents(20, seed=1), source="two")
    for store in (one, two):
        build_suffix(store)
        build_dense(store, tiny, DenseOptions("faiss", dims=8))
    # Another model's hidden states do not.
    three = fill(new_store(), random_documents(5, seed=2), source="three")
    build_dense(three, make_model(seed=1), DenseOptions("faiss", dims=8))
    stores = [open_store(store.path) for store in (one, two, three)]
    before = [snapshot(store.path) for store in stores]
    merger = merge(stores, tmp_path / "out.ds")
    merged = merger.store
    assert (merger.twice, merger.done) == (0, None)
    assert [snapshot(store.path) for store in stores] == before
    assert corpus_of(merged.path) == corpus_of(one.path) | corpus_of(two.path) | corpus_of(three.path)
    assert (len(merged.manifest.suffix), len(merged.manifest.dense)) == (2, 2)
    assert [len(merged.manifest.uncovered(kind)) for kind in ("suffix", "dense")] == [1, 1]
    opened = open_store(merged.path, tokenizer)
    # Two normalizers: a query passes both.
    index = opened.dense_index(tiny.fingerprint)
    assert index.parts[0].normalizer is not index.parts[1].normalizer
    for prompt, response in (random_documents(20)[3], random_documents(20, seed=1)[3]):
        text = prompt + response
        if len(text) > 2:
            similarity, positions = index.search(states_of(tiny, text)[1], 1)
            assert similarity[0] == pytest.approx(1, abs=1e-3)
            assert index.continuations(positions, 2)[0].tolist() == text[2:4]
    assert "merged" in opened.manifest.history[-1].what
    after = snapshot(merged.path)
    with pytest.raises(UsageError, match="not empty"):
        merge(stores[:2], merged.path)
    assert merge(stores, merged.path).done is not None  # as after a kill just after the commit
    assert snapshot(merged.path) == after
    fill(one, [([9], [9])], source="new")
    with pytest.raises(UsageError, match="not empty"):
        merge([open_store(store.path) for store in (one, two, three)], merged.path)


def test_a_removal_that_is_repeated_is_done_already(new_store: NewStore) -> None:
    store = fill(fill(new_store(random_documents(9)), [([5], [6])], source="one"), [([7], [8])], source="two")

    def again(*sources: str, ids: Sequence[str] = ()) -> Removal:
        return remove(open_store(store.path), sources=sources, ids=ids)

    with pytest.raises(UsageError, match="no source"):
        again("three")
    assert (again("one").documents, again(ids=["test-1", "test-2"]).documents) == (1, 2)
    before = snapshot(store.path)
    for repeated in (again("one"), again(ids=["test-2", "test-1"])):
        assert repeated.done is not None
        assert repeated.documents == 0
    for sources, ids in (("one", "two"), ()), (("one",), ("test-1",)), ((), ("test-1",)):
        with pytest.raises(UsageError):
            again(*sources, ids=ids)
    assert snapshot(store.path) == before
    fill(open_store(store.path), [([1], [2])], source="one")
    assert again("one").documents == 1
    said = " ".join(change.what for change in open_store(store.path).manifest.history)
    assert "test-1" not in said
