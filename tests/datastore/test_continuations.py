"""Matches and the trees of what follows them, against looking at every position of the text."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specds.datastore.continuations import continuation_tree
from specds.datastore.suffix_array import build_suffix_array
from specds.datastore.suffix_match import longest_match
from specds.datastore.suffix_parts import Parts

SEPARATOR = {np.uint16: 65_535, np.uint32: 2**32 - 1}


def occurrences(document, query):
    return [p for p in range(len(document) - len(query) + 1) if document[p : p + len(query)] == query]


def expected_match(documents, context, max_match, min_match):
    """The length of the match, and what follows each of its occurrences up to the document's end."""
    for length in range(min(max_match, len(context)), min_match - 1, -1):
        query = context[len(context) - length :]
        found = [document[p + length :] for document in documents for p in occurrences(document, query)]
        if any(found):
            return length, found
    return 0, []


def expected_tree(following, max_depth, max_nodes, min_share):
    counts = Counter()
    for continuation in following:
        path = tuple(continuation[:max_depth])
        counts.update(path[:depth] for depth in range(1, len(path) + 1))
    nodes = [(path, count) for path, count in counts.items() if count * min_share >= len(following)]
    return sorted(nodes, key=lambda node: (-node[1], len(node[0]), node[0]))[:max_nodes]


def paths(node_tokens, parents, counts):
    """The tree in the form that `expected_tree` has."""
    nodes = []
    for token, parent, count in zip(node_tokens.tolist(), parents.tolist(), counts.tolist(), strict=True):
        assert -1 <= parent < len(nodes)
        nodes.append(((*(nodes[parent][0] if parent >= 0 else ()), token), count))
    return nodes


def part_of(documents, dtype, sa_dtype=None, last_separator=True):
    text = [value for document in documents for value in (*document, SEPARATOR[dtype])]
    tokens = np.array(text if last_separator else text[:-1], dtype)
    sa = build_suffix_array(tokens)
    return tokens, sa if sa_dtype is None else sa.astype(sa_dtype)


def one_part(text, dtype=np.uint16):
    tokens = np.array(text, dtype)
    return Parts([(tokens, build_suffix_array(tokens))])


def starts(parts, length, ranges):
    """Where the match stands in each part, and that it is what stands there."""
    found = [sa[lo:hi].tolist() for sa, (lo, hi) in zip(parts.suffixes, ranges.tolist(), strict=True)]
    for tokens, positions in zip(parts.tokens, found, strict=True):
        assert len({tuple(tokens[p : p + length].tolist()) for p in positions}) <= 1
    return [sorted(positions) for positions in found]


@st.composite
def stores(draw):
    """Documents of few tokens or of extreme ones, with copied passages, and a context that may occur in them."""
    narrow = draw(st.booleans())
    extremes = [0, 65_534] if narrow else [0, 65_534, 65_535, 65_536, 200_000, 2**31 - 1]
    some = st.integers(0, 400) if narrow else st.integers(0, 100_000)
    token = draw(st.sampled_from([st.integers(0, 1), st.integers(0, 5), st.sampled_from(extremes), some]))
    pieces = draw(st.lists(st.lists(token, max_size=8), min_size=1, max_size=5))
    written = draw(st.lists(st.lists(st.sampled_from(pieces), max_size=6), max_size=8))
    documents = [[value for piece in picks for value in piece] for picks in written]
    text = [value for document in documents for value in document]
    context = draw(st.one_of(st.lists(token, max_size=20), st.just(text[: draw(st.integers(0, len(text)))])))
    return narrow, documents, context


@st.composite
def split(draw, narrow, documents):
    """The documents in one to six parts, in any order, of dtypes of their own."""
    count = draw(st.integers(1, 6))
    homes = draw(st.lists(st.integers(0, count - 1), min_size=len(documents), max_size=len(documents)))
    parts = []
    for part in range(count):
        dtype = draw(st.sampled_from([np.uint16, np.uint32])) if narrow else np.uint32
        inside = [document for document, home in zip(documents, homes, strict=True) if home == part]
        parts.append(part_of(inside, dtype, draw(st.sampled_from([np.int32, np.int64])), draw(st.booleans())))
    return Parts(parts)


