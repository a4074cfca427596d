"""The target: a Hugging Face causal language model that verifies a tree of tokens in one pass."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from specds.decode.contracts import Activations, Captures, Forward
from specds.decode.draft import Draft, tree
from specds.decode.targets.cache import TreeCache
from specds.decode.targets.held import Held
from specds.errors import UnsupportedModel, first_line
from specds.model import LanguageModel

_ATTENTION = {"full_attention", "sliding_attention"}
_PROBE = (np.array([3, 5, 4, 2, 6], np.int32), np.array([-1, -1, 0, 1, 3], np.int32))
_PROBE_WINDOW = 3
# Tokens of a prompt in one pass: what bounds the memory of a long one.
_CHUNK = 512

# Families whose trees the tests compare with plain decoding; any other is checked when a target is made.
TESTED = {
    f"{family}ForCausalLM"
    for family in ("Llama", "Qwen2", "Qwen3", "Mistral", "Gemma", "Gemma2", "Gemma3", "Phi", "Phi3", "GPTNeoX")
}
_WINDOWED = {f"{family}ForCausalLM" for family in ("Mistral", "Qwen2", "Qwen3", "Gemma2", "Gemma3", "Phi3")}
# Windows by other names are built into a model's own masks, which cannot be put off for a probe.
_OTHER_WINDOWS = ("window_size", "attention_window", "attention_chunk_size", "local_attention")


class HuggingFaceTarget:
    """Any decoder that `AutoModelForCausalLM` loads, with rotary, absolute or relative-by-position attention.

    The tree is verified through the model's own forward pass with a 4-D additive mask and explicit position
    ids: node i sees the committed text, the nodes above it, and itself; its position is that of the last
    committed token plus its depth. Sliding windows are honoured in the mask, by position.

    Raises:
        UnsupportedModel: the model has layers that are not attention over a cache, or takes no position ids,
            or a pass over a small tree does not give what separate passes over its branches give.
    """

    def __init__(self, model: LanguageModel, captures: Captures | None = None) -> None:
        self._network = model.network
        self._decoder = model.decoder
        self._config = model.network.config.get_text_config()
        self._device = model.network.device
        self._captures = captures or Captures()
        self._captured: dict[str, torch.Tensor] = {}
        _refuse_unsupported(model)
        self._tapped = _layer(model, self._captures.layer) if self._captures.layer else None
        # Models that mix kinds of attention take one mask a kind, under the kind's name.
        self._masks_by_kind = "causal_mask_mapping" in _local_names(model.decoder)
        self._window = _window(model)
        self._cache = TreeCache(self._config.num_hidden_layers)
        self._vocabulary = int(self._config.vocab_size)
        self._held = Held(self._captures, int(self._config.hidden_size), self._vocabulary)

    def prefill(self, tokens: Sequence[int]) -> Forward:
        """The prompt's passes (at least one token), a chunk at a time; logits and hidden state of its last token."""
        start, most = self._held.begin(tokens), self._held.chunk(_CHUNK)
        self._cache.keep(start, [])
        while start < len(tokens):
            chunk = list(tokens[start : start + most])
            positions = torch.arange(start, start + len(chunk), device=self._device)
            result, states = self._run(chunk, positions, mask=None, rows=len(chunk) if self._captures.top else 1)
            self._held.extend(chunk, result.logits, states)
            start += len(chunk)
        hidden = None if result.hidden is None else result.hidden[-1:]
        return Forward(result.logits[-1:], hidden)

    def forward(self, last: int, draft: Draft) -> Forward:
        """One pass over the last committed token and n draft nodes: n + 1 rows of logits.

        Raises:
            CorruptStore: a drafted token is none of the model's.
        """
        draft.check_tokens(self._vocabulary)
        start = len(self._held)
        self._cache.keep(start, [])  # a draft that was not committed is forgotten
        depths = np.concatenate([[0], draft.depths()])
        positions = torch.from_numpy(depths + start).to(self._device)
        mask = self._mask(draft, depths, start) if len(draft) else None
        result, states = self._run(self._held.stage(last, draft), positions, mask, rows=len(draft) + 1)
        self._held.record(result.logits, states)
        return result

    def commit(self, path: Sequence[int]) -> None:
        """Cut the cache back to the committed text: the last token and the accepted path."""
        start = len(self._held)
        self._cache.keep(start, self._held.commit(path))

    def layer_skip(self, token: int, ahead: int, skip: frozenset[int]) -> torch.Tensor:
        """See `Target.layer_skip`. Layers keep the numbers that their cache entries go by."""
        start = len(self._held) + ahead
        self._cache.keep(start, [])
        whole = self._decoder.layers
        positions = torch.full((1,), start, device=self._device)
        try:
            self._decoder.layers = torch.nn.ModuleList(one for layer, one in enumerate(whole) if layer not in skip)
            return self._run([token], positions, mask=None, rows=1)[0].logits[0]
        finally:
            self._decoder.layers = whole

    def activations(self) -> Activations:
        """What the captures keep of all that was prefilled and committed."""
        return self._held.activations

    @torch.inference_mode()
    def embed(self, tokens: NDArray[np.integer]) -> NDArray[np.float32]:
        """float32[m, d]: input embeddings of m token ids, as the model's own module gives them."""
        ids = torch.from_numpy(np.asarray(tokens, np.int64)).to(self._device)
        found: NDArray[np.float32] = self._network.get_input_embeddings()(ids).float().cpu().numpy()
        return found

    @torch.inference_mode()
    def _run(
        self, tokens: list[int], positions: torch.Tensor, mask: Any, rows: int
    ) -> tuple[Forward, NDArray[np.float32] | None]:
        hooks = [self._decoder.register_forward_hook(self._capture("hidden"))] if self._captures.hidden else []
        if self._tapped is not None:
            hooks.append(self._tapped.register_forward_hook(self._capture("layer")))
        try:
            output = self._network(
                input_ids=torch.tensor([tokens], device=self._device),
                position_ids=positions[None],
                attention_mask=mask,
                past_key_values=self._cache,
                use_cache=True,
                logits_to_keep=rows,
            )
        finally:
            for hook in hooks:
                hook.remove()
        logits = output.logits[0, -rows:]
        hidden, layer = self._captured.pop("hidden", None), self._captured.pop("layer", None)
        result = Forward(logits, None if hidden is None else hidden[0, -rows:])
        return result, None if layer is None else layer[0].float().cpu().numpy()

    def _capture(self, name: str) -> Callable[[Any, Any, Any], None]:
        def keep(module: Any, arguments: Any, output: Any) -> None:
            if isinstance(output, tuple):
                output = output[0]
            self._captured[name] = output if isinstance(output, torch.Tensor) else output.last_hidden_state

        return keep

    def _mask(self, draft: Draft, depths: NDArray[np.int64], start: int) -> Any:
        """Additive masks float[1, 1, n + 1, start + n + 1]: 0 where a row may look, the lowest number elsewhere."""
        rows = len(draft) + 1
        seen = np.zeros((rows, start + rows), dtype=np.bool_)
        seen[:, : start + 1] = True
        seen[1:, start + 1 :] = draft.ancestors()
        full: torch.Tensor | None
        if self._window is None:
            full = sliding = self._additive(seen)
        else:
            at = np.concatenate([np.arange(start), start + depths])
            near = at[None, :] > (at[start:] - self._window)[:, None]
            full = self._additive(seen) if self._masks_by_kind else None
            sliding = self._additive(seen & near)
        if self._masks_by_kind:
            return {"full_attention": full, "sliding_attention": sliding}
        return sliding

    def _additive(self, seen: NDArray[np.bool_]) -> torch.Tensor:
        dtype = self._network.dtype
        mask = np.where(seen, np.float32(0), np.float32(torch.finfo(dtype).min))
        return torch.from_numpy(mask).to(self._device, dtype)[None, None]


