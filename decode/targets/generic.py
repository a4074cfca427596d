"""The generic runtime: a Hugging Face causal language model that takes items of many requests in one pass."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray

from specds.decode.contracts import Activations, Captures, Forward, Item
from specds.decode.draft import check_tokens
from specds.decode.targets.batches import Pass, calls_of, side_by_side
from specds.decode.targets.cache import Call, Rows, SlotCache, buffers
from specds.decode.targets.held import Held, most_wanted
from specds.decode.targets.memory import memory_for, pages_within
from specds.decode.targets.pages import PAGE, PagedSlot, Pages
from specds.decode.targets.pool import Buffer, Pool
from specds.errors import UnsupportedModel, first_line
from specds.model import LanguageModel

_ATTENTION = {"full_attention", "sliding_attention"}
_PROBE = (np.array([3, 5, 4, 2, 6], np.int32), np.array([-1, -1, 0, 1, 3], np.int32))
_PROBE_WINDOW = 3
_PROMPTS = (7, 11, 2, 9, 8, 5), (3, 8, 4)
# Tokens of a prompt in one pass: what bounds the memory of a long one.
_CHUNK = 512
# So many rows of an item are bound by arithmetic: others beside them would save nothing, and be padded.
_ALONE = 64
# Rows whose arithmetic takes as long as reading the weights, about.
_ROWS = 32
# How often a batch touches what it looks at: it is gathered, spread over query heads, and read.
_PASSES_OF_CONTEXT = 4

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

    Items go through the model's own forward pass, those of about one size side by side, with a 4-D additive mask and
    explicit position ids: a row sees what its slot holds, the rows above it in its tree, and itself; its position is
    that of the first new token plus its depth. Sliding windows are honoured in the mask, by position.

    Args:
        memory: bytes of the key-value cache, at most; None: half of what is free.

    Raises:
        UnsupportedModel: the model has layers that are not attention over a cache, or takes no position ids.
    """

    def __init__(self, model: LanguageModel, captures: Captures | None = None, *, memory: int | None = None) -> None:
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
        self._vocabulary = int(self._config.vocab_size)
        self.chunk = most_wanted(_CHUNK, self._vocabulary, self._captures)
        if model not in _buffers:
            _buffers[model] = buffers(self._network)
        token = sum(buffer.size for buffer in _buffers[model])
        if not token:
            raise UnsupportedModel(f"{model.name} ({type(model.network).__name__}) keeps no keys and values")
        count = pages_within(memory_for(memory, self._device), token * PAGE)
        self._pool = Pool(_buffers[model], count)
        self._pages = Pages(count, self._copy)
        self.capacity = count * PAGE
        self._cache = SlotCache(self._config.num_hidden_layers, self._pool)
        self._held = Held(self._captures, int(self._config.hidden_size))
        weights = sum(parameter.nbytes for parameter in self._network.parameters())
        self._position_price = _PASSES_OF_CONTEXT * token / weights

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
        """See `Target.layer_skip`. Layers keep the numbers that their cache entries go by."""
        whole = self._decoder.layers
        try:
            self._decoder.layers = torch.nn.ModuleList(one for layer, one in enumerate(whole) if layer not in skip)
            return self._run([Item.chain(slot, [token])], [len(slot) + ahead])[0].logits[0]
        finally:
            self._decoder.layers = whole

    def activations(self, slot: PagedSlot, start: int = 0) -> Activations:
        """See `Target.activations`."""
        return self._held.activations(slot, start)

    @torch.inference_mode()
    def embed(self, tokens: NDArray[np.integer]) -> NDArray[np.float32]:
        """float32[m, d]: input embeddings of m token ids, as the model's own module gives them."""
        ids = torch.from_numpy(np.asarray(tokens, np.int64)).to(self._device)
        found: NDArray[np.float32] = self._network.get_input_embeddings()(ids).float().cpu().numpy()
        return found

    @torch.inference_mode()
    def _run(self, items: Sequence[Item], starts: Sequence[int]) -> tuple[Forward, NDArray[np.float32] | None]:
        """The pass, in as many calls of the network as it takes; captured states of all its tokens."""
        items = self._held.wanted(items)
        work = Pass.of(items, starts)
        check_tokens(work.tokens, self._vocabulary)
        for slot, end in zip(work.slots, work.ends.tolist(), strict=True):
            self._pages.reserve(slot, end)
        self._pool.reserve(self._pages.used)
        self._pool.settle()
        states = np.empty((len(work.tokens), self._config.hidden_size), np.float32) if self._captures.layer else None
        logits, hidden = _Wanted(items), _Wanted(items)
        for numbers in calls_of(work, alone=_ALONE, row_price=1 / _ROWS, position_price=self._position_price):
            most = max(1, *(items[number].wanted for number in numbers))
            output = self._call(work, numbers, most, states)
            logits.take(numbers, output)
            if (captured := self._captured.pop("hidden", None)) is not None:
                hidden.take(numbers, captured[:, -most:])
        ends = [0, *np.cumsum([item.wanted for item in items]).tolist()]
        return Forward(logits.rows(), hidden.rows() if self._captures.hidden else None, ends), states

    def _call(self, work: Pass, numbers: list[int], most: int, states: NDArray[np.float32] | None) -> torch.Tensor:
        """Logits [lines, most, vocabulary] of the last rows of some items.

        Args:
            states: float32[m, hidden], of the pass; those of the items' rows are put there.
        """
        chain = len(numbers) == 1 and work.items[numbers[0]].parents is None
        tokens, positions, mask, self._cache.call = (
            self._alone(work, numbers[0]) if chain else self._beside(work, numbers)
        )
        hooks = [self._decoder.register_forward_hook(self._capture("hidden"))] if self._captures.hidden else []
        if self._tapped is not None:
            hooks.append(self._tapped.register_forward_hook(self._capture("layer")))
        try:
            output = self._network(
                input_ids=torch.from_numpy(tokens).to(self._device),
                position_ids=torch.from_numpy(positions).to(self._device),
                attention_mask=mask,
                past_key_values=self._cache,
                use_cache=True,
                logits_to_keep=most if self._captures.logits else 1,
            )
        finally:
            for hook in hooks:
                hook.remove()
        if (layer := self._captured.pop("layer", None)) is not None and states is not None:
            for line, number in enumerate(numbers):
                begin, end = work.first[number], work.first[number + 1]
                states[begin:end] = layer[line, begin - end :].float().cpu().numpy()
        logits: torch.Tensor = output.logits[:, -most:]
        return logits

    def _alone(self, work: Pass, number: int) -> tuple[NDArray[np.int64], NDArray[np.int64], None, Call]:
        """A chain by itself: the model knows which of its rows see which."""
        start, end = int(work.starts[number]), int(work.ends[number])
        reads = self._rows(work.slots[number].places(0, end))
        writes = self._rows(work.slots[number].places(start, end))
        tokens = work.tokens[work.first[number] : work.first[number + 1]]
        return tokens[None], np.arange(start, end)[None], None, Call(writes, reads, 1, start)

    def _beside(self, work: Pass, numbers: list[int]) -> tuple[NDArray[np.int64], NDArray[np.int64], Any, Call]:
        """Items side by side, or a tree."""
        batch = side_by_side(work, numbers, self._pages.table, window=self._window or 0)
        lines, rows = batch.positions.shape
        tokens = np.zeros((lines, rows), np.int64)
        tokens.reshape(-1)[batch.cells] = work.tokens[batch.chosen]
        whole = len(batch.cells) == tokens.size
        span = batch.reads.shape[1]
        reads = self._rows(batch.reads.reshape(-1))
        cells = None if whole else torch.from_numpy(batch.cells).to(self._device)
        call = Call(self._rows(batch.writes), reads, lines, span - rows, cells)
        return tokens, batch.positions, self._masks(batch.seen), call

    def _rows(self, places: NDArray[np.int64]) -> Rows:
        """Rows of the pool as a slice, which costs no copy, where they are one."""
        if (np.diff(places) == 1).all():
            return slice(int(places[0]), int(places[-1]) + 1)
        return torch.from_numpy(places).to(self._device)

    def _masks(self, seen: NDArray[np.bool_]) -> Any:
        """Additive masks float[lines, 1, n, span] from bool[kinds, lines, n, span]: 0 where a cell may look."""
        sliding = self._additive(seen[-1])
        if not self._masks_by_kind:
            return sliding
        full = self._additive(seen[0]) if len(seen) > 1 else sliding
        return {"full_attention": full, "sliding_attention": sliding}

    def _additive(self, seen: NDArray[np.bool_]) -> torch.Tensor:
        dtype = self._network.dtype
        mask = torch.zeros(seen.shape, dtype=dtype, device=self._device)
        mask.masked_fill_(torch.from_numpy(~seen).to(self._device), torch.finfo(dtype).min)
        return mask[:, None]

    def _capture(self, name: str) -> Callable[[Any, Any, Any], None]:
        def keep(module: Any, arguments: Any, output: Any) -> None:
            if isinstance(output, tuple):
                output = output[0]
            self._captured[name] = output if isinstance(output, torch.Tensor) else output.last_hidden_state

        return keep

    def _copy(self, source: int, target: int, count: int) -> None:
        """The first tokens of a page into another."""
        self._held.copy(source, target, count)
        self._pool.copy(source, target, count)