@settings(max_examples=600, deadline=None)
@given(
    st.data(),
    stores(),
    st.integers(1, 18),
    st.integers(1, 4),
    st.integers(1, 12),
    st.integers(1, 70),
    st.integers(1, 300),
)
def test_matches_and_trees_are_exact(data, store, max_match, min_match, max_depth, max_nodes, min_share):
    narrow, documents, context = store
    length, following = expected_match(documents, context, max_match, min_match)
    tree = expected_tree(following, max_depth, max_nodes, min_share)
    whole = Parts([part_of(documents, np.uint16 if narrow else np.uint32)])
    for parts in (whole, data.draw(split(narrow, documents))):
        found, ranges = longest_match(parts, np.array(context, np.int64), max_match, min_match)
        assert found == length
        assert sum(map(len, starts(parts, length, ranges))) == len(following)
        assert paths(*continuation_tree(parts, found, ranges, max_depth, max_nodes, min_share)) == tree


@pytest.mark.parametrize("shares", [[1], [1, 1], [100, 10, 1, 1], [1] * 6])
@pytest.mark.parametrize("max_nodes", [5, 64, 1000])
@pytest.mark.parametrize("min_share", [3, 40, 256, 10_000])
def test_wide_ranges_are_counted_exactly(shares, max_nodes, min_share):
    rng = np.random.default_rng(5)
    text = (300 * rng.random(20_000) ** 3).astype(np.int64)
    text[1::7] = 2
    documents = [document.tolist() for document in np.split(text, np.arange(97, text.size, 97))]
    homes = rng.choice(len(shares), len(documents), p=np.array(shares) / sum(shares))
    dtypes = [np.uint16, np.uint32]
    parts = Parts(
        [part_of([documents[i] for i in np.flatnonzero(homes == s)], dtypes[s % 2]) for s in range(len(shares))]
    )
    length, ranges = longest_match(parts, [2], min_match=1)
    expected, following = expected_match(documents, [2], 1, 1)
    assert (length, int(np.diff(ranges).sum())) == (expected, len(following))
    assert len(following) > 2_000
    tree = continuation_tree(parts, length, ranges, 4, max_nodes, min_share)
    assert paths(*tree) == expected_tree(following, 4, max_nodes, min_share)


def test_one_token_repeated():
    parts = one_part(np.full(5_000, 7))
    # The last occurrence of 16 has nothing after it, the one before a single token, and so on.
    length, ranges = longest_match(parts, [7] * 100)
    assert (length, ranges.tolist()) == (16, [[15, 5_000]])
    _, parents, counts = continuation_tree(parts, length, ranges)
    assert counts.tolist() == [4_984 - depth for depth in range(10)]
    assert parents.tolist() == list(range(-1, 9))


def test_match_backs_off_from_document_ends():
    parts = Parts([part_of([[1, 2, 3], [9, 2, 3], [3, 8]], np.uint16)])
    # "1 2 3" and "2 3" occur, but only at ends of documents.
    length, ranges = longest_match(parts, [1, 2, 3], min_match=1)
    assert (length, starts(parts, length, ranges)) == (1, [[2, 6, 8]])
    assert paths(*continuation_tree(parts, length, ranges)) == [((8,), 1)]
    # In another part "2 3" goes on: those that do not are counted with it.
    parts = Parts([part_of([[1, 2, 3], [9, 2, 3], [3, 8]], np.uint16), part_of([[2, 3, 4]], np.uint32)])
    length, ranges = longest_match(parts, [1, 2, 3], min_match=1)
    assert (length, starts(parts, length, ranges)) == (2, [[1, 5], [0]])
    assert paths(*continuation_tree(parts, length, ranges)) == [((4,), 1)]


