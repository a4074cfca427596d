"""Lookups against looking at every position of the text."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specds.datastore.suffix_array import build_suffix_array
from specds.datastore.suffix_lookup import continuation_tree, longest_match, separator

SEPARATOR = {np.uint16: 65_535, np.uint32: 2**32 - 1}


def occurrences(text, query):
    return [p for p in range(len(text)) if text[p : p + len(query)] == query]


def continuation(text, start, end, depth):
    """At most `depth` tokens from `start` on, up to the separator `end`."""
    following = text[start : start + depth]
    return tuple(following[: following.index(end)] if end in following else following)


def expected_match(text, end, context, max_match, min_match):
    for length in range(min(max_match, len(context)), min_match - 1, -1):
        query = context[len(context) - length :]
        found = occurrences(text, query)
        if end not in query and any(continuation(text, p + length, end, 1) for p in found):
            return length, found
    return 0, []


def expected_tree(text, end, starts, max_depth, max_nodes, min_share):
    counts = Counter()
    for start in starts:
        path = continuation(text, start, end, max_depth)
        counts.update(path[:depth] for depth in range(1, len(path) + 1))
    nodes = [(path, count) for path, count in counts.items() if count * min_share >= len(starts)]
    return sorted(nodes, key=lambda node: (-node[1], len(node[0]), node[0]))[:max_nodes]


def paths(node_tokens, parents, counts):
    """The tree in the form that `expected_tree` has."""
    nodes = []
    for token, parent, count in zip(node_tokens.tolist(), parents.tolist(), counts.tolist(), strict=True):
        assert -1 <= parent < len(nodes)
        nodes.append(((*(nodes[parent][0] if parent >= 0 else ()), token), count))
    return nodes


@st.composite
def stores(draw):
    """Documents of few tokens or of extreme ones, with copied passages, and a context that may occur in them."""
    dtype = draw(st.sampled_from([np.uint16, np.uint32]))
    extremes = [0, 65_534] if dtype is np.uint16 else [0, 65_535, 200_000]
    token = draw(st.sampled_from([st.integers(0, 1), st.integers(0, 5), st.sampled_from(extremes)]))
    pieces = draw(st.lists(st.lists(token, max_size=8), min_size=1, max_size=5))
    text = []
    for picks in draw(st.lists(st.lists(st.sampled_from(pieces), max_size=6), max_size=6)):
        text += [*(value for piece in picks for value in piece), SEPARATOR[dtype]]
    if draw(st.booleans()):
        text = text[:-1]
    context = draw(st.one_of(st.lists(token, max_size=20), st.just(text[: draw(st.integers(0, len(text)))])))
    return dtype, text, context


@settings(max_examples=500, deadline=None)
@given(stores(), st.integers(1, 18), st.integers(1, 4), st.integers(1, 12), st.integers(1, 70), st.integers(1, 300))
def test_matches_and_trees_are_exact(store, max_match, min_match, max_depth, max_nodes, min_share):
    dtype, text, context = store
    end = SEPARATOR[dtype]
    tokens = np.array(text, dtype)
    sa = build_suffix_array(tokens)

    length, lo, hi = longest_match(tokens, sa, np.array(context, np.int64), max_match, min_match)
    expected_length, found = expected_match(text, end, context, max_match, min_match)
    assert length == expected_length
    assert sorted(sa[lo:hi].tolist()) == found

    tree = continuation_tree(tokens, sa, length, lo, hi, max_depth, max_nodes, min_share)
    starts = [p + length for p in found]
    assert paths(*tree) == expected_tree(text, end, starts, max_depth, max_nodes, min_share)


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
@pytest.mark.parametrize("max_nodes", [5, 64, 1000])
@pytest.mark.parametrize("min_share", [3, 40, 256, 10_000])
def test_wide_ranges_are_counted_exactly(dtype, max_nodes, min_share):
    rng = np.random.default_rng(5)
    text = (300 * rng.random(20_000) ** 3).astype(np.int64)
    text[::97] = SEPARATOR[dtype]
    text[1::7] = 2
    tokens = text.astype(dtype)
    sa = build_suffix_array(tokens)
    length, lo, hi = longest_match(tokens, sa, [2], min_match=1)
    assert hi - lo > 2_000
    tree = continuation_tree(tokens, sa, length, lo, hi, 4, max_nodes, min_share)
    starts = (np.flatnonzero(text == 2) + 1).tolist()
    assert paths(*tree) == expected_tree(text.tolist(), SEPARATOR[dtype], starts, 4, max_nodes, min_share)


def test_one_token_repeated():
    tokens = np.full(5_000, 7, np.uint16)
    sa = build_suffix_array(tokens)
    # The last occurrence of 16 has nothing after it, the one before a single token, and so on.
    assert longest_match(tokens, sa, [7] * 100) == (16, 15, 5_000)
    _, parents, counts = continuation_tree(tokens, sa, 16, 15, 5_000)
    assert counts.tolist() == [4_984 - depth for depth in range(10)]
    assert parents.tolist() == list(range(-1, 9))


def test_match_backs_off_from_document_ends():
    end = separator(np.uint16)
    tokens = np.array([1, 2, 3, end, 9, 2, 3, end, 3, 8], np.uint16)
    sa = build_suffix_array(tokens)
    # "1 2 3" and "2 3" occur, but only at ends of documents.
    length, lo, hi = longest_match(tokens, sa, [1, 2, 3], min_match=1)
    assert (length, sorted(sa[lo:hi].tolist())) == (1, [2, 6, 8])
    assert paths(*continuation_tree(tokens, sa, length, lo, hi)) == [((8,), 1)]


@pytest.mark.parametrize("odd", [-1, 65_535, 65_536 + 2, 2**40])
def test_context_tokens_that_the_text_cannot_hold_match_nothing(odd):
    tokens = np.array([1, 2, 3, 1, 2, 3], np.uint16)
    sa = build_suffix_array(tokens)
    assert longest_match(tokens, sa, [1, 2, odd]) == (0, 0, 0)
    length, lo, hi = longest_match(tokens, sa, [odd, 1, 2])
    assert (length, sa[lo:hi].tolist()) == (2, [3, 0])


@pytest.mark.parametrize("context", [[], [1], [4, 4], np.array([], np.int32)])
def test_nothing_found(context):
    tokens = np.array([1, 2, 3, 1, 2, 3], np.uint16)
    assert longest_match(tokens, build_suffix_array(tokens), context) == (0, 0, 0)
    empty = np.empty(0, np.uint16)
    assert longest_match(empty, build_suffix_array(empty), context) == (0, 0, 0)


def test_empty_trees():
    tokens = np.array([1, 2, 3, 1, 2, 3], np.uint16)
    sa = build_suffix_array(tokens)
    for lo, hi, depth, nodes in [(2, 2, 10, 64), (0, 2, 0, 64), (0, 2, 10, 0)]:
        assert [part.size for part in continuation_tree(tokens, sa, 1, lo, hi, depth, nodes)] == [0, 0, 0]


def test_memory_maps_give_the_same(tmp_path):
    tokens = np.tile(np.array([5, 2, 9, 2], np.uint32), 50)
    sa = build_suffix_array(tokens)
    tokens.tofile(tmp_path / "tokens.bin")
    sa.tofile(tmp_path / "sa.bin")
    mapped = np.memmap(tmp_path / "tokens.bin", np.uint32, mode="r"), np.memmap(tmp_path / "sa.bin", np.int32, mode="r")
    match = longest_match(tokens, sa, [9, 2])
    assert match[0] == 2
    assert longest_match(*mapped, [9, 2]) == match
    for ours, theirs in zip(continuation_tree(tokens, sa, *match), continuation_tree(*mapped, *match), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_64_bit_suffix_arrays():
    tokens = np.tile(np.array([5, 2, 9, 2], np.uint16), 50)
    sa = build_suffix_array(tokens)
    match = longest_match(tokens, sa, [9, 2])
    assert longest_match(tokens, sa.astype(np.int64), [9, 2]) == match
    wide = continuation_tree(tokens, sa.astype(np.int64), *match)
    assert paths(*wide) == paths(*continuation_tree(tokens, sa, *match))


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_corrupt_suffix_arrays_are_survived(data):
    dtype = data.draw(st.sampled_from([np.int32, np.int64]))
    bounds = np.iinfo(dtype)
    tokens = np.array(data.draw(st.lists(st.sampled_from([0, 1, 2, 65_535]), max_size=30)), np.uint16)
    entry = st.one_of(st.integers(-2, 32), st.sampled_from([int(bounds.min), int(bounds.max)]))
    sa = np.array(data.draw(st.lists(entry, max_size=60)), dtype)
    length, lo, hi = longest_match(tokens, sa, data.draw(st.lists(st.integers(0, 2), max_size=5)), min_match=1)
    assert 0 <= lo <= hi <= sa.size
    # Not only the range found: any range.
    lo = data.draw(st.integers(0, sa.size))
    node_tokens, parents, counts = continuation_tree(tokens, sa, length, lo, sa.size)
    assert (parents < np.arange(parents.size)).all()
    assert (counts >= 1).all()
    assert np.isin(node_tokens, [0, 1, 2]).all()


def test_arguments_that_make_no_sense():
    tokens = np.array([1, 2, 3, 1, 2, 3], np.uint16)
    sa = build_suffix_array(tokens)
    with pytest.raises(ValueError, match="min_match"):
        longest_match(tokens, sa, [1, 2], min_match=0)
    for lo, hi in [(-1, 2), (2, 1), (0, 7)]:
        with pytest.raises(ValueError, match="range"):
            continuation_tree(tokens, sa, 1, lo, hi)
    with pytest.raises(ValueError, match="length"):
        continuation_tree(tokens, sa, 7, 0, 2)
    with pytest.raises(ValueError, match="min_share"):
        continuation_tree(tokens, sa, 1, 0, 2, min_share=0)
    with pytest.raises(TypeError, match="int64"):
        longest_match(tokens.astype(np.int64), sa, [1, 2])
    with pytest.raises(TypeError, match="uint32"):
        longest_match(tokens, sa.astype(np.uint32), [1, 2])
