"""What tests ask of targets: slots, prompts, single steps, and what an ordinary pass of the network says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from specds.decode.contracts import Forward, Item
from specds.decode.draft import Draft, empty
from specds.model import LanguageModel

from ...conftest import FAMILIES

CPU = ("llama", "qwen2", "qwen3", "mistral")
RUNTIMES = [("generic", family) for family in FAMILIES] + [(name, family) for name in ("cpu", "cuda") for family in CPU]

TREE = [(-1, 9), (-1, 7), (0, 11), (1, 12), (2, 13), (0, 14), (4, 15), (3, 9)]
ROOM = 64


def logits_of(model: LanguageModel, tokens: Sequence[int]) -> torch.Tensor:
    """All rows of logits of an ordinary pass, without a cache: the reference."""
    with torch.inference_mode():
        logits: torch.Tensor = model.network(torch.tensor([list(tokens)]), use_cache=False).logits[0]
        return logits


def close(one: torch.Tensor, other: torch.Tensor) -> bool:
    spread = float(other.max() - other.min())
    return float((one - other).abs().max()) < 2e-5 * spread + 1e-5


def opened(target: Any, prompt: Sequence[int], room: int = ROOM) -> Any:
    slot = target.open(prompt, len(prompt) + room)
    assert slot is not None
    return slot


def show(target: Any, slot: Any, prompt: Sequence[int], *, every: bool = False) -> Forward:
    """What a slot does not hold of a prompt yet, chunk by chunk; its last row.

    Args:
        every: ask for the logits of all rows, as whoever has the likeliest tokens kept does.
    """
    start = len(slot.tokens)
    assert list(slot.tokens) == list(prompt[:start])
    while start < len(prompt):
        part = prompt[start : start + target.chunk]
        result = target.forward([Item.chain(slot, part, len(part) if every else 1)])
        target.commit(slot, range(len(part)))
        start += len(part)
    hidden = None if result.hidden is None else result.hidden[-1:]
    return Forward(result.logits[-1:], hidden)


def prefill(target: Any, prompt: Sequence[int], *, room: int = ROOM, every: bool = False) -> tuple[Any, Forward]:
    """A slot that holds a prompt, and what follows it."""
    slot = opened(target, prompt, room)
    return slot, show(target, slot, prompt, every=every)


def step(target: Any, slot: Any, last: int, draft: Draft | None = None) -> Forward:
    """A pass over the last token and a draft behind it."""
    result: Forward = target.forward([Item.draft(slot, last, empty() if draft is None else draft)])
    return result


def accept(target: Any, slot: Any, path: Sequence[int] = ()) -> None:
    """The slot holds the last token and some nodes of the draft."""
    target.commit(slot, [0, *(node + 1 for node in path)])
