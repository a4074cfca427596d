"""A model's files: found by its name, told apart by a fingerprint, read as tensors or as a network."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specds.caches import lend_cache
from specds.digests import sampled_digest
from specds.errors import ModelError, UnknownModel, first_line
from specds.gguf import EMBEDDED, converted, embedded_gguf
from specds.loading import Watch, quiet_transformers, unwatched
from specds.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    import torch


_WEIGHT_FILES = "*.safetensors"
_TOKENIZER_FILES = ["*.json", "*.model", "*.txt", "*.jinja", "*.py"]
# Bytes at the beginning of a safetensors file that say how long its header is.
_HEADER_LENGTH = 8
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")


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
        return converted(embedded_gguf(), watch)
    if name and path.is_dir():
        return path, _fingerprint(path)
    if path.is_file():
        return converted(path, watch)
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
