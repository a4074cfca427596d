"""A language model with its tokenizer and identity: loaded by name, or wrapped as it stands in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specds.checkpoint import Weights, find_model
from specds.errors import UsageError, first_line
from specds.gguf import EMBEDDED
from specds.loading import Loading, Watch, quiet_transformers, unwatched
from specds.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    import torch


_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(slots=True, eq=False, weakref_slot=True)
class LanguageModel:
    """A causal language model with its tokenizer and identity.

    Attributes:
        name: what the user called it.
        fingerprint: identifies the checkpoint whatever dtype it is loaded in (sampled bytes of its weight files).
        tokenizer: its tokenizer.
        config: transformers' configuration of the text model.
        architecture: the class that transformers runs it with.
        stop_tokens: ids that end an answer.
        context_length: the most tokens, prompt and answer together, that the model was made for.
        device: where the weights are, or will be.
        dtype: the weights' dtype by name, e.g. `float32`.
        watch: told how far it is while weights are read.
    """

    name: str
    fingerprint: str
    tokenizer: Tokenizer
    config: Any
    architecture: str
    stop_tokens: frozenset[int]
    context_length: int
    device: torch.device
    dtype: str
    _weights: Weights | None
    _network: Any = None
    watch: Watch = unwatched
    _read: int = 0

    @property
    def network(self) -> Any:
        """The transformers model, in eval mode, on its device; its weights are read when it is first asked for.

        Raises:
            ModelError: it does not load.
        """
        if self._network is None:
            assert self._weights is not None, "a model has weights or a network"
            self._tell(0)
            with quiet_transformers():
                self._network = self._weights.load(self.device, self.dtype).eval()
            self._tell(self._weights.size())
        return self._network

    @property
    def decoder(self) -> Any:
        """The network without its language-model head: token ids to final-normed hidden states."""
        return self.network.get_decoder() if hasattr(self.network, "get_decoder") else self.network.base_model

    def tensor(self, name: str) -> torch.Tensor | None:
        """One tensor of the checkpoint as it is stored, by its name there; None if there is none of that name.

        Raises:
            ModelError: the file that should hold it is damaged.
        """
        tensor_read: torch.Tensor | None
        if self._weights is None:
            tensor_read = self._network.state_dict().get(name)
            return tensor_read
        tensor_read = self._weights.tensor(name)
        if tensor_read is not None:
            self._read += tensor_read.nbytes
            self._tell(self._read)
        return tensor_read

    def _tell(self, done: int) -> None:
        if self._weights is not None:
            total = self._weights.size()
            self.watch(Loading(f"loading {self.name}", min(done, total), total))


def load_model(
    name: str = EMBEDDED,
    *,
    dtype: str = "auto",
    device: str = "auto",
    threads: int | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    watch: Watch = unwatched,
) -> LanguageModel:
    """A causal language model for decoding. Its weights are read when they are first needed.

    Args:
        name: `smollm2-135m` (embedded), a directory, a GGUF file, or a Hugging Face id.
        dtype: `float32`, `bfloat16`, `float16`, or `auto`: float32 on a CPU, bfloat16 on a GPU.
        device: a torch device, or `auto`: the first GPU if there is one.
        threads: CPU threads for torch; None leaves torch's choice.
        revision: branch, tag or commit, for a Hugging Face id.
        trust_remote_code: run modelling code that comes with the checkpoint. Only for code you have read.
        watch: told how far it is while a GGUF file is converted.

    Raises:
        UnknownModel: nothing of that name can be found.
        ModelError: it is found, but does not load.
        UsageError: no such dtype or device.
    """
    directory, fingerprint = find_model(name, revision=revision, watch=watch)
    import torch

    weights = Weights(directory, trust_remote_code)
    with quiet_transformers():
        if threads is not None:
            torch.set_num_threads(threads)
        place = _device(device)
        tokenizer = load_tokenizer(directory, name, trust_remote_code=trust_remote_code)
        config, generation = weights.configuration()
    return LanguageModel(
        name=name,
        fingerprint=fingerprint,
        tokenizer=tokenizer,
        config=config.get_text_config(),
        architecture=_architecture(config) if not (directory / "adapter_config.json").is_file() else "adapter",
        stop_tokens=_stop_tokens(generation, config),
        context_length=_context_length(config),
        device=place,
        dtype=_dtype(dtype, place),
        _weights=weights,
    )


def wrap_model(network: Any, tokenizer: Tokenizer, *, name: str, fingerprint: str) -> LanguageModel:
    """A transformers model that is already in memory, as specds uses it.

    `fingerprint` is what dense indexes built with the model will carry; give the same model the same one.
    """
    return LanguageModel(
        name=name,
        fingerprint=fingerprint,
        tokenizer=tokenizer,
        config=network.config.get_text_config(),
        architecture=type(network).__name__,
        stop_tokens=_stop_tokens(network.generation_config, network.config),
        context_length=_context_length(network.config),
        device=network.device,
        dtype=str(network.dtype).removeprefix("torch."),
        _weights=None,
        _network=network.eval(),
    )


def _architecture(config: Any) -> str:
    """The class that AutoModelForCausalLM takes: by the type of the model, not by what the checkpoint calls itself."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if getattr(config, "auto_map", None):
        return str(config.auto_map)
    return str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type, config.model_type))


def _stop_tokens(generation: Any, config: Any) -> frozenset[int]:
    ends = getattr(generation, "eos_token_id", None)
    if ends is None:
        ends = getattr(config, "eos_token_id", None)
    return frozenset([] if ends is None else [ends] if isinstance(ends, int) else ends)


def _context_length(config: Any) -> int:
    return int(getattr(config.get_text_config(), "max_position_embeddings", None) or 1 << 30)


def _dtype(name: str, device: torch.device) -> str:
    if name == "auto":
        return "float32" if device.type == "cpu" else "bfloat16"
    if name not in _DTYPES:
        raise UsageError(f"no dtype {name!r}", f"one of auto, {', '.join(_DTYPES)}")
    return name


def _device(name: str) -> torch.device:
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = first_line(error)
        raise UsageError(f"no device {name!r} here: {reason}", "one of auto, cpu, cuda, cuda:1") from error
    return device
