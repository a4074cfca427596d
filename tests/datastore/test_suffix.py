"""The suffix index over several segments of a store."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from specds.datastore.build_suffix import build_suffix
from specds.datastore.dense import DenseIndex, DensePart
from specds.datastore.manifest import Segment
from specds.datastore.provenance import provenance
from specds.datastore.store import Store, open_store
from specds.datastore.suffix import Match, SuffixIndex
from specds.datastore.suffix_array import build_suffix_array
from specds.errors import CorruptStore
from tests.tools import random_documents


def written(root: Path, documents: list[list[int]], dtype: type = np.uint16) -> list[Segment]:
    """A segment for each of the documents."""
    segments = []
    for number, document in enumerate(documents):
        tokens = np.array([*document, np.iinfo(dtype).max], dtype)
        suffixes = build_suffix_array(tokens)
        directory = root / f"suffix/{number:06d}"
        directory.mkdir(parents=True)
        tokens.tofile(directory / "tokens.bin")
        suffixes.tofile(directory / "sa.bin")
        parameters = {
            "token_dtype": str(tokens.dtype),
            "suffix_dtype": str(suffixes.dtype),
            "positions": tokens.size,
            "separator": int(tokens[-1]),
        }
        name = directory.relative_to(root).as_posix()
        segments.append(Segment(name, [], len(document), None, parameters, {}, provenance()))
    return segments


def test_segments_answer_as_one_index_over_all_documents(new_store: Callable[..., Store], tmp_path: Path) -> None:
    documents = random_documents(30, vocabulary=5, longest=30)
    store = new_store(documents)
    build_suffix(store)
    one = open_store(store.path).suffix_index()
    several = SuffixIndex.open(tmp_path, written(tmp_path, [[*prompt, *response] for prompt, response in documents]))
    rng = np.random.default_rng(1)
    for _ in range(100):
        context = rng.integers(2, 5, 20)
        match, same = one.match(context, min_match=1), several.match(context, min_match=1)
        assert (match.length, match.occurrences) == (same.length, same.occurrences)
        for ours, theirs in zip(one.continuations(match), several.continuations(same), strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_places_are_occurrences_spread_over_all_segments(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    documents = [[], *(rng.integers(2, 5, size).tolist() for size in (500, 3, 60)), [9] * 10, [2, 3, 2, 3, 2]]
    index = SuffixIndex.open(tmp_path, written(tmp_path, documents))
    match = index.match(np.array([2, 3]))
    everywhere = [
        (number, position)
        for number, document in enumerate(documents)
        for position in range(len(document) - 1)
        if document[position : position + 2] == [2, 3]
    ]
    segments, positions = index.places(match, 10_000)
    assert sorted(zip(segments.tolist(), positions.tolist(), strict=True)) == everywhere
    shares = np.bincount([segment for segment, _ in everywhere], minlength=len(documents)) / len(everywhere)
    for most in (0, 1, 7, 20):
        segments, positions = index.places(match, most)
        found = list(zip(segments.tolist(), positions.tolist(), strict=True))
        assert len(set(found)) == len(found) == most
        assert set(found) <= set(everywhere)
        assert (np.abs(np.bincount(segments, minlength=len(documents)) - shares * most) <= 1).all()
    assert index.places(index.match(np.array([100, 101])), 5)[0].tolist() == []


def test_places_leave_out_what_points_outside(tmp_path: Path) -> None:
    segments = written(tmp_path, [[2, 3, 4], [2, 3, 4], [2, 3, 4]])
    for number, forged in [(0, [10**6] * 4), (1, [-1] * 4)]:
        np.array(forged, np.int32).tofile(tmp_path / f"suffix/{number:06d}/sa.bin")
    index = SuffixIndex.open(tmp_path, segments)
    found = index.places(Match(2, np.array([[0, 4], [0, 4], [0, 1]])), 9)
    assert [part.tolist() for part in found] == [[2], [0]]


def test_one_broken_segment_of_several_is_refused(tmp_path: Path) -> None:
    segments = written(tmp_path, [[2, 3, 4], [5, 6], [7, 8, 9]])
    (tmp_path / segments[1].directory / "sa.bin").write_bytes(b"\0" * 8)
    with pytest.raises(CorruptStore, match=segments[1].directory):
        SuffixIndex.open(tmp_path, segments)


@pytest.mark.parametrize(("dtype", "big"), [(np.uint16, 60_000), (np.uint32, 70_000)])
def test_positions_and_tokens_may_be_large(tmp_path: Path, dtype: type, big: int) -> None:
    """Over 2^31 tokens, nearly all of them zeros that take no room on disk; beside a small segment."""
    documents = [[5, 6, 7, big], [5, 6, 7, 9], [6, 7, 9, big, 5]]
    end = int(np.iinfo(dtype).max)
    tail = np.array([token for document in documents for token in (*document, end)], dtype)
    count = 2**31 + 1000
    small = written(tmp_path, [[1, 5, 6, 7, 9]], dtype)[0]
    directory = tmp_path / "suffix/000001"
    directory.mkdir()
    first = count - len(tail)
    # The zeros' suffixes come first in the order, so that the others' are the end of the array.
    for name, values in (("tokens.bin", tail), ("sa.bin", build_suffix_array(tail).astype(np.int64) + first)):
        with (directory / name).open("wb") as file:
            file.truncate((count - len(values)) * values.itemsize)
            file.seek(0, 2)
            values.tofile(file)
        if (directory / name).stat().st_blocks > 1000:
            pytest.skip("this file system has no sparse files")
    parameters = {**small.parameters, "suffix_dtype": "int64", "positions": count}
    large = Segment("suffix/000001", [], count, None, parameters, {}, provenance())
    index = SuffixIndex.open(tmp_path, [small, large])
    match = index.match(np.array([3, 5, 6, 7]))
    assert (match.length, match.occurrences) == (3, 3)
    segments, positions = index.places(match, 10)
    assert sorted(zip(segments.tolist(), positions.tolist(), strict=True)) == [(0, 1), (1, first), (1, first + 5)]
    tokens, parents, counts = index.continuations(match)
    assert (tokens.tolist(), parents.tolist(), counts.tolist()) == ([9, big], [-1, -1], [2, 1])
    tokens, _, counts = index.continuations(index.match(np.array([9, big])))
    assert (tokens.tolist(), counts.tolist()) == ([5], [1])
    part = DensePart(None, None, np.array([first + 1]), index.parts.tokens[1], 0, lambda: None)  # type: ignore[arg-type]
    dense = DenseIndex((part, part), np.array([0, count]))
    for start in (0, count):
        assert [row.tolist() for row in dense.continuations(np.array([start + first + 1]), 9)] == [[6, 7, big]]
    assert dense.starting_with(np.array([first + 3, count + first + 3, count + first]), big).tolist() == [0, 1]
