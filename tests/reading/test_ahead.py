"""Rows that are read beside whoever works on them."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator

import pytest

from specds.errors import InputError
from specds.reading.ahead import Ahead

# Seconds after which something hangs that should not.
PATIENCE = 60


def test_rows_come_in_order_and_end() -> None:
    ahead = Ahead(range(1000))
    assert list(ahead) == list(range(1000))
    assert ahead.take(wait=True) is None
    assert ahead.take(wait=False) is None
    assert list(Ahead([])) == []


def test_a_row_that_is_not_there_yet_is_not_waited_for_unless_asked() -> None:
    go = threading.Event()

    def rows() -> Iterator[str]:
        yield "first"
        assert go.wait(PATIENCE)
        yield "second"

    ahead = Ahead(rows())
    assert ahead.take(wait=True) == "first"
    assert ahead.take(wait=False) is None
    assert ahead.take(wait=False) is None  # nor is it the end
    go.set()
    assert ahead.take(wait=True) == "second"
    assert ahead.take(wait=True) is None


def test_an_error_is_raised_where_its_row_would_have_been() -> None:
    def rows() -> Iterator[int]:
        yield 1
        raise InputError("row 2 cannot be read", "mend it")

    ahead = Ahead(rows())
    assert ahead.take(wait=True) == 1
    with pytest.raises(InputError, match="row 2"):
        ahead.take(wait=True)
    assert ahead.take(wait=True) is None


def test_a_stream_without_end_is_read_only_so_far() -> None:
    read, enough = [], threading.Event()

    def rows() -> Iterator[int]:
        for number in itertools.count():
            read.append(number)
            if number == 256:
                enough.set()
            yield number

    ahead = Ahead(rows())
    assert enough.wait(PATIENCE)
    assert ahead.take(wait=True) == 0
    assert len(read) <= 259


def test_rows_that_nobody_wants_any_more_are_let_go() -> None:
    """The file that they come from is closed."""
    closed = threading.Event()

    def rows() -> Iterator[int]:
        try:
            yield from itertools.count()
        finally:
            closed.set()

    ahead = Ahead(rows())
    assert ahead.take(wait=True) == 0
    del ahead
    assert closed.wait(PATIENCE)
