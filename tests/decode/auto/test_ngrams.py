"""Counts of followers and rows of likeliest tokens, against brute force."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from specds.decode.auto.ngrams import (
    COUNTS,
    ORDERS,
    PLACES,
    RECENT,
    TOKENS,
    TOTAL,
    WIDTH,
    Followers,
    Likeliest,
    find_row,
    hash_tail,
)
from specds.decode.contracts import TOP


def key(context: Sequence[int]) -> np.uint64:
    hashes = np.zeros(len(ORDERS), np.uint64)
    hash_tail(np.array(context[::-1], np.int64), len(context), hashes)
    found: np.uint64 = hashes[list(ORDERS).index(len(context))]
    return found


@given(st.lists(st.integers(0, WIDTH - 1), min_size=1, max_size=80), st.integers(1, 9))
def test_followers_are_counted_by_every_order(tokens: list[int], piece: int) -> None:
    followers, text = Followers(), np.array(tokens, np.int64)
    for end in range(piece, len(tokens) + piece, piece):
        part = text[:end]
        followers.extend(part, max(1, end - piece))
    for order in ORDERS.tolist():
        expected: dict[tuple[int, ...], list[int]] = {}
        for at in range(order, len(tokens)):
            expected.setdefault(tuple(tokens[at - order : at]), []).append(at)
        for context, places in expected.items():
            row = followers.rows[find_row(followers.rows, key(context))]
            seen = Counter(tokens[at] for at in places)
            assert row[TOTAL] == len(places)
            found = {int(row[TOKENS + slot]): int(row[COUNTS + slot]) for slot in range(WIDTH) if row[COUNTS + slot]}
            assert found == seen
            assert tokens[places[-1]] == row[TOKENS + row[RECENT]]
            assert places[-1] == row[PLACES + row[RECENT]]
        unknown = key([9] * order)
        assert find_row(followers.rows, unknown) < 0


def test_a_new_follower_takes_the_place_of_the_rarest_and_oldest() -> None:
    followers = Followers()
    text = [7, 0, 7, 1, 7, 0, 7, 2, 7, 3, 7, 4]
    followers.extend(np.array(text, np.int64), 1)
    row = followers.rows[find_row(followers.rows, key([7]))]
    assert sorted(row[TOKENS : TOKENS + WIDTH].tolist()) == [0, 2, 3, 4]
    assert row[TOTAL] == 6


def test_rows_are_kept_by_what_stands_before_them_in_the_tree() -> None:
    likeliest = Likeliest()
    text, tokens, parents = np.array([5, 6, 7]), np.array([8, 9, 10], np.int32), np.array([-1, 0, -1], np.int32)
    ids = np.arange(4 * TOP, dtype=np.int32).reshape(4, TOP)
    likeliest.record(text, tokens, parents, ids, ids.astype(np.float32))
    for context, row in (([5, 6, 7], 0), ([6, 7, 8], 1), ([7, 8, 9], 2), ([6, 7, 10], 3)):
        for size in (1, 2, 3):
            assert likeliest.rows.ids[find_row(likeliest.rows.keys, key(context[-size:]))].tolist() == ids[row].tolist()
    many = np.arange(20_000, dtype=np.int32).reshape(-1, TOP)
    for start in range(0, len(many), 50):
        chain = np.arange(100 + start, 149 + start, dtype=np.int32)
        below = np.arange(-1, 48, dtype=np.int32)
        likeliest.record(text, chain, below, many[start : start + 50], many[start : start + 50].astype(np.float32))
    assert likeliest.rows.ids[find_row(likeliest.rows.keys, key([6, 7, 8]))].tolist() == ids[1].tolist()
