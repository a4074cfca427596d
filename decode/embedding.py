"""Hidden states of whole documents, by a target."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specds.decode.contracts import Captures, Item, Slot
from specds.decode.targets import make_target
from specds.decode.top import rows_of
from specds.errors import ModelError
from specds.model import LanguageModel

CAPTURES = Captures(hidden=True, logits=False)
"""What a target must be made with."""


class _Reading:
    """A document that is being read."""

    def __init__(self, number: int, tokens: NDArray[Any], slot: Slot) -> None:
        self.number, self.tokens, self.slot = number, tokens, slot
        self.states: list[NDArray[np.float32]] = []

    @property
    def left(self) -> int:
        return len(self.tokens) - len(self.slot.tokens)


class Embedder:
    """Embeds documents by a target of its own, as many at once as fill a pass.

    Args:
        memory: bytes of its key-value cache, at most; None: half of what is free.

    Raises:
        UnsupportedModel: the runtime cannot run the model.
    """

    def __init__(self, model: LanguageModel, runtime: str = "auto", memory: int | None = None) -> None:
        self._target = make_target(model, runtime, CAPTURES, memory=memory)

    def __call__(self, documents: Sequence[tuple[int, NDArray[Any]]]) -> Iterator[tuple[int, NDArray[np.float32]]]:
        """See `datastore.embedding.Embed`."""
        waiting, reading = list(reversed(documents)), list[_Reading]()
        try:
            while waiting or reading:
                while waiting and sum(document.left for document in reading) < self._target.chunk:
                    document = self._begin(*waiting[-1])
                    if document is None:
                        break
                    waiting.pop()
                    reading.append(document)
                if not reading:
                    raise ModelError("the key-value cache has no room for a document", "a larger --kv-memory")
                self._pass(reading)
                while reading and not reading[0].left:
                    done = reading.pop(0)
                    self._target.close(done.slot)
                    yield done.number, np.concatenate(done.states)
        finally:
            for document in reading:
                self._target.close(document.slot)

    def _begin(self, number: int, tokens: NDArray[Any]) -> _Reading | None:
        # Opened for its first token alone, of which nothing is ever there already: the states of all are wanted.
        slot = self._target.open([int(tokens[0])], len(tokens))
        return None if slot is None else _Reading(number, tokens, slot)

    def _pass(self, reading: Sequence[_Reading]) -> None:
        items: list[Item] = []
        room = self._target.chunk
        for document in reading:
            start = len(document.slot.tokens)
            some = document.tokens[start : start + room]
            if not len(some):
                break
            items.append(Item.chain(document.slot, some.tolist(), len(some)))
            room -= len(some)
        forward = self._target.forward(items)
        assert forward.hidden is not None
        for number, (document, item) in enumerate(zip(reading, items, strict=False)):
            rows = range(forward.ends[number], forward.ends[number + 1])
            document.states.append(rows_of(forward.hidden, rows))
            self._target.commit(item.slot, range(len(item.tokens)))
