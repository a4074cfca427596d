"""Suffix arrays against sorting the suffixes themselves."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specds.datastore.suffix_array import _sort, build_suffix_array

EXTREMES = [0, 1, 65_534, 65_535, 65_536, 200_000, 2**31, 2**32 - 1]


def sorted_suffixes(text):
    return sorted(range(len(text)), key=lambda start: text[start:])


def check(text, dtype):
    order = build_suffix_array(np.array(text, dtype))
    assert order.dtype == np.int32
    assert order.tolist() == sorted_suffixes(text)


@st.composite
def texts(draw, values):
    """Random, or built from a few pieces again and again: long repeats are what suffix sorting finds hard."""
    pieces = draw(st.lists(st.lists(values, max_size=12), min_size=1, max_size=4))
    picks = draw(st.lists(st.sampled_from(pieces), max_size=12))
    return [value for piece in picks for value in piece]


small = st.integers(0, 2)


@settings(max_examples=300, deadline=None)
@given(texts(small), st.sampled_from([np.uint16, np.uint32]))
def test_small_alphabets(text, dtype):
    check(text, dtype)


@settings(max_examples=200, deadline=None)
@given(texts(st.one_of(st.integers(0, 2**16 - 1), st.sampled_from([0, 1, 65_534, 65_535]))))
def test_uint16(text):
    check(text, np.uint16)


@settings(max_examples=200, deadline=None)
@given(texts(st.one_of(st.integers(0, 2**32 - 1), st.sampled_from(EXTREMES))))
def test_uint32(text):
    check(text, np.uint32)


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
@pytest.mark.parametrize(
    "period", [[7], [0], [1, 0], [0, 1], [5, 2, 9], [2, 5, 9, 2, 5], [65_535], [65_535, 0, 65_535]]
)
@pytest.mark.parametrize("length", [1, 2, 3, 50, 301])
def test_periodic(period, length, dtype):
    check((period * length)[:length], dtype)


def test_fibonacci_string_goes_through_many_levels():
    a, b = [1], [0]
    while len(b) < 1500:
        a, b = b, b + a
    check(b, np.uint16)


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_empty(dtype):
    assert build_suffix_array(np.empty(0, dtype)).shape == (0,)


def documents(rng, n, vocabulary, separator):
    """Skewed tokens with passages copied from earlier ones, and a separator every few hundred."""
    text = (vocabulary * rng.random(n) ** 4).astype(np.int64)
    for _ in range(n // 500):
        width = int(rng.integers(10, 200))
        source, target = rng.integers(0, n - width, 2)
        text[target : target + width] = text[source : source + width]
    text[rng.integers(0, n, n // 300)] = separator
    return text


@pytest.mark.parametrize(
    ("dtype", "vocabulary"), [(np.uint16, 50_000), (np.uint16, 3), (np.uint32, 200_000), (np.uint32, 3)]
)
def test_large_text_is_a_sorted_permutation(dtype, vocabulary):
    n = 400_000
    text = documents(np.random.default_rng(1), n, vocabulary, np.iinfo(dtype).max).astype(dtype)
    order = build_suffix_array(text)

    rank = np.full(n + 1, -1)
    rank[order] = np.arange(n)
    assert rank[:n].min() == 0, "not a permutation"
    # Each suffix is smaller than the next: by its first token, or else by the rank of what is left of it.
    first = text[order].astype(np.int64)
    rest = rank[order.astype(np.int64) + 1]
    rises = (first[:-1] < first[1:]) | ((first[:-1] == first[1:]) & (rest[:-1] < rest[1:]))
    assert rises.all()


@settings(max_examples=50, deadline=None)
@given(texts(small))
def test_64_bit_positions(text):
    order = np.empty(len(text), np.int64)
    _sort(np.array(text, np.int64), order, 3)
    assert order.tolist() == sorted_suffixes(text)


def test_memory_map(tmp_path):
    text = np.arange(1000, dtype=np.uint16) % 7
    text.tofile(tmp_path / "tokens.bin")
    mapped = np.memmap(tmp_path / "tokens.bin", np.uint16, mode="r")
    assert build_suffix_array(mapped).tolist() == sorted_suffixes(text.tolist())


def test_input_is_left_alone():
    text = np.array([3, 1, 2, 1, 2], np.uint32)
    before = text.copy()
    build_suffix_array(text)
    np.testing.assert_array_equal(text, before)


def test_other_dtypes_are_refused():
    with pytest.raises(TypeError, match="int64"):
        build_suffix_array(np.arange(3))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="one dimension"):
        build_suffix_array(np.zeros((2, 2), np.uint16))
