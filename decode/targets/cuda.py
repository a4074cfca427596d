"""The GPU runtime: Llama-like models with fused projections, static buffers, and one CUDA graph for a size of pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from specds.decode.contracts import Activations, Captures, Forward, Item
from specds.decode.draft import check_tokens
from specds.decode.targets.batches import Batch, Pass, calls_of, side_by_side
from specds.decode.targets.held import Held, most_wanted
from specds.decode.targets.llama import not_llama_like, rotary_table, windows
from specds.decode.targets.memory import memory_for, pages_within
from specds.decode.targets.pages import PAGE, PagedSlot, Pages
from specds.decode.targets.pool import Buffer, Pool
from specds.errors import ModelError, UnsupportedModel
from specds.model import LanguageModel

# Rows, items and rows of an item are rounded up to one of these, what is looked at to a multiple of _SPAN: a graph for
# each size of pass.
_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_SPAN = 512
_CHUNK = 512
# Rows of padding, and positions of padding, whose attention takes as long as launching that of another group, about.
_ROWS = 64
_POSITIONS = 16_384


class CudaTarget:
    """A Llama, Mistral, Qwen2 or Qwen3 on a GPU, in any dtype.

    Projections run over the rows of all items, attention over items of about one size side by side. On another device
    it does the same: slow, and good for tests.

    Args:
        memory: bytes of the key-value cache, at most; None: half of what is free.
        graphs: whether passes of few rows come in few sizes, on a GPU each as a CUDA graph; None: on a GPU.

    Raises:
        UnsupportedModel: another architecture.
        ModelError: a tensor of the checkpoint is missing.
    """

    def __init__(
        self,
        model: LanguageModel,
        captures: Captures | None = None,
        *,
        memory: int | None = None,
        graphs: bool | None = None,
    ) -> None:
        if reason := not_llama_like(model):
            raise UnsupportedModel(f"the cuda runtime cannot run {model.name}: {reason}", "use --runtime generic")
        self._captures = captures or Captures()
        if model not in _networks:
            _networks[model] = _Network(model)
        self._net = _networks[model]
        self._device = model.device
        self._vocabulary = int(model.config.vocab_size)
        self._context_length = model.context_length
        self.chunk = most_wanted(_CHUNK, self._vocabulary, self._captures)
        self._graphs: dict[tuple[int, int, int, int, frozenset[int]], _Captured] | None = None
        if graphs if graphs is not None else self._device.type == "cuda":
            self._graphs = {}
        # Results are valid until the next pass, so that all graphs can share one pool.
        self._graph_pool = torch.cuda.graph_pool_handle() if self._device.type == "cuda" else None
        kinds = [Buffer(self._net.kv_heads, self._net.head, self._net.dtype, self._device)] * (2 * self._net.layers)
        count = pages_within(memory_for(memory, self._device), sum(kind.size for kind in kinds) * PAGE)
        self._pool = Pool(kinds, count)
        self._pages = Pages(count, self._copy)
        self.capacity = count * PAGE
        self._held = Held(self._captures, int(model.config.hidden_size))
        self._room = 0
        self._reserve(_SPAN)

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
        result, states = self._run(items, [len(item.slot.tokens) for item in items])
        self._held.record(items, result, states)
        return result

    def commit(self, slot: PagedSlot, rows: Sequence[int]) -> None:
        """See `Target.commit`."""
        kept, start = list(rows), len(slot)
        if kept and kept[-1] != len(kept) - 1:
            places = slot.places(start, start + kept[-1] + 1)
            self._pool.move(places[kept], places[: len(kept)])
        self._held.commit(slot, kept)
        self._pages.extend(slot, slot.staged[kept].tolist())

    def layer_skip(self, slot: PagedSlot, token: int, ahead: int, skip: frozenset[int]) -> torch.Tensor:
        """See `Target.layer_skip`."""
        return self._run([Item.chain(slot, [token])], [len(slot) + ahead], skip)[0].logits[0]

    def activations(self, slot: PagedSlot, start: int = 0) -> Activations:
        """See `Target.activations`."""
        return self._held.activations(slot, start)

    def embed(self, tokens: NDArray[np.integer]) -> NDArray[np.float32]:
        """float32[m, d]: input embeddings of m token ids."""
        return self._net.embed(tokens)

    def _run(
        self, items: Sequence[Item], starts: Sequence[int], skip: frozenset[int] = frozenset()
    ) -> tuple[Forward, NDArray[np.float32] | None]:
        items = self._held.wanted(items)
        work = Pass.of(items, starts)
        check_tokens(work.tokens, self._vocabulary)
        for slot, end in zip(work.slots, work.ends.tolist(), strict=True):
            self._pages.reserve(slot, end)
        self._reserve(int(work.ends.max()))
        self._pool.settle()
        ends = [0, *np.cumsum([item.wanted for item in items]).tolist()]
        wanted = np.concatenate(
            [np.arange(end - item.wanted, end) for item, end in zip(items, work.first[1:].tolist(), strict=True)]
        )
        calls = calls_of(work, alone=_BUCKETS[-1], row_price=1 / _ROWS, position_price=1 / _POSITIONS)
        layers = _Layers(0 if skip else self._captures.layer, skip)
        used = len(work.tokens)
        # Few rows that are all wanted, as in decoding: launching kernels one by one would take longer than they do.
        if self._graphs is not None and len(calls) == 1 and len(wanted) == used <= _BUCKETS[-1]:
            logits, states, captured = self._replay(work, calls[0], layers)
        else:
            batches = [side_by_side(work, call, self._pages.table, window=self._net.window) for call in calls]
            inputs = _Inputs.of(work, wanted, batches, used, self._pool.spare, self._device)
            logits, states, captured = self._net.run(inputs, self._rotary, self._pool.tensors, layers)
        logits, states = logits[: len(wanted)], states[: len(wanted)]
        result = Forward(logits, states if self._captures.hidden else None, ends)
        return result, None if captured is None else captured[:used].float().cpu().numpy()

    def _replay(
        self, work: Pass, call: Sequence[int], layers: _Layers
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """The pass over rows that are all wanted, by a graph of its size, which is captured where there is none yet."""
        assert self._graphs is not None
        rows, lines, cells = (_bucket(size) for size in (len(work.tokens), len(call), int(work.sizes.max())))
        span = -(-int(work.ends.max()) // _SPAN) * _SPAN
        key = rows, lines, cells, span, layers.skip
        table, spare = self._pages.table, self._pool.spare
        batch = side_by_side(
            work, call, table, window=self._net.window, lines=lines, rows=cells, span=span, spare=spare
        )
        inputs = _Inputs.of(work, np.arange(rows), [batch], rows, spare, self._device)
        if key not in self._graphs:
            self._graphs[key] = _Captured(self._net, inputs, self._rotary, self._pool.tensors, layers, self._graph_pool)
        return self._graphs[key].replay(inputs)

    def _reserve(self, length: int) -> None:
        """Room for texts of so many tokens and for all pages that are used; what was captured over smaller buffers is
        forgotten with them.
        """
        changed = self._pool.reserve(self._pages.used)
        if length > self._room:
            self._room = max(length, min(2 * self._room, self._context_length))
            self._rotary = self._net.rotary(self._room)
            changed = True
        if changed and self._graphs is not None:
            self._graphs = {}

    def _copy(self, source: int, target: int, count: int) -> None:
        """The first tokens of a page into another."""
        self._held.copy(source, target, count)
        if self._pool.copy(source, target, count) and self._graphs is not None:
            self._graphs = {}


class _Group(NamedTuple):
    """Attention of some items side by side, as a `Batch` has them.

    Attributes:
        spread: int64[lines · n], the row of the pass in each cell; any in a cell of padding.
        reads: int64[lines · span], rows of the pool.
        hidden: bool[kinds, lines, n, span], what each cell does not look at.
    """

    spread: torch.Tensor
    reads: torch.Tensor
    hidden: torch.Tensor


class _Inputs(NamedTuple):
    """What a pass over m rows reads; behind those of its items may be others, for nothing, up to a size.

    Attributes:
        ids, positions: int64[m].
        writes: int64[m], rows of the pool where keys and values go.
        collect: int64[m], each row's cell, counted over all groups.
        wanted: int64[k], rows whose logits are wanted.
        groups: of items that attention has side by side.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    writes: torch.Tensor
    collect: torch.Tensor
    wanted: torch.Tensor
    groups: tuple[_Group, ...]

    @classmethod
    def of(
        cls,
        work: Pass,
        wanted: NDArray[np.int64],
        batches: Sequence[Batch],
        rows: int,
        spare: int,
        device: torch.device,
    ) -> _Inputs:
        """Those of a pass, padded to so many rows, whose keys and values go to a spare row of the pool."""
        ids, positions, collect = (np.zeros(rows, np.int64) for _ in range(3))
        writes = np.full(rows, spare, np.int64)
        ids[: len(work.tokens)] = work.tokens
        groups, cells = [], 0
        for batch in batches:
            spread = np.zeros(batch.positions.size, np.int64)
            spread[batch.cells] = batch.chosen
            positions[batch.chosen] = batch.positions.reshape(-1)[batch.cells]
            writes[batch.chosen] = batch.writes
            collect[batch.chosen] = cells + batch.cells
            cells += len(spread)
            arrays = spread, batch.reads.reshape(-1), ~batch.seen
            groups.append(_Group(*(torch.from_numpy(array).to(device) for array in arrays)))
        flat = [torch.from_numpy(array).to(device) for array in (ids, positions, writes, collect, wanted)]
        return cls(flat[0], flat[1], flat[2], flat[3], flat[4], tuple(groups))

    def tensors(self) -> list[torch.Tensor]:
        """All of them in order."""
        flat = [self.ids, self.positions, self.writes, self.collect, self.wanted]
        return [*flat, *(tensor for group in self.groups for tensor in group)]

    def clone(self) -> _Inputs:
        """Others of the same sizes and numbers."""
        ids, positions, writes, collect, wanted, *rest = (tensor.clone() for tensor in self.tensors())
        groups = tuple(_Group(*rest[at : at + 3]) for at in range(0, len(rest), 3))
        return _Inputs(ids, positions, writes, collect, wanted, groups)


