"""The automaton against looking everywhere."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specds.decode.text.automaton import SuffixAutomaton


def occurrences(text: list[int], length: int) -> list[int]:
    """Ends of earlier occurrences of the last `length` tokens."""
    if not 0 < length < len(text):
        return []
    tail = text[-length:]
    return [end for end in range(length, len(text)) if text[end - length : end] == tail]


def longest(text: list[int]) -> tuple[int, int]:
    for length in range(len(text) - 1, 0, -1):
        if found := occurrences(text, length):
            return length, found[0]
    return 0, 0


TEXTS = st.one_of(
    st.lists(st.integers(0, 2), max_size=60),
    st.lists(st.sampled_from([0, 65_535, 200_000, (1 << 31) - 1]), max_size=60),
    st.builds(lambda part, times, rest: part * times + rest, st.lists(st.integers(0, 3), max_size=7), st.integers(0, 9),
              st.lists(st.integers(0, 3), max_size=9)),
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(TEXTS, st.data())
def test_it_finds_what_looking_everywhere_finds(text: list[int], data: st.DataObject) -> None:
    automaton = SuffixAutomaton()
    done = 0
    while done < len(text):
        step = data.draw(st.integers(1, 7))
        automaton.extend(np.array(text[done : done + step], np.int64))
        done = min(done + step, len(text))
        here = text[:done]
        assert len(automaton) == done
        assert automaton.longest() == longest(here)
        for length in (1, 2, 3, 5, done - 1):
            assert automaton.ends(length).tolist() == occurrences(here, length)


@pytest.mark.parametrize("vocabulary", [1, 4, 50_000])
def test_a_long_text_at_once_is_the_text_token_by_token(vocabulary: int) -> None:
    """Through several growths; the machines are the same, array by array."""
    text = np.random.default_rng(0).integers(0, vocabulary, 50_000)
    text[30_000:31_000] = text[10_000:11_000]
    whole, single, pieces = SuffixAutomaton(), SuffixAutomaton(), SuffixAutomaton()
    whole.extend(text)
    for token in text:
        single.extend(np.array([token]))
    for piece in np.split(text, [1, 2, 1023, 1024, 1025, 5000, 30_500]):
        pieces.extend(piece)
    for other in (single, pieces):
        assert np.array_equal(whole._counts, other._counts)
        states, edges = whole._counts[:2]
        assert np.array_equal(whole._states[:states, :7], other._states[:states, :7])
        assert np.array_equal(whole._edges[:edges], other._edges[:edges])
        assert whole.longest() == other.longest()


def test_many_occurrences_are_cut_where_asked() -> None:
    automaton = SuffixAutomaton()
    automaton.extend(np.zeros(5_000, np.int64))
    assert automaton.longest() == (4_999, 4_999)
    assert len(automaton.ends(1)) == 4_999
    assert len(automaton.ends(1, most=10)) == 10
    assert automaton.ends(0).tolist() == []
    assert automaton.ends(5_000).tolist() == []


def test_a_copied_passage_is_found_where_it_stood() -> None:
    text = np.random.default_rng(1).integers(0, 50_000, 4_000)
    automaton = SuffixAutomaton()
    automaton.extend(np.concatenate([text, text[1_000:1_040]]))
    assert automaton.longest() == (40, 1_040)
    assert automaton.ends(40).tolist() == [1_040]
