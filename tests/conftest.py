"""Small models and stores made on the spot; the embedded model for what must be true of a real one."""

from __future__ import annotations

import io
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings

from specds.datastore import trial
from specds.datastore.corpus import Document, add_documents
from specds.datastore.creation import create_store
from specds.datastore.store import Store, open_store
from specds.decode.pricing import measurement
from specds.model import LanguageModel, load_model, wrap_model
from specds.tokenizer import Tokenizer, wrap_tokenizer

from .tools import Mortal, Result, Run, mortal, random_documents

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Tiny models lose more by waking a second thread than they gain; where another job runs, a hundred times more.
torch.set_num_threads(1)

# The first call of a compiled function takes as long as compiling it.
settings.register_profile("compiled", deadline=None)
settings.load_profile("compiled")

VOCABULARY = 128
STOP = 1

# How long, and where, the hunt of `tests/hostile/test_mutations.py` looks.
HUNT = ("SPECDS_MUTATIONS", "SPECDS_SEED")

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ' ' + message['content'] + ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant' }}{% endif %}"
)

NewStore = Callable[..., Store]


def make_tokenizer(size: int = VOCABULARY) -> Any:
    """One token a word: w0, w1, … beside a few names; unknown words are <unk>."""
    from tokenizers import Tokenizer as Fast
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", "<end>", "user", "assistant", "system"]
    words += [f"w{number}" for number in range(size - len(words))]
    fast = Fast(WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    fast.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=fast, unk_token="<unk>", eos_token="<end>")
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def family_config(family: str, **changes: Any) -> Any:
    """A tiny configuration of a model family."""
    import transformers

    common: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 256,
        "bos_token_id": None,
        "eos_token_id": STOP,
        "pad_token_id": STOP,
    }
    grouped = {"num_key_value_heads": 2}
    special: dict[str, tuple[str, dict[str, Any]]] = {
        "llama": ("LlamaConfig", grouped),
        "qwen2": ("Qwen2Config", grouped),
        "qwen3": ("Qwen3Config", {**grouped, "head_dim": 8}),
        "mistral": ("MistralConfig", {**grouped, "sliding_window": 12}),
        "gemma": ("GemmaConfig", {**grouped, "head_dim": 8}),
        "gemma2": ("Gemma2Config", {**grouped, "head_dim": 8, "sliding_window": 12}),
        "gemma3": (
            "Gemma3TextConfig",
            {
                **grouped,
                "head_dim": 8,
                "sliding_window": 12,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
        ),
        "phi": ("PhiConfig", {}),
        "phi3": ("Phi3Config", {**grouped, "sliding_window": 12}),
        "neox": ("GPTNeoXConfig", {}),
    }
    name, own = special[family]
    return getattr(transformers, name)(**{**common, **own, **changes})


FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gemma3", "phi", "phi3", "neox")


def make_model(family: str = "llama", *, seed: int = 0, stop: bool = True, **changes: Any) -> LanguageModel:
    """A tiny model with random weights large enough for its choices to be clear."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    config = family_config(family, **changes)
    if not stop:
        config.eos_token_id = None
    network = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.3)
    network.generation_config.eos_token_id = STOP if stop else None
    network.generation_config.pad_token_id = STOP
    tokenizer = wrap_tokenizer(make_tokenizer(config.vocab_size), "tiny")
    return wrap_model(network, tokenizer, name="tiny", fingerprint=f"tiny-{family}-{seed}")


def fill(store: Store, documents: Sequence[tuple[Sequence[int], Sequence[int]]], source: str = "test") -> Store:
    """Write (prompt, response) token lists into a store; returns it as it is then."""
    rows = [
        Document(f"{source}-{number}", source, np.array(prompt, np.int32), np.array(response, np.int32))
        for number, (prompt, response) in enumerate(documents)
    ]
    with store.writer() as writer:
        add_documents(writer, rows, origin="ingested")
    return open_store(store.path)


@pytest.fixture(autouse=True, scope="session")
def no_settings() -> Iterator[None]:
    """What whoever runs the tests has set for `specds` is not in force; what a test sets is."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("SPECDS_") and name not in HUNT]:
            patch.delenv(name)
        yield


@pytest.fixture(autouse=True, scope="session")
def profiles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Cost curves and known indexes of tests stay out of the user's cache."""
    folder = tmp_path_factory.mktemp("profiles")
    with pytest.MonkeyPatch.context() as patch:
        original = measurement.profile_path
        patch.setattr(measurement, "profile_path", lambda *key: folder / original(*key).name)
        (folder / "indexes").mkdir()
        patch.setattr(trial, "known_directory", lambda: folder / "indexes")
        yield


@pytest.fixture(scope="session")
def tiny() -> LanguageModel:
    """A tiny Llama that stops at token 1."""
    return make_model()


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """The tiny models' tokenizer."""
    return wrap_tokenizer(make_tokenizer(), "tiny")


@pytest.fixture(scope="session")
def tiny_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama as a directory that `--model` takes."""
    directory = tmp_path_factory.mktemp("tiny-model")
    model = make_model()
    model.network.save_pretrained(directory)
    model.tokenizer.hf.save_pretrained(directory)
    return directory


@pytest.fixture
def new_store(tmp_path: Path, tokenizer: Tokenizer) -> NewStore:
    """Make a store of given documents; the argument is a list of (prompt, response) token lists."""
    count = 0

    def make(documents: Sequence[tuple[Sequence[int], Sequence[int]]] = ()) -> Store:
        nonlocal count
        count += 1
        store = create_store(tmp_path / f"store-{count}.ds", tokenizer)
        return fill(store, documents) if documents else store

    return make


@pytest.fixture(scope="session")
def smollm() -> LanguageModel:
    """The embedded model: SmolLM2-135M-Instruct in float32 on the CPU."""
    return load_model("smollm2-135m", dtype="float32", device="cpu")


@pytest.fixture
def run_cli(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """The command line in this process: `run_cli("decode", "-p", path, stdin="…")` gives code, stdout and stderr."""
    from specds.cli.main import run

    def call(*arguments: object, stdin: str | bytes = "") -> Result:
        data = stdin.encode() if isinstance(stdin, str) else stdin
        monkeypatch.setattr(sys, "argv", ["specds", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            run()
        out, err = capfd.readouterr()
        code = ended.value.code
        assert isinstance(code, int)
        return Result(code, out, err)

    return call


@pytest.fixture(scope="session")
def stocked(tmp_path_factory: pytest.TempPathFactory, tiny_directory: Path) -> dict[str, Path]:
    """Stores with a suffix and a dense index for the tiny directory's model, one for each kind of dense index.

    For looking only: take a copy to change one.
    """
    from specds.datastore.ann import KINDS
    from specds.datastore.build_dense import DenseOptions, build_dense
    from specds.datastore.build_suffix import build_suffix

    model = load_model(str(tiny_directory), device="cpu")
    stores = {}
    for kind in KINDS:
        path = tmp_path_factory.mktemp("stocked") / f"{kind}.ds"
        store = fill(create_store(path, model.tokenizer), random_documents(40))
        build_suffix(store)
        build_dense(store, model, DenseOptions(kind, dims=8))
        stores[kind] = path
    return stores


@pytest.fixture(scope="session")
def grown(stocked: dict[str, Path], tmp_path_factory: pytest.TempPathFactory, tiny_directory: Path) -> Path:
    """A store of two segments in each index, and documents that are in none of them; some documents are copies.

    For looking only: take a copy to change it.
    """
    from specds.datastore.build_dense import build_dense
    from specds.datastore.build_suffix import build_suffix

    path = tmp_path_factory.mktemp("grown") / "grown.ds"
    shutil.copytree(stocked["scann"], path)
    model = load_model(str(tiny_directory), device="cpu")
    documents = random_documents(24, seed=5)
    store = fill(open_store(path), documents[:8], source="more")
    build_suffix(store)
    build_dense(store, model)
    store = fill(store, [*documents[8:], *random_documents(40)[:3]], source="new")
    assert (len(store.manifest.suffix), len(store.manifest.dense)) == (2, 2)
    return path


@pytest.fixture(scope="module")
def killable(tmp_path_factory: pytest.TempPathFactory, tiny_directory: Path) -> Iterator[Mortal]:
    """Runs `specds` in processes that can be killed."""
    with mortal(tmp_path_factory.mktemp("killable") / "log", tiny_directory) as runner:
        yield runner
