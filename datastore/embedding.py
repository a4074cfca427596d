"""Hidden states of documents, by the model itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from specds.model import LanguageModel


class Embed(Protocol):
    """Gives documents' hidden states."""

    def __call__(self, documents: Sequence[tuple[int, NDArray[Any]]]) -> Iterator[tuple[int, NDArray[np.float32]]]:
        """The last layer's final-normed hidden state at every position of each document.

        Args:
            documents: (number, token ids[length]) pairs; no document is empty.

        Yields:
            (number, float32[length, hidden size]) in the same order.
        """


def embed(
    model: LanguageModel, documents: Sequence[tuple[int, NDArray[Any]]], batch_tokens: int
) -> Iterator[tuple[int, NDArray[np.float32]]]:
    """See `Embed`; by the model's own network.

    Documents are taken in the given order, so many at a time as fill `batch_tokens` when padded: sort them
    by length. Padding stands on the right, where causal attention never looks back from.

    Args:
        documents: (number, token ids[length]) pairs; no document is empty.

    Yields:
        (number, float32[length, hidden size]) in the same order.
    """
    batch: list[tuple[int, NDArray[Any]]] = []
    longest = 0
    for document in documents:
        longest = max(longest, len(document[1]))
        if batch and longest * (len(batch) + 1) > batch_tokens:
            yield from _embed_batch(model, batch)
            batch, longest = [], len(document[1])
        batch.append(document)
    if batch:
        yield from _embed_batch(model, batch)


@torch.inference_mode()
def _embed_batch(
    model: LanguageModel, batch: list[tuple[int, NDArray[Any]]]
) -> Iterator[tuple[int, NDArray[np.float32]]]:
    longest = max(len(tokens) for _, tokens in batch)
    padded = np.zeros((len(batch), longest), np.int64)
    for row, (_, tokens) in enumerate(batch):
        padded[row, : len(tokens)] = tokens
    states = model.decoder(input_ids=torch.from_numpy(padded).to(model.device), use_cache=False).last_hidden_state
    for row, (number, tokens) in enumerate(batch):
        yield number, states[row, : len(tokens)].float().cpu().numpy()