@pytest.mark.parametrize("odd", [-1, 65_535, 65_536 + 2, 2**40])
def test_context_tokens_that_the_text_cannot_hold_match_nothing(odd):
    parts = one_part([1, 2, 3, 1, 2, 3])
    length, ranges = longest_match(parts, [1, 2, odd])
    assert (length, ranges.tolist()) == (0, [[0, 0]])
    length, ranges = longest_match(parts, [odd, 1, 2])
    assert (length, starts(parts, length, ranges)) == (2, [[0, 3]])


def test_a_narrow_text_lacks_what_a_wide_one_holds():
    parts = Parts([part_of([[1, 2], [2, 3]], np.uint16), part_of([[2, 65_535, 65_536]], np.uint32)])
    length, ranges = longest_match(parts, [2, 65_535], min_match=1)
    assert (length, starts(parts, length, ranges)) == (2, [[], [0]])
    assert paths(*continuation_tree(parts, length, ranges)) == [((65_536,), 1)]


@pytest.mark.parametrize("context", [[], [1], [4, 4], np.array([], np.int32)])
def test_nothing_found(context):
    empty = np.empty(0, np.uint16)
    known = np.array([1, 2, 3, 1, 2, 3], np.uint16)
    for texts in ([known], [empty], [empty, known, empty], []):
        parts = Parts([(text, build_suffix_array(text)) for text in texts])
        length, ranges = longest_match(parts, context)
        assert (length, ranges.tolist()) == (0, [[0, 0]] * len(texts))
        assert [part.size for part in continuation_tree(parts, length, ranges)] == [0, 0, 0]


def test_empty_trees():
    parts = one_part([1, 2, 3, 1, 2, 3])
    for lo, hi, depth, nodes in [(2, 2, 10, 64), (0, 2, 0, 64), (0, 2, 10, 0)]:
        assert [part.size for part in continuation_tree(parts, 1, [[lo, hi]], depth, nodes)] == [0, 0, 0]


def test_memory_maps_give_the_same(tmp_path):
    parts = one_part(np.tile([5, 2, 9, 2], 50), np.uint32)
    parts.tokens[0].tofile(tmp_path / "tokens.bin")
    parts.suffixes[0].tofile(tmp_path / "sa.bin")
    maps = np.memmap(tmp_path / "tokens.bin", np.uint32, mode="r"), np.memmap(tmp_path / "sa.bin", np.int32, mode="r")
    mapped = Parts([maps])
    del maps
    length, ranges = longest_match(parts, [9, 2])
    assert length == 2
    again, same = longest_match(mapped, [9, 2])
    assert (again, same.tolist()) == (length, ranges.tolist())
    assert paths(*continuation_tree(parts, length, ranges)) == paths(*continuation_tree(mapped, length, ranges))


def test_arrays_with_gaps_are_copied():
    tokens = np.repeat(np.array([5, 2, 9, 2] * 50, np.uint16), 3)[::3]
    assert longest_match(Parts([(tokens, np.repeat(build_suffix_array(tokens), 2)[::2])]), [9, 2])[0] == 2


@pytest.fixture
def vast(tmp_path):
    """A part of more than 2^31 tokens and ranks, nearly all of them holes in its files.

    A hole in the text is token 0; one in the suffix array says that this suffix starts at position 0, with zeros.
    """
    size = 2**31 + 2**20
    documents = {100: [7, 8, 9, 70_000], 2**31 + 5: [7, 8, 9, 70_001, 3], size - 5: [8, 9, 70_001, 4]}
    tokens = np.memmap(tmp_path / "tokens.bin", np.uint32, mode="w+", shape=(size,))
    for start, document in documents.items():
        tokens[start : start + len(document) + 1] = [*document, SEPARATOR[np.uint32]]
    order = [start + i for start, document in documents.items() for i in range(len(document) + 1)]
    order.sort(key=lambda p: tokens[p : p + 5].tolist())
    sa = np.memmap(tmp_path / "sa.bin", np.int64, mode="w+", shape=(size,))
    sa[size - len(order) :] = order
    return tokens, sa


