"""Models of the Llama kind: which they are, and their weights packed for the CPU runtime."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable, Collection
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from specds.decode.targets import layout
from specds.decode.targets.microkernel import LANES
from specds.model import LanguageModel

_KINDS = {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
# Rotary embeddings whose angles depend on nothing but the position.
_ROTARY = {"default", "linear", "llama3", "yarn"}


def unsupported(model: LanguageModel) -> str | None:
    """Why the CPU runtime cannot run a model; None if it can."""
    if model.device.type != "cpu":
        return f"it is on {model.device.type}"
    if model.dtype != "float32":
        return f"its weights are {model.dtype}"
    if reason := not_llama_like(model):
        return reason
    if getattr(model.config, "mlp_bias", False):
        return "its MLP has biases"
    if model.config.intermediate_size % LANES:
        return f"its intermediate size is not a multiple of {LANES}"
    return None


def not_llama_like(model: LanguageModel) -> str | None:
    """What sets a model apart from Llama; None if nothing does that the runtimes of this kind do not know."""
    config = model.config
    if model.architecture not in _KINDS or getattr(config, "auto_map", None):
        return f"it is a {model.architecture}"
    if getattr(config, "quantization_config", None):
        return "its weights are quantised"
    if config.hidden_act != "silu":
        return f"its activation is {config.hidden_act}"
    heads = config.num_attention_heads
    if heads % (getattr(config, "num_key_value_heads", None) or heads):
        return "its heads do not share keys evenly"
    kind = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if kind not in _ROTARY or (getattr(config, "rope_parameters", None) or {}).get("partial_rotary_factor", 1.0) != 1.0:
        return f"its rotary embedding is {kind}"
    return None


def without(model: layout.Model, skip: Collection[int]) -> layout.Model:
    """The same model with some layers left out, 0 the first; the others keep their places in the cache."""
    kept = [layer for layer in range(len(model.table)) if layer not in skip]
    shape = model.shape.copy()
    shape[layout.LAYERS] = len(kept)
    return model._replace(shape=shape, table=model.table[kept])


_packed: WeakKeyDictionary[LanguageModel, layout.Model] = WeakKeyDictionary()


def packed(model: LanguageModel) -> layout.Model:
    """A model's weights, packed when they are first asked for and shared by all its targets.

    Raises:
        ModelError: a tensor is missing, or of another shape than the configuration says.
    """
    if model not in _packed:
        _packed[model] = _pack(model)
    return _packed[model]


def _pack(model: LanguageModel) -> layout.Model:
    """A tensor at a time, so that no second copy is ever whole."""
    config = model.config
    hidden, layers, heads = config.hidden_size, config.num_hidden_layers, config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head = getattr(config, "head_dim", None) or hidden // heads
    inner, vocabulary = config.intermediate_size, config.vocab_size
    query, kv = heads * head, kv_heads * head
    plan = _Plan(model)
    table = np.full((layers, layout.FIELDS), -1, np.int64)
    window = windows(model)
    for layer in range(layers):
        at = f"model.layers.{layer}."
        row = table[layer]
        projections = [(f"{at}self_attn.{one}_proj", size) for one, size in (("q", query), ("k", kv), ("v", kv))]
        row[layout.QKV] = plan.matrix(
            [f"{name}.weight" for name, _ in projections], [size for _, size in projections], hidden
        )
        row[layout.QKV_BIAS] = plan.vector(
            [f"{name}.bias" for name, _ in projections], [size for _, size in projections]
        )
        row[layout.OUT] = plan.matrix([f"{at}self_attn.o_proj.weight"], [hidden], query)
        row[layout.OUT_BIAS] = plan.vector([f"{at}self_attn.o_proj.bias"], [hidden])
        row[layout.GATE_UP] = plan.paired(f"{at}mlp.gate_proj.weight", f"{at}mlp.up_proj.weight", inner, hidden)
        row[layout.DOWN] = plan.matrix([f"{at}mlp.down_proj.weight"], [hidden], inner)
        row[layout.NORM_IN] = plan.vector([f"{at}input_layernorm.weight"], [hidden], needed=True)
        row[layout.NORM_MLP] = plan.vector([f"{at}post_attention_layernorm.weight"], [hidden], needed=True)
        row[layout.NORM_Q] = plan.vector([f"{at}self_attn.q_norm.weight"], [head])
        row[layout.NORM_K] = plan.vector([f"{at}self_attn.k_norm.weight"], [head])
        row[layout.WINDOW] = window[layer]
        row[layout.CACHE] = layer
    shape = np.zeros(layout.SHAPE, np.int64)
    shape[
        [layout.HIDDEN, layout.LAYERS, layout.HEADS, layout.KV_HEADS, layout.HEAD, layout.INNER, layout.VOCABULARY]
    ] = (*(hidden, layers, heads, kv_heads, head, inner, vocabulary),)
    shape[layout.FINAL_NORM] = plan.vector(["model.norm.weight"], [hidden], needed=True)
    shape[layout.EMBEDDING] = plan.matrix(["model.embed_tokens.weight"], [vocabulary], hidden)
    shape[layout.HEAD_MATRIX] = (
        shape[layout.EMBEDDING] if config.tie_word_embeddings else plan.matrix(["lm_head.weight"], [vocabulary], hidden)
    )
    return layout.Model(plan.fill(), shape, table, float(config.rms_norm_eps))


def windows(model: LanguageModel) -> list[int]:
    """Each layer's sliding window; 0: it sees everything. As transformers' own code of each architecture has it."""
    config, layers = model.config, model.config.num_hidden_layers
    window = int(getattr(config, "sliding_window", None) or 0)
    if model.architecture == "MistralForCausalLM":
        return [window] * layers
    if model.architecture == "LlamaForCausalLM" or not getattr(config, "use_sliding_window", True):
        return [0] * layers
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * layers
    return [window if kind == "sliding_attention" else 0 for kind in kinds]


class _Plan:
    """Places in one flat array, given out first, then filled tensor by tensor."""

    def __init__(self, model: LanguageModel) -> None:
        self._name = model.name
        self._tensor = model.tensor
        self._length = 0
        self._jobs: list[Callable[[NDArray[np.float32]], None]] = []

    def matrix(self, names: list[str], sizes: list[int], depth: int) -> int:
        """Matrices [size, depth] one below the other, in panels."""
        at = self._place(_up(sum(sizes)) * depth)

        def fill(weights: NDArray[np.float32]) -> None:
            panels = weights[at : at + _up(sum(sizes)) * depth].reshape(-1, depth, LANES)
            row = 0
            for name, size in zip(names, sizes, strict=True):
                _scatter(panels, row, self._need(name, (size, depth)))
                row += size

        self._jobs.append(fill)
        return at

    def paired(self, gate: str, up: str, inner: int, depth: int) -> int:
        """A panel of one matrix, a panel of the other, and so on."""
        at = self._place(2 * inner * depth)

        def fill(weights: NDArray[np.float32]) -> None:
            panels = weights[at : at + 2 * inner * depth].reshape(-1, 2, depth, LANES)
            for side, name in enumerate((gate, up)):
                panels[:, side] = self._need(name, (inner, depth)).reshape(-1, LANES, depth).transpose(0, 2, 1)

        self._jobs.append(fill)
        return at

    def vector(self, names: list[str], sizes: list[int], needed: bool = False) -> int:
        """Vectors one behind the other; -1 if the model has none of them."""
        if not needed and all(self._tensor(name) is None for name in names):
            return -1
        at = self._place(_up(sum(sizes)))

        def fill(weights: NDArray[np.float32]) -> None:
            place = at
            for name, size in zip(names, sizes, strict=True):
                weights[place : place + size] = self._need(name, (size,))
                place += size

        self._jobs.append(fill)
        return at

    def fill(self) -> NDArray[np.float32]:
        weights = _pages(self._length)
        for job in self._jobs:
            job(weights)
        return weights

    def _place(self, length: int) -> int:
        at = self._length
        self._length += _up(length)
        return at

    def _need(self, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
        from specds.errors import ModelError

        tensor = self._tensor(name)
        if tensor is None or tuple(tensor.shape) != shape:
            found = "is missing" if tensor is None else f"has shape {tuple(tensor.shape)}"
            raise ModelError(
                f"the model {self._name} does not load: {name} {found}, should have shape {shape}",
                "the checkpoint and its config.json disagree; copy it again if it is damaged",
            )
        if not tensor.is_floating_point() or tensor.element_size() < 2:
            raise ModelError(
                f"the model {self._name} does not load: {name} is {tensor.dtype}, which is quantised",
                "use --runtime generic",
            )
        array: NDArray[np.float32] = tensor.detach().float().cpu().numpy()
        return array


def _scatter(panels: NDArray[np.float32], row: int, matrix: NDArray[np.float32]) -> None:
    """Put a matrix's rows into panels from output `row` on."""
    while len(matrix):
        panel, lane = divmod(row, LANES)
        if lane == 0 and len(matrix) >= LANES:
            whole = len(matrix) // LANES
            part = matrix[: whole * LANES].reshape(whole, LANES, -1)
            panels[panel : panel + whole] = part.transpose(0, 2, 1)
            count = whole * LANES
        else:
            count = min(LANES - lane, len(matrix))
            panels[panel, :, lane : lane + count] = matrix[:count].T
        matrix, row = matrix[count:], row + count


def _pages(length: int) -> NDArray[np.float32]:
    """Zeros on large pages where the system has them: a pass reads all of it, and small pages cost it dear."""
    buffer = mmap.mmap(-1, max(1, length) * 4, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError, AttributeError):
        buffer.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(buffer, np.float32, length)


def _up(count: int) -> int:
    return (count + LANES - 1) // LANES * LANES


def rotary_table(config: Any, length: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Cosines and sines [length, head] of the first positions, by transformers' own definition."""
    import torch
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    with torch.inference_mode():
        cosine, sine = LlamaRotaryEmbedding(config)(torch.empty(0), torch.arange(length)[None])
    return cosine[0].numpy(), sine[0].numpy()
