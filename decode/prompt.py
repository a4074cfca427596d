"""Reading a prompt without answering it."""

from __future__ import annotations

from collections.abc import Sequence

from specds.decode.contracts import Item, Slot, Target
from specds.errors import PromptError


def hold(target: Target, tokens: Sequence[int], length: int) -> Slot:
    """A slot that holds some tokens, chunk by chunk, with room for `length` in all.

    Raises:
        PromptError: the key-value cache has no room for them.
    """
    # The last token of a prompt is never there already; one more is never read.
    slot = target.open([*tokens, 0], length + 1)
    if slot is None:
        raise PromptError(
            f"the key-value cache has no room for {length:,} tokens",
            "a larger --kv-memory, or a smaller --parallel",
        )
    while len(slot.tokens) < len(tokens):
        start = len(slot.tokens)
        chunk = tokens[start : start + target.chunk]
        target.forward([Item.chain(slot, chunk, 1)])
        target.commit(slot, range(len(chunk)))
    return slot
