"""One word for a way of decoding."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specds.decode.method import Method, distinct, parse_method, parse_methods
from specds.errors import UsageError

NAMES = st.text("abcdefgh-_.0123456789/", min_size=1, max_size=8)
PAIRS = st.dictionaries(st.text("abcdefgh_", min_size=1, max_size=6).filter(lambda name: name != "draft_model"), NAMES)


@given(NAMES, PAIRS, st.lists(NAMES, max_size=3), st.none() | st.integers(0, 999), NAMES, PAIRS)
def test_a_method_is_what_its_name_says(
    drafter: str, options: dict[str, str], stores: list[str], budget: int | None, verifier: str, judging: dict[str, str]
) -> None:
    method = Method(drafter, options, tuple(map(Path, stores)), budget, verifier, judging)
    assert parse_method(method.name) == method
    assert hash(parse_method(method.name)) == hash(method)


def test_a_budget_is_the_runs_unless_the_word_says_one() -> None:
    assert [method.budget for method in parse_methods("pld,pld@4,pld@auto", 16)] == [16, 4, None]


@pytest.mark.parametrize("word", ["", "@4", "pld@x", "pld@-1", "pld:", "rest::a", "pld?x", "pld?=1", "pld?a=1&a=2"])
def test_what_is_not_a_method_is_refused(word: str) -> None:
    with pytest.raises(UsageError):
        parse_method(word)


def test_a_method_is_named_once() -> None:
    with pytest.raises(UsageError, match="twice"):
        distinct(parse_methods("pld,sam,pld"))