class _Wanted:
    """The rows that are wanted of each item, gathered from calls that had them side by side."""

    def __init__(self, items: Sequence[Item]) -> None:
        self._wanted = [item.wanted for item in items]
        self._parts: list[torch.Tensor] = [torch.empty(0)] * len(items)
        self._whole: torch.Tensor | None = None

    def take(self, numbers: Sequence[int], output: torch.Tensor) -> None:
        """Of float[lines, n, d] the last rows of each line, which is that of an item."""
        if len(numbers) == len(self._wanted) and all(wanted == output.shape[1] for wanted in self._wanted):
            self._whole = output.flatten(0, 1)
            return
        for line, number in enumerate(numbers):
            self._parts[number] = output[line, output.shape[1] - self._wanted[number] :]

    def rows(self) -> torch.Tensor:
        """float[rows, d], item by item."""
        if self._whole is not None:
            return self._whole
        return self._parts[0] if len(self._parts) == 1 else torch.cat(self._parts)


_buffers: WeakKeyDictionary[LanguageModel, list[Buffer]] = WeakKeyDictionary()
"""What each model keeps of a token."""


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
    prompt, other = ([token % model.config.vocab_size for token in text] for text in _PROMPTS)
    tokens, parents = _PROBE
    branches = [[*prompt, *branch] for branch in _branches(tokens.tolist(), parents.tolist())]
    try:
        target = HuggingFaceTarget(model)
        slot, beside = _opened(target, prompt), _opened(target, other)
        target.forward([Item.chain(slot, prompt[:-1])])
        target.commit(slot, range(len(prompt) - 1))
        tree = Item(
            slot, np.array([prompt[-1], *tokens], np.int32), np.array([-1, *(parents + 1)], np.int32), len(tokens) + 1
        )
        # Beside the tree another request's prompt, shorter than it.
        both = target.forward([tree, Item.chain(beside, other)])
        together = [*both.of(0).logits[1:], both.of(1).logits[0]]
        for rows, text in zip(together, [*branches, other], strict=True):
            fresh = HuggingFaceTarget(model)
            alone = fresh.forward([Item.chain(_opened(fresh, text), text)]).logits[0].float()
            spread = float(alone.max() - alone.min())
            if float((rows.float() - alone).abs().max()) > tolerance * max(spread, 1e-3):
                raise UnsupportedModel(
                    f"{model.name} ({type(model.network).__name__}) gives other logits for a tree than for its "
                    "branches",
                    "its attention ignores the mask or the position ids; specds cannot decode with it",
                )
    except (RuntimeError, ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        reason = first_line(error)
        raise UnsupportedModel(f"{model.name} cannot verify a tree of tokens: {reason}") from error


def _opened(target: HuggingFaceTarget, prompt: Sequence[int]) -> PagedSlot:
    slot = target.open(prompt, PAGE)
    assert slot is not None  # there is nobody else
    return slot


def _branches(tokens: Sequence[int], parents: Sequence[int]) -> list[list[int]]:
    """The tokens from the root of a tree down to each of its nodes."""
    found: list[list[int]] = []
    for token, parent in zip(tokens, parents, strict=True):
        found.append([*(found[parent] if parent >= 0 else []), token])
    return found


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