class _Layers(NamedTuple):
    """Which layer is captured, 1 the first, 0: none; and which are left out, 0 the first."""

    capture: int
    skip: frozenset[int]


class _Block(NamedTuple):
    """One layer's weights; None where the model has none."""

    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    out: torch.Tensor
    out_bias: torch.Tensor | None
    gate_up: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None
    norm_in: torch.Tensor
    norm_mlp: torch.Tensor
    norm_q: torch.Tensor | None
    norm_k: torch.Tensor | None


class _Network:
    """The weights on their device, and a pass over them."""

    def __init__(self, model: LanguageModel) -> None:
        config = model.config

        def get(name: str) -> torch.Tensor | None:
            tensor = model.tensor(name)
            return None if tensor is None else tensor.detach().to(self.device, self.dtype)

        def need(name: str) -> torch.Tensor:
            tensor = get(name)
            if tensor is None:
                raise ModelError(
                    f"the model {model.name} does not load: {name} is missing",
                    "the checkpoint and its config.json disagree; copy it again if it is damaged",
                )
            return tensor

        self.device, self.dtype = model.device, getattr(torch, model.dtype)
        self.layers = int(config.num_hidden_layers)
        self.heads = int(config.num_attention_heads)
        self.kv_heads = int(getattr(config, "num_key_value_heads", None) or self.heads)
        self.head = int(getattr(config, "head_dim", None) or config.hidden_size // self.heads)
        self.epsilon = float(config.rms_norm_eps)
        per_layer = windows(model)
        self.window = max(per_layer)
        self._windowed = [size > 0 for size in per_layer]
        self._config = config
        self._blocks = [_block(f"model.layers.{layer}.", get, need) for layer in range(self.layers)]
        self._embedding = need("model.embed_tokens.weight")
        self._norm = need("model.norm.weight")
        self._lm_head = self._embedding if config.tie_word_embeddings else need("lm_head.weight")

    def rotary(self, room: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotary factors [room, head] of the first positions."""
        cosine, sine = rotary_table(self._config, room)
        return torch.from_numpy(cosine).to(self.device), torch.from_numpy(sine).to(self.device)

    @torch.inference_mode()
    def run(
        self,
        inputs: _Inputs,
        rotary: tuple[torch.Tensor, torch.Tensor],
        pool: Sequence[torch.Tensor],
        layers: _Layers,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Logits [k, vocabulary] and final states [k, hidden] of the wanted rows; writes keys and values into the pool.

        Third, the residual stream [m, hidden] behind the captured layer.

        Args:
            rotary: factors [room, head] of each position.
            pool: each layer's keys, then its values, [key-value heads, rows, head].
        """
        captured: torch.Tensor | None = None
        rows, shared = len(inputs.ids), self.heads // self.kv_heads
        sizes = [count * self.head for count in (self.heads, self.kv_heads, self.kv_heads)]
        cosine, sine = (one[inputs.positions][:, None] for one in rotary)
        # Query rows that share keys stand together, so that the mask is repeated, not the keys.
        hidden = [group.hidden.repeat_interleave(shared, 2) for group in inputs.groups]
        x = functional.embedding(inputs.ids, self._embedding)
        for layer, block in enumerate(self._blocks):
            if layer in layers.skip:
                continue
            keys, values = pool[2 * layer : 2 * layer + 2]
            projected = functional.linear(self._normed(x, block.norm_in), block.qkv, block.qkv_bias)
            query, key, value = torch.split(projected, sizes, -1)
            query, key = query.view(rows, self.heads, self.head), key.view(rows, self.kv_heads, self.head)
            if block.norm_q is not None and block.norm_k is not None:
                query, key = self._normed(query, block.norm_q), self._normed(key, block.norm_k)
            query, key = _rotated(query, cosine, sine), _rotated(key, cosine, sine)
            keys.index_copy_(1, inputs.writes, key.transpose(0, 1))
            values.index_copy_(1, inputs.writes, value.view(rows, self.kv_heads, self.head).transpose(0, 1))
            kind = 1 if self._windowed[layer] else 0
            cells = [
                self._attend(query, keys, values, group, unseen[kind])
                for group, unseen in zip(inputs.groups, hidden, strict=True)
            ]
            mixed = (cells[0] if len(cells) == 1 else torch.cat(cells)).index_select(0, inputs.collect)
            x = x + functional.linear(mixed, block.out, block.out_bias)
            gate, up = functional.linear(self._normed(x, block.norm_mlp), block.gate_up, block.gate_up_bias).chunk(
                2, -1
            )
            x = x + functional.linear(functional.silu(gate) * up, block.down, block.down_bias)
            if layer + 1 == layers.capture:
                captured = x
        states = self._normed(x.index_select(0, inputs.wanted), self._norm)
        return functional.linear(states, self._lm_head), states, captured

    def _attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, group: _Group, unseen: torch.Tensor
    ) -> torch.Tensor:
        """Attention's output [lines · n, heads · head].

        Args:
            query: [m, heads, head].
            keys, values: [key-value heads, rows of the pool, head].
            unseen: bool[lines, n · query heads that share a key, span].
        """
        lines, rows, span = unseen.shape
        shared = self.heads // self.kv_heads
        cells = rows // shared
        grouped = (
            query.index_select(0, group.spread)
            .view(lines, cells, self.kv_heads, shared, self.head)
            .permute(2, 0, 1, 3, 4)
            .reshape(self.kv_heads, lines, rows, self.head)
        )
        keys, values = (
            states.index_select(1, group.reads).view(self.kv_heads, lines, span, self.head) for states in (keys, values)
        )
        # Scaled first: in float16 the products themselves may be too large.
        scores = torch.matmul(grouped * self.head**-0.5, keys.transpose(2, 3)).float()
        scores.masked_fill_(unseen, float("-inf"))
        mixed = torch.matmul(scores.softmax(-1).to(self.dtype), values)
        return (
            mixed.view(self.kv_heads, lines, cells, shared, self.head)
            .permute(1, 2, 0, 3, 4)
            .reshape(lines * cells, self.heads * self.head)
        )

    @torch.inference_mode()
    def embed(self, tokens: NDArray[np.integer]) -> NDArray[np.float32]:
        """float32[m, d]: input embeddings of m token ids."""
        ids = torch.from_numpy(np.asarray(tokens, np.int64)).to(self.device)
        found: NDArray[np.float32] = functional.embedding(ids, self._embedding).float().cpu().numpy()
        return found

    def _normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.epsilon)).to(x.dtype)


