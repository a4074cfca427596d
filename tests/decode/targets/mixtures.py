"""Requests of made-up texts that come and go, share passes and beginnings, each compared with its text alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
import torch

from specds.decode.contracts import TOP, Forward, Item
from specds.decode.top import top_ids
from specds.model import LanguageModel

from ..drafts import build

Rows = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Same = Callable[[torch.Tensor, torch.Tensor], bool]

# Few tokens, so that trees and prompts begin alike; beginnings of under a page, of a page, and of more than one.
_TOKENS = range(5, 12)
_BEGINNINGS = (0, 3, 40, 64, 90, 128)
_MOST_REQUESTS, _MOST_NODES = 6, 12


class Alone:
    """Logits, final-normed states and the captured layer's of all tokens of a text by itself."""

    def __init__(self, rows: Callable[[tuple[int, ...]], Rows]) -> None:
        self._rows = rows
        self._known: dict[tuple[int, ...], Rows] = {}
        self._last: dict[tuple[int, ...], tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, text: Sequence[int]) -> Rows:
        key = tuple(text)
        if key not in self._known:
            logits, hidden, _ = self._known[key] = self._rows(key)
            for row in range(max(0, len(key) - _MOST_NODES - 1), len(key)):
                self._last[key[: row + 1]] = logits[row], hidden[row]
        return self._known[key]

    def last(self, text: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits and final-normed state of the last token; what is asked for longest texts first takes least."""
        key = tuple(text)
        if key not in self._last:
            self(text)
        return self._last[key]


def by_network(model: LanguageModel) -> Alone:
    """An ordinary pass of the network, without a cache; the captured layer is the second."""

    def rows(text: tuple[int, ...]) -> Rows:
        with torch.inference_mode():
            output = model.network(torch.tensor([text]), output_hidden_states=True, use_cache=False)
        return output.logits[0], output.hidden_states[-1][0], output.hidden_states[2][0]

    return Alone(rows)


@dataclass(slots=True, eq=False)
class _Request:
    slot: Any
    prompt: list[int]
    steps: int
    last: int = 0
    held: list[int] = field(default_factory=list)


class Mixture:
    """Random requests of a target.

    Args:
        target: with hidden states and the second layer captured.
        alone: what its rows should be.
        same: how well.
        top: whether it keeps the likeliest tokens, for which all rows are wanted.
    """

    def __init__(self, target: Any, alone: Alone, same: Same, random: Random, *, top: bool) -> None:
        self._target, self._alone, self._same, self._random, self._top = target, alone, same, random, top
        self._text = [random.choice(_TOKENS) for _ in range(max(_BEGINNINGS))]
        self._requests: list[_Request] = []

    def run(self, passes: int) -> None:
        """So many passes; then all requests are closed."""
        for _ in range(passes):
            while len(self._requests) < self._random.randint(1, _MOST_REQUESTS) and self._come():
                pass
            chosen = [one for one in self._requests if self._random.random() < 0.8] or self._requests[:1]
            self._random.shuffle(chosen)
            self._pass(chosen)
            for request in [one for one in self._requests if not one.steps]:
                self._target.close(request.slot)
                self._requests.remove(request)
        for request in self._requests:
            self._target.close(request.slot)

    def _come(self) -> bool:
        """One more request, where there is room for it."""
        begin = self._random.choice(_BEGINNINGS)
        prompt = self._text[:begin] + [self._random.choice(_TOKENS) for _ in range(self._random.randint(1, 20))]
        steps = self._random.randint(1, 4)
        slot = self._target.open(prompt, len(prompt) + steps * (_MOST_NODES + 1))
        if slot is None:
            assert self._requests, "there is nobody to wait for"
            return False
        held = list(slot.tokens)
        assert held == prompt[: len(held)]
        assert len(held) < len(prompt)
        self._requests.append(_Request(slot, prompt, steps, prompt[-1], held))
        return True

    def _pass(self, requests: list[_Request]) -> None:
        items = [self._item(request) for request in requests]
        result = self._target.forward(items)
        for number, (request, item) in enumerate(zip(requests, items, strict=True)):
            self._check(request, item, result.of(number))
            self._commit(request, item)

    def _item(self, request: _Request) -> Item:
        rest = request.prompt[len(request.held) :]
        if rest:
            part = rest[: self._random.randint(1, len(rest))]
            wanted = len(part) if self._top else self._random.randint(0, len(part))
            return Item.chain(request.slot, part, wanted)
        size = self._random.choice((0, 0, self._random.randint(1, _MOST_NODES)))
        shape = [(self._random.randint(-1, node - 1), self._random.choice(_TOKENS)) for node in range(size)]
        return Item.draft(request.slot, self._random.choice(_TOKENS), build(shape))

    def _check(self, request: _Request, item: Item, result: Forward) -> None:
        assert result.hidden is not None
        assert len(result.logits) == item.wanted
        if item.parents is None:
            logits, hidden, _ = self._alone([*request.held, *item.tokens.tolist()])
            assert self._same(result.logits, logits[len(logits) - item.wanted :])
            assert self._same(result.hidden, hidden[len(hidden) - item.wanted :])
            return
        branches = _branches(item)
        before = len(branches) - item.wanted
        for row in sorted(range(item.wanted), key=lambda row: -len(branches[before + row])):
            logits, hidden = self._alone.last([*request.held, *branches[before + row]])
            assert self._same(result.logits[row], logits)
            assert self._same(result.hidden[row], hidden)

    def _commit(self, request: _Request, item: Item) -> None:
        """All of a prompt's tokens, or a branch of a tree."""
        count = len(item.tokens)
        if len(request.held) < len(request.prompt):
            rows = list(range(count))
        else:
            request.steps -= 1
            rows, row = [], self._random.randrange(count)
            while row >= 0:
                rows.insert(0, row)
                row = row - 1 if item.parents is None else int(item.parents[row])
        begin = len(request.held)
        self._target.commit(request.slot, rows)
        request.held += item.tokens[rows].tolist()
        assert list(request.slot.tokens) == request.held
        kept = self._target.activations(request.slot, self._random.choice((0, begin)))
        logits, _, layer = self._alone(request.held)
        assert self._same(torch.from_numpy(kept.layer), layer[len(layer) - len(kept.layer) :])
        if self._top:
            best = logits[len(logits) - len(kept.top) :]
            found = best.gather(-1, torch.from_numpy(kept.top.astype(np.int64)))
            expected = best.gather(-1, torch.from_numpy(top_ids(best, TOP).astype(np.int64)))
            assert self._same(found, expected)


def _branches(item: Item) -> list[list[int]]:
    """The tokens down to each of an item's."""
    found: list[list[int]] = []
    for number, token in enumerate(item.tokens.tolist()):
        parent = number - 1 if item.parents is None else int(item.parents[number])
        found.append([*(found[parent] if parent >= 0 else []), token])
    return found
