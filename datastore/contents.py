"""What the numbers of a store's indexes say, for `specds verify`: intact files may still be adversarial."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specds.datastore import dense, suffix
from specds.datastore.manifest import Segment
from specds.datastore.store import Store
from specds.errors import CorruptStore, shortage

_CHUNK = 1 << 22  # numbers looked at in one go


def strange_numbers(store: Store) -> list[str]:
    """Files of indexes that no builder of ours wrote: token ids beyond the vocabulary, positions outside the tokens.

    Drafts are made of these; what is wrong with them is found when decoding refuses one.

    Returns:
        what is wrong, a line each, with the file's name.
    """
    return list(_strange(store))


def _strange(store: Store) -> Iterator[str]:
    for segment in store.manifest.suffix:
        try:
            tokens, positions = suffix.map_segment(store.path / segment.directory, segment)
        except CorruptStore as error:
            if shortage(error) is not None:
                raise
            yield error.message
            continue
        yield from _strange_tokens(segment, tokens, store.manifest.vocab_size)
        yield from _strange_positions(f"{segment.directory}/sa.bin", positions, len(tokens), None)
    for segment in store.manifest.dense:
        try:
            positions, tokens = dense.map_values(store.path / segment.directory, segment.parameters)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            yield f"{segment.directory}: is not the dense index that the manifest describes: {error!r}"
            continue
        yield from _strange_tokens(segment, tokens, store.manifest.vocab_size)
        # The largest value says that a document is gone.
        gone = int(np.iinfo(positions.dtype).max)
        yield from _strange_positions(f"{segment.directory}/positions.bin", positions, len(tokens), gone)


def _strange_tokens(segment: Segment, tokens: NDArray[Any], vocabulary: int) -> Iterator[str]:
    separator = np.iinfo(tokens.dtype).max
    for start in range(0, len(tokens), _CHUNK):
        piece = tokens[start : start + _CHUNK]
        beyond = np.flatnonzero((piece >= vocabulary) & (piece != separator))
        if len(beyond):
            at = start + int(beyond[0])
            yield f"{segment.directory}/tokens.bin: holds token {tokens[at]:,} at {at:,}, and there are {vocabulary:,}"
            return


def _strange_positions(name: str, positions: NDArray[Any], length: int, gone: int | None) -> Iterator[str]:
    for start in range(0, len(positions), _CHUNK):
        piece = positions[start : start + _CHUNK]
        outside = (piece < 0) | (piece >= length)
        if gone is not None:
            outside &= piece != gone
        if outside.any():
            at = start + int(np.flatnonzero(outside)[0])
            yield f"{name}: points to {int(positions[at]):,} at {at:,}, and there are {length:,} tokens"
            return