def test_texts_of_more_than_two_billion_tokens(vast):
    few = [[1, 8, 9, 70_000], [8, 9], [0, 0, 0, 5]]
    parts = Parts([part_of(few, np.uint32), vast])
    holes = 2**31 + 2**20 - 16
    length, ranges = longest_match(parts, [6, 8, 9])
    assert (length, starts(parts, length, ranges)) == (2, [[1, 5], [101, 2**31 + 6, 2**31 + 2**20 - 5]])
    assert ranges[1].tolist() == [holes + 4, holes + 7]
    nodes = paths(*continuation_tree(parts, length, ranges))
    following = [[70_000], [], [70_000], [70_001, 3], [70_001, 4]]
    assert nodes == expected_tree(following, 10, 64, 256)
    length, ranges = longest_match(parts, [0] * 5, max_match=3)
    assert (length, ranges[1].tolist()) == (3, [0, holes])
    assert paths(*continuation_tree(parts, length, ranges)) == [((0,) * depth, holes) for depth in range(1, 11)]


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_corrupt_suffix_arrays_are_survived(data):
    token = st.sampled_from([0, 1, 2, 65_535])
    parts = []
    for hostile in data.draw(st.sampled_from([(True,), (True, False), (False, True, False), (True, True, True)])):
        dtype = data.draw(st.sampled_from([np.int32, np.int64]))
        bounds = np.iinfo(dtype)
        tokens = np.array(data.draw(st.lists(token, max_size=30)), np.uint16)
        entry = st.one_of(st.integers(-2, 32), st.sampled_from([int(bounds.min), int(bounds.max)]))
        forged = np.array(data.draw(st.lists(entry, max_size=60)), dtype)
        parts.append((tokens, forged if hostile else build_suffix_array(tokens)))
    parts = Parts(parts)
    length, ranges = longest_match(parts, data.draw(st.lists(st.integers(0, 2), max_size=5)), min_match=1)
    sizes = [sa.size for sa in parts.suffixes]
    assert all(0 <= lo <= hi <= size for (lo, hi), size in zip(ranges.tolist(), sizes, strict=True))
    # Not only the range found: any range.
    anywhere = [(data.draw(st.integers(0, size)), size) for size in sizes]
    for where in (ranges, anywhere):
        node_tokens, parents, counts = continuation_tree(parts, length, where, max_nodes=data.draw(st.integers(1, 80)))
        assert (parents < np.arange(parents.size)).all()
        assert (counts >= 1).all()
        assert np.isin(node_tokens, [0, 1, 2]).all()


def test_arguments_that_make_no_sense():
    tokens = np.array([1, 2, 3, 1, 2, 3], np.uint16)
    sa = build_suffix_array(tokens)
    parts = Parts([(tokens, sa), (tokens, sa)])
    with pytest.raises(ValueError, match="min_match"):
        longest_match(parts, [1, 2], min_match=0)
    for lo, hi in [(-1, 2), (2, 1), (0, 7)]:
        for ranges in ([[lo, hi], [0, 1]], [[0, 1], [lo, hi]]):
            with pytest.raises(ValueError, match="range"):
                continuation_tree(parts, 1, ranges)
    for ranges in ([[0, 1]], [[0, 1]] * 3, [0, 1, 2]):
        with pytest.raises(ValueError, match="2 parts"):
            continuation_tree(parts, 1, ranges)
    for length in (-1, 7):
        with pytest.raises(ValueError, match="length"):
            continuation_tree(parts, length, [[0, 2], [0, 2]])
    with pytest.raises(ValueError, match="min_share"):
        continuation_tree(parts, 1, [[0, 2], [0, 2]], min_share=0)
    with pytest.raises(TypeError, match="int64"):
        Parts([(tokens.astype(np.int64), sa)])
    with pytest.raises(TypeError, match="uint32"):
        Parts([(tokens, sa.astype(np.uint32))])
    with pytest.raises(TypeError, match="2-d"):
        Parts([(tokens.reshape(2, 3), sa)])
