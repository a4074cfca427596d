"""The CPU runtime: Llama-like models in float32, every pass in one compiled function on a few threads."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from specds.decode.contracts import Activations, Captures, Forward, Item
from specds.decode.draft import check_tokens
from specds.decode.targets import attention as a
from specds.decode.targets import kernels as k
from specds.decode.targets import layout
from specds.decode.targets.held import Held, most_wanted
from specds.decode.targets.llama import packed, rotary_table, unsupported, without
from specds.decode.targets.memory import Arena, memory_for
from specds.decode.targets.microkernel import LANES, ROWS
from specds.decode.targets.pages import PAGE, PagedSlot, Pages, paged
from specds.decode.targets.team import Team
from specds.errors import UnsupportedModel
from specds.model import LanguageModel

# Rows of a pass over a prompt: enough to be bound by arithmetic, few enough for their work space to stay in the cache.
_CHUNK = 96
_GRAIN = 256
# Set by the first pass of the process. That one runs on one thread: compiling takes a while, and nobody is to wait
# at a barrier for a thread that is interrupted meanwhile.
_compiled = threading.Event()


class CpuTarget:
    """A Llama, Mistral, Qwen2 or Qwen3 in float32 on the CPU, its weights packed once.

    A row's result is the same number bit by bit whatever stands beside it in a pass, of whatever request, so that a
    drafted text is the plain one exactly. Prompts that begin alike share what is computed of the beginning.

    Args:
        memory: bytes of the key-value cache, at most; None: half of what is free.

    Raises:
        UnsupportedModel: another architecture, device or dtype.
    """

    def __init__(
        self,
        model: LanguageModel,
        captures: Captures | None = None,
        *,
        memory: int | None = None,
        threads: int | None = None,
    ) -> None:
        if reason := unsupported(model):
            raise UnsupportedModel(f"the cpu runtime cannot run {model.name}: {reason}", "use --runtime generic")
        self._captures = captures or Captures()
        self._model = model
        self._embedding: torch.Tensor | None = None
        self._packed = packed(model)
        self._vocabulary = model.config.vocab_size
        self._config = model.config
        self.chunk = most_wanted(_CHUNK, self._vocabulary, self._captures)
        self._line = -(-self._vocabulary // LANES) * LANES
        self._logits = np.zeros(self._line, np.float32)
        self._team = Team(threads or torch.get_num_threads())
        self._arrived = np.zeros(8, np.int64)
        self._sketches: dict[frozenset[int], layout.Model] = {}
        shape = self._packed.shape
        self._lines = int(shape[layout.LAYERS] * shape[layout.KV_HEADS])
        self._head = int(shape[layout.HEAD])
        self._padded = -(-self._head // LANES) * LANES
        self._page_keys, self._page_values = self._lines * PAGE * self._head, self._lines * PAGE * self._padded
        self._arena = Arena(memory_for(memory), 4 * (self._page_keys + self._page_values))
        count = self._arena.count
        self._keys = self._arena.numbers[: count * self._page_keys]
        self._values = self._arena.numbers[count * self._page_keys :]
        self._pages = Pages(count, self._copy)
        self.capacity = count * PAGE
        self._held = Held(self._captures, int(self._config.hidden_size))
        self._room = self._rows = 0
        self._reserve(_GRAIN)
        self._make_space(1)

    def open(self, prompt: Sequence[int], length: int) -> PagedSlot | None:
        """See `Target.open`."""
        return self._pages.open(prompt, length)

    def close(self, slot: PagedSlot, *, keep: bool = True) -> None:
        """See `Target.close`."""
        self._pages.close(slot, keep=keep)

    def forget(self) -> None:
        """See `Target.forget`."""
        self._pages.forget()

    def forward(self, items: Sequence[Item]) -> Forward:
        """See `Target.forward`.

        Raises:
            CorruptStore: a drafted token is none of the model's.
        """
        items = self._held.wanted(items)
        result, states = self._run(items, [len(item.slot.tokens) for item in items])
        self._held.record(items, result, states)
        return result

    def commit(self, slot: PagedSlot, rows: Sequence[int]) -> None:
        """See `Target.commit`."""
        kept = list(rows)
        self._move(slot, len(slot), kept)
        self._held.commit(slot, kept)
        self._pages.extend(slot, slot.staged[kept].tolist())

    def layer_skip(self, slot: PagedSlot, token: int, ahead: int, skip: frozenset[int]) -> torch.Tensor:
        """See `Target.layer_skip`."""
        if skip not in self._sketches:
            self._sketches[skip] = without(self._packed, skip)
        item = Item.chain(slot, [token])
        return self._run([item], [len(slot) + ahead], self._sketches[skip])[0].logits[0]

    def activations(self, slot: PagedSlot, start: int = 0) -> Activations:
        """See `Target.activations`."""
        return self._held.activations(slot, start)

    def embed(self, tokens: NDArray[np.integer]) -> NDArray[np.float32]:
        """float32[m, d]: input embeddings of m token ids."""
        if self._embedding is None:
            # As the checkpoint has it, row by row and mapped, not read: packed, a token's numbers lie far apart.
            tensor = self._model.tensor("model.embed_tokens.weight")
            assert tensor is not None  # it was packed
            self._embedding = tensor.detach()
        rows: NDArray[np.float32]
        if self._embedding.dtype == torch.float32:
            rows = self._embedding.numpy()[tokens]
        else:
            rows = self._embedding[torch.from_numpy(tokens.astype(np.int64))].float().numpy()
        return rows

    def _run(
        self, items: Sequence[Item], starts: Sequence[int], sketch: layout.Model | None = None
    ) -> tuple[Forward, NDArray[np.float32] | None]:
        model = sketch or self._packed
        layer = 0 if sketch else self._captures.layer
        tokens = np.concatenate([item.tokens for item in items], dtype=np.int64)
        check_tokens(tokens, self._vocabulary)
        sizes = [len(item.tokens) for item in items]
        longest = 0
        for item, start, size in zip(items, starts, sizes, strict=True):
            self._pages.reserve(paged(item.slot), start + size)
            longest = max(longest, start + size)
        self._reserve(longest)
        self._make_space(len(tokens))
        run, ends = self._plan(items, np.array(starts), np.array([0, *np.cumsum(sizes)]), tokens, layer)
        asked = len(run.wanted)
        states = np.empty((asked, model.shape[layout.HIDDEN]), np.float32)
        captured = np.empty((len(tokens) if layer else 0, model.shape[layout.HIDDEN]), np.float32)
        shown_rows = asked if self._captures.logits else 0
        # Rows of logits end on a whole panel; what is behind the vocabulary is never shown.
        if len(self._logits) < shown_rows * self._line:
            self._logits = np.zeros(shown_rows * self._line, np.float32)
        logits = self._logits[: shown_rows * self._line]
        self._compute(model, run, layout.Results(states, captured, logits))
        shown = torch.from_numpy(logits.reshape(shown_rows, self._line)[:, : self._vocabulary])
        hidden = torch.from_numpy(states) if self._captures.hidden else None
        return Forward(shown, hidden, ends), captured if layer else None

    def _plan(
        self,
        items: Sequence[Item],
        starts: NDArray[np.int64],
        first: NDArray[np.int64],
        tokens: NDArray[np.int64],
        layer: int,
    ) -> tuple[layout.Run, list[int]]:
        """What the kernels are told of a pass, and where the wanted rows of each item end."""
        rows = len(tokens)
        parents = np.empty(rows, np.int64)
        wanted: list[NDArray[np.int64]] = []
        ends = [0]
        for number, item in enumerate(items):
            begin, end = first[number], first[number + 1]
            parents[begin:end] = np.arange(-1, end - begin - 1) if item.parents is None else item.parents
            wanted.append(np.arange(end - item.wanted, end))
            ends.append(ends[-1] + item.wanted)
        lineage = np.full((rows, a.widest(parents, first)), -1, np.int32)
        depths = np.empty(rows, np.int64)
        a.branches(parents, first, lineage, depths)
        positions = np.repeat(starts, np.diff(first)) + depths
        bounds = np.zeros((self._team.size + 1, 2), np.int64)
        threads = self._threads
        a.share_attention(first, starts, int(self._packed.shape[layout.HEADS]), bounds[: threads + 1])
        run = layout.Run(
            tokens,
            first,
            starts,
            np.array([paged(item.slot).number for item in items]),
            lineage,
            _lows(self._packed.table[:, layout.WINDOW], positions),
            self._cosine[positions].reshape(-1),
            self._sine[positions].reshape(-1),
            np.concatenate(wanted),
            bounds,
            layer,
        )
        return run, ends

    @property
    def _threads(self) -> int:
        return self._team.size if _compiled.is_set() else 1

    def _compute(self, model: layout.Model, run: layout.Run, results: layout.Results) -> None:
        """The pass itself, on all threads."""
        cache = layout.Cache(self._keys, self._values, self._pages.table, self._lines)
        space = layout.Space(self._x, self._wide, self._mixed, self._own, self._scores, self._room)
        threads = self._threads
        self._arrived[0] = 0

        def work(thread: int) -> None:
            if thread >= threads:
                return
            try:
                k.forward(layout.Worker(thread, threads), self._arrived, model, run, cache, space, results)
            except BaseException:
                k.release(self._arrived)  # the others must not wait for this thread
                raise

        self._team.run(work)
        _compiled.set()

    def _move(self, slot: PagedSlot, start: int, rows: Sequence[int]) -> None:
        """Rows of a pass behind `start` come to stand side by side."""
        if len(rows) and rows[-1] != len(rows) - 1:
            cache = layout.Cache(self._keys, self._values, self._pages.table, self._lines)
            sizes = np.array([self._head, self._padded])
            a.move(cache, sizes, self._pages.table[slot.number], start, np.array(rows, np.int64))

    def _copy(self, source: int, target: int, count: int) -> None:
        """The first tokens of a page into another."""
        self._held.copy(source, target, count)
        panels = -(-count // LANES)
        keys = self._keys.reshape(-1, self._lines, PAGE // LANES, self._head * LANES)
        keys[target, :, :panels] = keys[source, :, :panels]
        values = self._values.reshape(-1, self._lines, self._padded // LANES, PAGE, LANES)
        values[target, :, :, :count] = values[source, :, :, :count]

    def _reserve(self, length: int) -> None:
        """Work space for texts of so many tokens; it grows by half."""
        if length <= self._room:
            return
        room = max(length + _GRAIN, self._room * 3 // 2)
        room += -room % LANES
        self._scores = np.zeros((self._team.size, ROWS * room), np.float32)
        self._cosine, self._sine = rotary_table(self._config, room)
        self._room = room  # last: nothing checks sizes again

    def _make_space(self, rows: int) -> None:
        """Work space for a pass of so many rows."""
        if rows <= self._rows:
            return
        shape = self._packed.shape
        stream = int(-(-shape[layout.HIDDEN] // LANES) * LANES)
        heads = int(shape[layout.HEADS] * shape[layout.HEAD])
        projected = heads + 2 * int(shape[layout.KV_HEADS] * shape[layout.HEAD])
        inner = int(shape[layout.INNER])
        rows = 1 << (rows - 1).bit_length()
        self._x = np.zeros(rows * stream, np.float32)
        self._wide = np.zeros(rows * max(projected + LANES, 2 * inner, stream), np.float32)
        self._mixed = np.zeros(rows * max(heads, inner, stream), np.float32)
        self._own = np.zeros((self._team.size, rows * (stream + 1) + ROWS * LANES), np.float32)
        self._rows = rows  # last, as above


def _lows(windows: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """int64[layers, n]: the first held token that each row sees in each layer, by the layers' windows, 0 for none."""
    if not windows.any():
        return np.zeros((len(windows), len(positions)), np.int64)
    wide = windows[:, None]
    return np.where(wide > 0, np.maximum(positions[None] - wide + 1, 0), 0)
