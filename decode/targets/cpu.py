"""The CPU runtime: Llama-like models in float32, every pass in one compiled function on a few threads."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from specds.decode.contracts import Activations, Captures, Forward
from specds.decode.draft import Draft
from specds.decode.targets import kernels as k
from specds.decode.targets import layout
from specds.decode.targets.held import Held
from specds.decode.targets.llama import packed, rotary_table, unsupported, without
from specds.decode.targets.microkernel import LANES, ROWS
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

    A row's result is the same number bit by bit whatever stands beside it in a pass, so that a drafted text is the
    plain one exactly. A prompt that begins like the request before it is computed from where they part.

    Raises:
        UnsupportedModel: another architecture, device or dtype.
    """

    def __init__(self, model: LanguageModel, captures: Captures | None = None, *, threads: int | None = None) -> None:
        if reason := unsupported(model):
            raise UnsupportedModel(f"the cpu runtime cannot run {model.name}: {reason}", "use --runtime generic")
        self._captures = captures or Captures()
        self._model = model
        self._embedding: torch.Tensor | None = None
        self._packed = packed(model)
        self._vocabulary = model.config.vocab_size
        self._config = model.config
        self._line = -(-self._vocabulary // LANES) * LANES
        self._logits = np.zeros(self._line, np.float32)
        self._team = Team(threads or torch.get_num_threads())
        self._arrived = np.zeros(8, np.int64)
        self._sketches: dict[frozenset[int], layout.Model] = {}
        self._held = Held(self._captures, int(self._config.hidden_size), self._vocabulary)
        self._room = 0
        self._keys = self._values = np.empty(0, np.float32)
        self._rows = 0
        self._reserve(_GRAIN)
        self._make_space(1)

    def prefill(self, tokens: Sequence[int]) -> Forward:
        """The prompt's passes, a chunk at a time; logits and hidden state of its last token."""
        start, most = self._held.begin(tokens), self._held.chunk(_CHUNK)
        while start < len(tokens):
            chunk = tokens[start : start + most]
            rows = len(chunk)
            asked = rows if self._captures.top else int(start + rows == len(tokens))
            lineage = np.where(np.tri(rows, dtype=np.bool_), np.arange(rows), -1).astype(np.int32)
            result, states = self._run(np.array(chunk, np.int64), lineage, np.arange(rows), start, asked)
            self._held.extend(chunk, result.logits, states)
            start += rows
        hidden = None if result.hidden is None else result.hidden[-1:]
        return Forward(result.logits[-1:], hidden)

    def forward(self, last: int, draft: Draft) -> Forward:
        """One pass over the last committed token and n draft nodes: n + 1 rows of logits, valid until the next pass."""
        draft.check_tokens(self._vocabulary)
        pending = np.array(self._held.stage(last, draft), np.int64)
        result, states = self._run(pending, *_lineage(draft), len(self._held), asked=len(draft) + 1)
        self._held.record(result.logits, states)
        return result

    def commit(self, path: Sequence[int]) -> None:
        """Cut the cache back to the committed text: the last token and the accepted path."""
        start = len(self._held)
        rows = np.array(self._held.commit(path), np.int64)
        shape = self._packed.shape
        layers, kv_heads = int(shape[layout.LAYERS]), int(shape[layout.KV_HEADS])
        k.compact(layers, kv_heads, int(shape[layout.HEAD]), self._keys, self._values, self._room, start, rows)

    def layer_skip(self, token: int, ahead: int, skip: frozenset[int]) -> torch.Tensor:
        """See `Target.layer_skip`."""
        if skip not in self._sketches:
            self._sketches[skip] = without(self._packed, skip)
        alone = np.zeros((1, 1), np.int32), np.zeros(1, np.int64)
        start = len(self._held) + ahead
        return self._run(np.array([token]), *alone, start, 1, self._sketches[skip])[0].logits[0]

    def activations(self) -> Activations:
        """What the captures keep of all that was prefilled and committed."""
        return self._held.activations

    def embed(self, tokens: NDArray[np.integer]) -> NDArray[np.float32]:
        """float32[m, d]: input embeddings of m token ids."""
        if self._embedding is None:
            # As the checkpoint has it, row by row and mapped, not read: packed, a token's numbers lie far apart.
            tensor = self._model.tensor("model.embed_tokens.weight")
            assert tensor is not None  # it was packed
            self._embedding = tensor.detach()
        found: NDArray[np.float32]
        if self._embedding.dtype == torch.float32:
            found = self._embedding.numpy()[tokens]
        else:
            found = self._embedding[torch.from_numpy(tokens.astype(np.int64))].float().numpy()
        return found

    def _run(
        self,
        tokens: NDArray[np.int64],
        lineage: NDArray[np.int32],
        depths: NDArray[np.int64],
        start: int,
        asked: int,
        sketch: layout.Model | None = None,
    ) -> tuple[Forward, NDArray[np.float32] | None]:
        model, rows = sketch or self._packed, len(tokens)
        layer = 0 if sketch else self._captures.layer
        self._reserve(start + rows)
        self._make_space(rows)
        positions = start + depths
        cosine, sine = self._cosine[positions].reshape(-1), self._sine[positions].reshape(-1)
        lows = _lows(model.table[:, layout.WINDOW], positions)
        run = layout.Run(tokens, lineage, lows, cosine, sine, start, asked, layer)
        states = np.empty((asked, model.shape[layout.HIDDEN]), np.float32)
        captured = np.empty((rows if layer else 0, model.shape[layout.HIDDEN]), np.float32)
        # Rows of logits end on a whole panel; what is behind the vocabulary is never shown.
        if len(self._logits) < asked * self._line:
            self._logits = np.zeros(asked * self._line, np.float32)
        logits = self._logits[: asked * self._line]
        self._compute(model, run, layout.Results(states, captured, logits))
        shown = torch.from_numpy(logits.reshape(asked, self._line)[:, : self._vocabulary])
        result = Forward(shown, torch.from_numpy(states) if self._captures.hidden else None)
        return result, captured if layer else None

    def _compute(self, model: layout.Model, run: layout.Run, results: layout.Results) -> None:
        """The pass itself, on all threads."""
        cache = layout.Cache(self._keys, self._values, self._room)
        space = layout.Space(self._x, self._wide, self._mixed, self._own, self._scores)
        threads = self._team.size if _compiled.is_set() else 1
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

    def _reserve(self, length: int) -> None:
        """Room for so many positions in the cache; it grows by half, and keeps what it holds."""
        if length <= self._room:
            return
        shape = self._packed.shape
        lines = int(shape[layout.LAYERS] * shape[layout.KV_HEADS])
        head = int(shape[layout.HEAD])
        panels = -(-head // LANES)
        room = max(length + _GRAIN, self._room * 3 // 2)
        room += -room % LANES
        keys = np.zeros((lines, room // LANES, head, LANES), np.float32)
        values = np.zeros((lines, panels, room, LANES), np.float32)
        if self._room:
            keys[:, : self._room // LANES] = self._keys.reshape(lines, -1, head, LANES)
            values[:, :, : self._room] = self._values.reshape(lines, panels, self._room, LANES)
        scores = np.zeros((self._team.size, ROWS * room), np.float32)
        cosine, sine = rotary_table(self._config, room)
        self._keys, self._values, self._scores = keys.reshape(-1), values.reshape(-1), scores
        self._cosine, self._sine = cosine, sine
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
    """int64[layers, n]: the first position that each row sees in each layer, by the layers' windows, 0 for none."""
    if not windows.any():
        return np.zeros((len(windows), len(positions)), np.int64)
    wide = windows[:, None]
    return np.where(wide > 0, np.maximum(positions[None] - wide + 1, 0), 0)


def _lineage(draft: Draft) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """For the last committed token and each node: the rows of its branch, ascending, then -1; and its depth."""
    rows = len(draft) + 1
    lineage = np.full((rows, rows), -1, np.int32)
    depths = np.zeros(rows, np.int64)
    lineage[0, 0] = 0
    for row, parent in enumerate(draft.parents + 1, 1):
        depth = depths[row] = depths[parent] + 1
        lineage[row, :depth] = lineage[parent, :depth]
        lineage[row, depth] = row
    return lineage, depths