class _Captured:
    """One size of pass over buffers of its own; on a GPU a CUDA graph."""

    def __init__(
        self,
        network: _Network,
        inputs: _Inputs,
        rotary: tuple[torch.Tensor, torch.Tensor],
        pool: Sequence[torch.Tensor],
        layers: _Layers,
        graph_pool: Any,
    ) -> None:
        self._inputs = inputs.clone()
        self._run = partial(network.run, self._inputs, rotary, pool, layers)
        self._device = network.device
        self._graph: torch.cuda.CUDAGraph | None = None
        if self._device.type != "cuda":
            return
        with torch.cuda.device(self._device):
            # Once or twice outside the graph: libraries allocate and choose kernels at their first calls.
            side = torch.cuda.Stream()  # type: ignore[no-untyped-call, unused-ignore]
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(2):
                    self._run()
            torch.cuda.current_stream().wait_stream(side)
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, pool=graph_pool):
                self._results = self._run()

    def replay(self, inputs: _Inputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        for buffer, tensor in zip(self._inputs.tensors(), inputs.tensors(), strict=True):
            buffer.copy_(tensor)
        if self._graph is None:
            return self._run()
        with torch.cuda.device(self._device):
            self._graph.replay()
        return self._results


_networks: WeakKeyDictionary[LanguageModel, _Network] = WeakKeyDictionary()
"""Weights are shared by all targets of a model."""


def _bucket(size: int) -> int:
    return next(bucket for bucket in _BUCKETS if bucket >= size)


def _rotated(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    low, high = x.chunk(2, -1)
    return x * cosine.to(x.dtype) + torch.cat([-high, low], -1) * sine.to(x.dtype)


def _block(at: str, get: Callable[[str], torch.Tensor | None], need: Callable[[str], torch.Tensor]) -> _Block:
    def joined(names: list[str]) -> torch.Tensor:
        return torch.cat([need(name) for name in names])

    def biases(names: list[str]) -> torch.Tensor | None:
        return None if get(f"{names[0]}.bias") is None else joined([f"{name}.bias" for name in names])

    projections = [f"{at}self_attn.{one}_proj" for one in "qkv"]
    gates = [f"{at}mlp.{one}_proj" for one in ("gate", "up")]
    return _Block(
        qkv=joined([f"{name}.weight" for name in projections]),
        qkv_bias=biases(projections),
        out=need(f"{at}self_attn.o_proj.weight"),
        out_bias=get(f"{at}self_attn.o_proj.bias"),
        gate_up=joined([f"{name}.weight" for name in gates]),
        gate_up_bias=biases(gates),
        down=need(f"{at}mlp.down_proj.weight"),
        down_bias=get(f"{at}mlp.down_proj.bias"),
        norm_in=need(f"{at}input_layernorm.weight"),
        norm_mlp=need(f"{at}post_attention_layernorm.weight"),
        norm_q=get(f"{at}self_attn.q_norm.weight"),
        norm_k=get(f"{at}self_attn.k_norm.weight"),
    )