def check_tree_attention(model: LanguageModel, *, tolerance: float = 1e-2) -> None:
    """Compare one pass over a small tree with separate passes over its branches.

    Run for model families that the tests do not cover, because a model that ignores the mask or the position
    ids gives wrong text without any error. A sliding window is shrunk meanwhile, so that the small tree
    reaches beyond it.

    Raises:
        UnsupportedModel: the logits differ by more than `tolerance` of their spread.
    """
    config = model.network.config.get_text_config()
    window = _window(model)
    try:
        if window is not None:
            config.sliding_window = _PROBE_WINDOW
        _compare_with_branches(model, tolerance)
    finally:
        if window is not None:
            config.sliding_window = window


def _compare_with_branches(model: LanguageModel, tolerance: float) -> None:
    target = HuggingFaceTarget(model)
    prompt = [token % model.config.vocab_size for token in (7, 11, 2, 9, 8, 5)]
    tokens, parents = _PROBE
    draft = tree(tokens, parents, np.ones(len(tokens)), float(len(tokens)))
    try:
        target.prefill(prompt[:-1])
        together = target.forward(prompt[-1], draft).logits.float()
    except (RuntimeError, ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        reason = first_line(error)
        raise UnsupportedModel(f"{model.name} cannot verify a tree of tokens: {reason}") from error
    seen = draft.ancestors()
    for node in range(len(draft)):
        branch = [int(token) for token in tokens[seen[node]]]
        alone = HuggingFaceTarget(model).prefill([*prompt, *branch]).logits[0].float()
        spread = float(alone.max() - alone.min())
        if float((together[node + 1] - alone).abs().max()) > tolerance * max(spread, 1e-3):
            raise UnsupportedModel(
                f"{model.name} ({type(model.network).__name__}) gives other logits for a tree than for its branches",
                "its attention ignores the mask or the position ids; specds cannot decode with it",
            )


def _layer(model: LanguageModel, number: int) -> Any:
    """A layer's own module; 1 is the first.

    Raises:
        UnsupportedModel: the decoder does not keep its layers in a list called `layers`.
    """
    layers = getattr(model.decoder, "layers", None)
    if not isinstance(layers, torch.nn.ModuleList) or number > len(layers):
        raise UnsupportedModel(
            f"{model.name} ({type(model.network).__name__}) does not show its layers",
            "adapld and pld-plus look at one; choose another drafter",
        )
    return layers[number - 1]


def _local_names(module: Any) -> frozenset[str]:
    """Parameters and local variables of a module's own forward, under transformers' decorators."""
    return frozenset(inspect.unwrap(type(module).forward).__code__.co_varnames)


def _window(model: LanguageModel) -> int | None:
    config = model.config
    window = getattr(config, "sliding_window", None)
    if not window or getattr(config, "use_sliding_window", True) is False:
        return None
    if model.architecture in TESTED - _WINDOWED:
        return None  # its own code does not look at it
    kinds = getattr(config, "layer_types", None)
    return int(window) if kinds is None or "sliding_attention" in kinds else None


def _refuse_unsupported(model: LanguageModel) -> None:
    config = model.network.config
    kinds = set(getattr(config.get_text_config(), "layer_types", None) or ())
    reason = None
    if getattr(config, "is_encoder_decoder", False):
        reason = "it is an encoder-decoder"
    elif kinds - _ATTENTION:
        reason = f"it has layers of kind {', '.join(sorted(kinds - _ATTENTION))}"
    elif getattr(model.network, "_is_stateful", False):
        reason = "it keeps a recurrent state, which cannot be cut back to an accepted path"
    elif windows := [name for name in _OTHER_WINDOWS if getattr(config.get_text_config(), name, None)]:
        reason = f"its attention is limited by {windows[0]}"
    elif "position_ids" not in _local_names(model.decoder):
        reason = "it takes no position ids"
    if reason:
        raise UnsupportedModel(
            f"{model.name} ({type(model.network).__name__}) cannot verify a tree of tokens: {reason}",
            "specds decodes with attention-only decoders: Llama, Qwen, Mistral, Gemma, Phi, GPT-NeoX and their like",
        )
