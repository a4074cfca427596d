"""The GPU runtime: Llama-like models with fused projections, static buffers, and one CUDA graph for a size of pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from specds.decode.contracts import Activations, Captures, Forward
from specds.decode.draft import Draft
from specds.decode.targets.held import Held
from specds.decode.targets.llama import not_llama_like, rotary_table, windows
from specds.errors import ModelError, UnsupportedModel
from specds.model import LanguageModel

# Rows of a pass are rounded up to one of these, the cache that it sees to a multiple of _SPAN: a graph for each pair.
_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128)
_SPAN = 512
_CHUNK = 512


class CudaTarget:
    """A Llama, Mistral, Qwen2 or Qwen3 on a GPU, in any dtype.

    On another device it does the same without graphs: slow, and good for tests.

    Raises:
        UnsupportedModel: another architecture.
        ModelError: a tensor of the checkpoint is missing.
    """

    def __init__(self, model: LanguageModel, captures: Captures | None = None, *, graphs: bool | None = None) -> None:
        if reason := not_llama_like(model):
            raise UnsupportedModel(f"the cuda runtime cannot run {model.name}: {reason}", "use --runtime generic")
        self._captures = captures or Captures()
        if model not in _networks:
            _networks[model] = _Network(model)
        self._net = _networks[model]
        self._device = model.device
        self._vocabulary = int(model.config.vocab_size)
        self._context_length = model.context_length
        self._graphs: dict[tuple[int, int, frozenset[int]], _Captured] | None = None
        if graphs if graphs is not None else self._device.type == "cuda":
            self._graphs = {}
        # Results are valid until the next pass, so that all graphs can share one pool.
        self._pool = torch.cuda.graph_pool_handle() if self._graphs is not None else None
        self._room = 0
        self._keys = self._values = torch.empty(0)
        self._held = Held(self._captures, int(model.config.hidden_size), self._vocabulary)
        self._reserve(_SPAN)

    def prefill(self, tokens: Sequence[int]) -> Forward:
        """The prompt's passes, a chunk at a time; logits and hidden state of its last token."""
        start, most = self._held.begin(tokens), self._held.chunk(_CHUNK)
        while start < len(tokens):
            chunk = list(tokens[start : start + most])
            rows = len(chunk)
            self._reserve(start + rows)
            seen = np.tri(rows, dtype=np.bool_)
            asked = rows if self._captures.top else 1
            result, states = self._run(chunk, np.arange(rows), seen, start, rows, start + rows, asked)
            self._held.extend(chunk, result.logits, states)
            start += rows
        hidden = None if result.hidden is None else result.hidden[-1:]
        return Forward(result.logits[-1:], hidden)

    def forward(self, last: int, draft: Draft) -> Forward:
        """One pass over the last committed token and n draft nodes: n + 1 rows of logits, valid until the next pass."""
        draft.check_tokens(self._vocabulary)
        pending = self._held.stage(last, draft)
        rows, start = len(pending), len(self._held)
        seen = np.eye(rows, dtype=np.bool_)
        seen[:, 0] = True
        seen[1:, 1:] = draft.ancestors()
        depths = np.concatenate([[0], draft.depths()])
        padded = next((bucket for bucket in _BUCKETS if bucket >= rows), rows)
        self._reserve(start + padded)
        span = min(self._room, -(-(start + padded) // _SPAN) * _SPAN)
        result, states = self._run(pending, depths, seen, start, padded, span, asked=padded)
        self._held.record(result.logits, states)
        return result

    def commit(self, path: Sequence[int]) -> None:
        """Cut the cache back to the committed text: the last token and the accepted path."""
        start = len(self._held)
        rows = self._held.commit(path)
        if rows != list(range(len(rows))):
            source = torch.tensor([start + row for row in rows], device=self._device)
            for cache in (self._keys, self._values):
                cache[:, :, start : start + len(rows)] = cache[:, :, source]

    def layer_skip(self, token: int, ahead: int, skip: frozenset[int]) -> torch.Tensor:
        """See `Target.layer_skip`."""
        start = len(self._held) + ahead
        self._reserve(start + 1)
        span = min(self._room, -(-(start + 1) // _SPAN) * _SPAN)
        alone = np.zeros(1, np.int64), np.ones((1, 1), np.bool_)
        return self._run([token], *alone, start, 1, span, asked=1, skip=skip)[0].logits[0]

    def activations(self) -> Activations:
        """What the captures keep of all that was prefilled and committed."""
        return self._held.activations

    def embed(self, tokens: NDArray[np.integer]) -> NDArray[np.float32]:
        """float32[m, d]: input embeddings of m token ids."""
        return self._net.embed(tokens)

    def _run(
        self,
        tokens: list[int],
        depths: NDArray[Any],
        seen: NDArray[np.bool_],
        start: int,
        rows: int,
        span: int,
        asked: int,
        skip: frozenset[int] = frozenset(),
    ) -> tuple[Forward, NDArray[np.float32] | None]:
        inputs = self._inputs(tokens, depths, seen, start, rows, span)
        caches = self._rotary, self._keys, self._values
        layers = _Layers(0 if skip else self._captures.layer, skip)
        if self._graphs is None or asked != rows or rows not in _BUCKETS or span % _SPAN:
            logits, states, captured = self._net.run(inputs, *caches, asked, layers)
        else:
            key = (rows, span, skip)
            if key not in self._graphs:
                self._graphs[key] = _Captured(self._net, inputs, *caches, layers, self._pool)
            logits, states, captured = self._graphs[key].replay(inputs)
        used = len(tokens)
        logits, states = logits[: min(asked, used)], states[: min(asked, used)]
        result = Forward(logits, states if self._captures.hidden else None)
        return result, None if captured is None else captured[:used].float().cpu().numpy()

    def _inputs(
        self, tokens: list[int], depths: NDArray[Any], seen: NDArray[np.bool_], start: int, rows: int, span: int
    ) -> dict[str, torch.Tensor]:
        """What a pass of `rows` rows over the first `span` entries of the cache reads; rows that nobody asked for are
        padding, which sees itself only and is written behind the others.
        """
        used = len(tokens)
        ids = np.zeros(rows, np.int64)
        ids[:used] = tokens
        positions = np.full(rows, start, np.int64)
        positions[:used] = start + depths
        window = self._net.window
        masks = np.zeros((2 if window else 1, rows, span), np.bool_)
        masks[:, :, :start] = True
        masks[:, :used, start : start + used] = seen
        masks[:, :used, start + used :] = False
        for row in range(used, rows):
            masks[:, row, :] = False
            masks[:, row, start + row] = True
        if window:
            at = np.full(span, -1, np.int64)
            at[:start] = np.arange(start)
            at[start : start + rows] = positions
            masks[1, :used] &= at[None] > (positions[:used] - window)[:, None]
        return {
            "ids": torch.from_numpy(ids).to(self._device),
            "positions": torch.from_numpy(positions).to(self._device),
            "slots": torch.arange(start, start + rows, device=self._device),
            "masks": torch.from_numpy(masks).to(self._device),
        }

    def _reserve(self, length: int) -> None:
        """Room for so many positions; what was captured over smaller buffers is forgotten with them."""
        if length <= self._room:
            return
        room = -(-max(length, min(2 * self._room, self._context_length + _BUCKETS[-1])) // _SPAN) * _SPAN
        keys, values = self._net.caches(room)
        if self._room:
            keys[:, :, : self._room], values[:, :, : self._room] = self._keys, self._values
        self._keys, self._values, self._room = keys, values, room
        self._rotary = self._net.rotary(room)
        if self._graphs is not None:
            self._graphs = {}


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

    def caches(self, room: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values, [layers, key-value heads, room, head], zeroed: what is masked must still be a number."""
        shape = (self.layers, self.kv_heads, room, self.head)
        return tuple(torch.zeros(shape, dtype=self.dtype, device=self.device) for _ in range(2))  # type: ignore[return-value]

    def rotary(self, room: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotary factors [room, head] of the first positions."""
        cosine, sine = rotary_table(self._config, room)
        return torch.from_numpy(cosine).to(self.device), torch.from_numpy(sine).to(self.device)

    @torch.inference_mode()
    def run(
        self,
        inputs: dict[str, torch.Tensor],
        rotary: tuple[torch.Tensor, torch.Tensor],
        keys: torch.Tensor,
        values: torch.Tensor,
        asked: int,
        layers: _Layers,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Logits [asked, vocabulary] and final states [asked, hidden] of the last rows; writes the caches.

        Third, the residual stream [rows, hidden] behind the captured layer.
        """
        captured: torch.Tensor | None = None
        rows, span = inputs["masks"].shape[1:]
        shared = self.heads // self.kv_heads
        sizes = [count * self.head for count in (self.heads, self.kv_heads, self.kv_heads)]
        cosine, sine = (one[inputs["positions"]][:, None] for one in rotary)
        # Query rows that share keys stand together, so that the mask is repeated, not the keys.
        hidden_from = [~mask.repeat_interleave(shared, 0)[None] for mask in inputs["masks"]]
        x = functional.embedding(inputs["ids"], self._embedding)
        for layer, block in enumerate(self._blocks):
            if layer in layers.skip:
                continue
            projected = functional.linear(self._normed(x, block.norm_in), block.qkv, block.qkv_bias)
            query, key, value = torch.split(projected, sizes, -1)
            query, key = query.view(rows, self.heads, self.head), key.view(rows, self.kv_heads, self.head)
            if block.norm_q is not None and block.norm_k is not None:
                query, key = self._normed(query, block.norm_q), self._normed(key, block.norm_k)
            query, key = _rotated(query, cosine, sine), _rotated(key, cosine, sine)
            keys[layer].index_copy_(1, inputs["slots"], key.transpose(0, 1))
            values[layer].index_copy_(1, inputs["slots"], value.view(rows, self.kv_heads, self.head).transpose(0, 1))
            grouped = (
                query.view(rows, self.kv_heads, shared, self.head)
                .permute(1, 0, 2, 3)
                .reshape(self.kv_heads, rows * shared, self.head)
            )
            # Scaled first: in float16 the products themselves may be too large.
            scores = torch.matmul(grouped * self.head**-0.5, keys[layer, :, :span].transpose(1, 2)).float()
            scores.masked_fill_(hidden_from[1 if self._windowed[layer] else 0], float("-inf"))
            mixed = torch.matmul(scores.softmax(-1).to(self.dtype), values[layer, :, :span])
            mixed = mixed.view(self.kv_heads, rows, shared, self.head).permute(1, 0, 2, 3).reshape(rows, -1)
            x = x + functional.linear(mixed, block.out, block.out_bias)
            gate, up = functional.linear(self._normed(x, block.norm_mlp), block.gate_up, block.gate_up_bias).chunk(
                2, -1
            )
            x = x + functional.linear(functional.silu(gate) * up, block.down, block.down_bias)
            if layer + 1 == layers.capture:
                captured = x
        states = self._normed(x[-asked:], self._norm)
        return functional.linear(states, self._lm_head), states, captured

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
    """One size of pass as a CUDA graph over buffers of its own."""

    def __init__(
        self,
        network: _Network,
        inputs: dict[str, torch.Tensor],
        rotary: tuple[torch.Tensor, torch.Tensor],
        keys: torch.Tensor,
        values: torch.Tensor,
        layers: _Layers,
        pool: Any,
    ) -> None:
        self._inputs = {name: tensor.clone() for name, tensor in inputs.items()}
        self._device = network.device
        rows = len(inputs["ids"])
        arguments = (self._inputs, rotary, keys, values, rows, layers)
        with torch.cuda.device(self._device):
            # Once or twice outside the graph: libraries allocate and choose kernels at their first calls.
            side = torch.cuda.Stream()  # type: ignore[no-untyped-call, unused-ignore]
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(2):
                    network.run(*arguments)
            torch.cuda.current_stream().wait_stream(side)
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, pool=pool):
                self._results = network.run(*arguments)

    def replay(self, inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        with torch.cuda.device(self._device):
            for name, tensor in inputs.items():
                self._inputs[name].copy_(tensor)
            self._graph.replay()
        return self._results


_networks: WeakKeyDictionary[LanguageModel, _Network] = WeakKeyDictionary()
"""Weights are shared by all targets of a model."""


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
