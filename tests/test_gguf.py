"""The model cache: a GGUF file becomes a directory of safetensors once, whoever else is at it and whenever it dies."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors import safe_open

from specds.checkpoint import find_model
from specds.errors import ModelError
from specds.model import load_model

from .tools import Mortal, Run, damage, mortal, snapshot

WORDS = ["<|end|>", "a", "b", "c", "d", "Ġ", "ab", "cd", "Ġab"]
MERGES = ["a b", "c d", "Ġ ab"]
LAYERS, HEADS, KEY_HEADS, WIDTH, CONTEXT = 2, 4, 2, 32, 64


def write_gguf(path: Path, seed: int = 0) -> Any:
    """A tiny random Llama as llama.cpp's converter would write it; returns the network that is in it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KEY_HEADS,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
    )
    torch.manual_seed(seed)
    network = LlamaForCausalLM(config).eval()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_vocab_size(len(WORDS))
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(2 * WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KEY_HEADS)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10_000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(WORDS)
    writer.add_token_merges(MERGES)
    writer.add_token_types([gguf.TokenType.CONTROL] + [gguf.TokenType.NORMAL] * (len(WORDS) - 1))
    for special in (writer.add_bos_token_id, writer.add_eos_token_id, writer.add_unk_token_id, writer.add_pad_token_id):
        special(0)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, LAYERS)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.3)
            values = parameter.numpy()
            heads = HEADS if "q_proj" in name else KEY_HEADS if "k_proj" in name else None
            if heads:
                # llama.cpp interleaves the two halves that rotary embedding turns.
                values = values.reshape(heads, 2, -1, WIDTH).swapaxes(1, 2).reshape(values.shape)
            writer.add_tensor(names.get_name(name, (".weight",)), np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return network


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path)
    return path


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache that is not there yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def entries(cache: Path) -> list[str]:
    """The models in a cache and whatever else was left beside them, but for the locks, which stay."""
    models = cache / "specds" / "models"
    found = models.iterdir() if models.is_dir() else ()
    return sorted(path.name for path in found if not path.name.endswith(".lock"))


def ages(directory: Path) -> dict[str, tuple[int, int]]:
    """Which files these are and when they were written; another conversion gives others."""
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in directory.iterdir()}


def refusal(call: Callable[[], object]) -> str:
    """The message and hint of the ModelError that a call must raise."""
    with pytest.raises(ModelError) as caught:
        call()
    assert caught.value.hint
    assert "\n" not in str(caught.value)
    return f"{caught.value} — {caught.value.hint}"


def test_a_gguf_file_gives_the_model_that_was_written(tmp_path: Path, cache: Path) -> None:
    network = write_gguf(tmp_path / "own.gguf")
    model = load_model(str(tmp_path / "own.gguf"), device="cpu")
    tokens = torch.randint(1, len(WORDS), (1, 40), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        assert torch.allclose(model.network(tokens).logits, network(tokens).logits, atol=1e-5)
    assert model.context_length == CONTEXT
    assert model.stop_tokens == {0}
    assert model.tokenizer.encode("abcd ab") == [6, 7, 8]
    assert model.tokenizer.decode([6, 7, 8, 0]) == "abcd ab"
    # Tied embeddings are not stored twice.
    parameters = sum(parameter.numel() for parameter in network.parameters())
    home, _ = find_model(str(tmp_path / "own.gguf"))
    with safe_open(home / "model.safetensors", "pt") as stored:
        assert sum(stored.get_tensor(name).numel() for name in stored.keys()) == parameters  # noqa: SIM118


def test_a_model_is_converted_once(gguf_file: Path, cache: Path) -> None:
    home, fingerprint = find_model(str(gguf_file))
    assert home.is_relative_to(cache / "specds")
    before = ages(home)
    load_model(str(gguf_file), device="cpu")
    assert find_model(str(gguf_file)) == (home, fingerprint)
    assert ages(home) == before
    assert entries(cache) == [home.name]


def test_another_model_of_the_same_name_is_not_taken_for_it(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "own.gguf"
    networks, found = [], []
    for seed in range(2):
        networks.append(write_gguf(path, seed))
        found.append(find_model(str(path)))
        model = load_model(str(path), device="cpu")
        assert torch.equal(model.network.lm_head.weight, networks[-1].lm_head.weight)
    assert len(set(found)) == len({fingerprint for _, fingerprint in found}) == 2


@pytest.mark.parametrize("name", ["model.safetensors", "specds.json", "tokenizer.json", "config.json"])
@pytest.mark.parametrize("how", ["truncated", "halved", "emptied", "grown", "missing"])
def test_a_damaged_leftover_is_replaced(name: str, how: str, gguf_file: Path, cache: Path) -> None:
    home, _ = find_model(str(gguf_file))
    whole = snapshot(home)
    damage(home / name, how)
    model = load_model(str(gguf_file), device="cpu")
    assert model.tokenizer.encode("ab") == [6]
    assert snapshot(home) == whole
    assert entries(cache) == [home.name]


@pytest.mark.parametrize("mark", ["{}", "[]", "null", '{"sizes": {}}', '{"sizes": []}', '{"sizes": {"model": null}}'])
def test_a_mark_that_says_nothing_is_not_trusted(mark: str, gguf_file: Path, cache: Path) -> None:
    home, _ = find_model(str(gguf_file))
    whole = snapshot(home)
    (home / "specds.json").write_text(mark)
    (home / "model.safetensors").write_bytes(b"")
    assert find_model(str(gguf_file))[0] == home
    assert snapshot(home) == whole


def test_a_file_in_the_place_of_the_directory_is_replaced(gguf_file: Path, cache: Path) -> None:
    home, _ = find_model(str(gguf_file))
    whole = snapshot(home)
    home.rename(home.with_name("aside"))
    home.write_text("not a directory")
    assert find_model(str(gguf_file))[0] == home
    assert snapshot(home) == whole


def test_a_relative_cache_directory_is_ignored(
    gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the XDG specification has it."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for value in ("cache", "./cache", "~/cache", ""):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        home, _ = find_model(str(gguf_file))
        assert home.is_relative_to(tmp_path / "home" / ".cache" / "specds")
    assert list((tmp_path / "work").iterdir()) == []


def test_without_a_cache_a_model_is_converted_among_temporary_files_and_says_so(
    gguf_file: Path, cache: Path, tmp_path: Path, run_cli: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.write_text("a file where the cache should be")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr("specds.cli.render.LINE_SECONDS", 0.01)
    (tmp_path / "prompts.txt").write_text("abcd ab\n")
    command = ["decode", "-p", tmp_path / "prompts.txt", "--model", gguf_file, "--device", "cpu", "--max-new-tokens", 3]
    first, second = run_cli(*command), run_cli(*command)
    assert first.code == second.code == 0
    assert first.records[0]["tokens"] == second.records[0]["tokens"]
    home, _ = find_model(str(gguf_file))
    assert home.is_relative_to(tmp_path / f"specds-{os.geteuid()}")
    (kept,) = (line for line in first.err.splitlines() if str(home) in line)
    assert "KB" in kept
    # While it went on, it said how far it was.
    assert re.search(r"(converting|writing) tiny.gguf.* of \d+\.\d KB", first.err)
    assert str(home) not in second.err

    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(cache))
        assert "XDG_CACHE_HOME" in refusal(lambda: find_model(str(gguf_file)))
    assert cache.read_text() == "a file where the cache should be"


def replaced_after(data: bytes, name: str, skipped: int, value: bytes) -> bytes:
    """A GGUF file in which what stands some bytes behind a key is another value."""
    place = data.index(name.encode()) + len(name) + skipped
    return data[:place] + value + data[place + len(value) :]


@pytest.mark.parametrize(
    ("name", "skipped", "value", "said"),
    [
        # Behind a key stands its type, of four bytes; of a list also the type of its elements, then their number.
        ("llama.vocab_size", 4, (1 << 31).to_bytes(4, "little"), "describes a network of"),
        ("llama.feed_forward_length", 4, (1 << 31).to_bytes(4, "little"), "describes a network of"),
        ("llama.block_count", 4, (1 << 31).to_bytes(4, "little"), "layers"),
        ("tokenizer.ggml.token_type", 8, (1 << 62).to_bytes(8, "little"), "more than it has bytes"),
        ("tokenizer.ggml.tokens", 8, (1 << 40).to_bytes(8, "little"), "more than it has bytes"),
        ("tokenizer.ggml.merges", 0, (77).to_bytes(4, "little"), "unknown type 77"),
        ("token_embd.weight", 4, (1 << 40).to_bytes(8, "little"), "larger than the file"),
        ("token_embd.weight", 0, (1 << 30).to_bytes(4, "little"), "dimensions"),
    ],
)
def test_a_gguf_file_that_claims_more_than_it_holds_is_refused_before_memory_is_taken(
    name: str, skipped: int, value: bytes, said: str, gguf_file: Path, cache: Path, tmp_path: Path
) -> None:
    path = tmp_path / "own.gguf"
    path.write_bytes(replaced_after(gguf_file.read_bytes(), name, skipped, value))
    assert said in refusal(lambda: find_model(str(path)))
    assert entries(cache) == []
    path.write_bytes(gguf_file.read_bytes()[:1_000])
    assert "own.gguf" in refusal(lambda: find_model(str(path)))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_model_that_another_user_could_have_written_is_not_trusted(
    gguf_file: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a cache that several share, each converts for itself."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    home, _ = find_model(str(gguf_file))
    os.chown(home.parent, 65534, 65534)
    assert find_model(str(gguf_file))[0].is_relative_to(tmp_path / f"specds-{os.geteuid()}")


@pytest.mark.parametrize("size", [0.3, 0.9, 0.999])
def test_a_file_that_is_cut_off_leaves_nothing_in_the_cache(size: float, gguf_file: Path, cache: Path) -> None:
    """As after a download that broke."""
    cut = cache.with_name("cut.gguf")
    data = gguf_file.read_bytes()
    cut.write_bytes(data[: int(len(data) * size)])
    assert "cut.gguf" in refusal(lambda: load_model(str(cut), device="cpu"))
    assert entries(cache) == []


@pytest.fixture(scope="module")
def caching(tmp_path_factory: pytest.TempPathFactory, tiny_directory: Path) -> Iterator[tuple[Mortal, Path]]:
    """Runs `specds` in processes that can be killed or get a full disk, and their cache."""
    cache = tmp_path_factory.mktemp("caching") / "cache"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        with mortal(cache.with_name("log"), tiny_directory) as runner:
            yield runner, cache


def decoding(gguf_file: Path, tmp_path: Path) -> list[object]:
    """The command that answers one prompt with the GGUF model."""
    (tmp_path / "prompts.txt").write_text("abcd ab\n")
    return ["decode", "-p", tmp_path / "prompts.txt", "--model", gguf_file, "--device", "cpu", "--max-new-tokens", 3]


def test_a_process_that_dies_while_it_converts_leaves_no_half_model(
    gguf_file: Path, caching: tuple[Mortal, Path], tmp_path: Path
) -> None:
    """Killed before each thing that it does to a file of the cache, one run after another."""
    runner, cache = caching
    command = decoding(gguf_file, tmp_path)
    shutil.rmtree(cache, ignore_errors=True)
    assert runner.run(command) == 0, runner.said
    (name,) = entries(cache)
    whole = snapshot(cache / "specds" / "models" / name)
    deaths = 0
    while True:
        shutil.rmtree(cache, ignore_errors=True)
        code = runner.run(command, at=deaths + 1, root=cache)
        if code == 0:
            break
        assert code == 9, runner.said
        deaths += 1
        visible = [entry for entry in entries(cache) if not entry.startswith(".")]
        assert visible in ([], [name])
        if visible:
            assert snapshot(cache / "specds" / "models" / name) == whole
        assert runner.run(command) == 0, runner.said
        assert snapshot(cache / "specds" / "models" / name) == whole
    # Making directories, writing half a dozen files, syncing them, renaming.
    assert deaths > 12


def test_a_full_disk_leaves_nothing_and_says_so(gguf_file: Path, caching: tuple[Mortal, Path], tmp_path: Path) -> None:
    runner, cache = caching
    command = decoding(gguf_file, tmp_path)
    for room in (5_000, 20_000):
        shutil.rmtree(cache, ignore_errors=True)
        assert runner.run(command, room=room) == 1
        assert runner.said.splitlines()[-1].startswith("error: "), runner.said
        assert "Traceback" not in runner.said
        assert "XDG_CACHE_HOME" in runner.said.splitlines()[-1], runner.said
        assert entries(cache) == []
    assert runner.run(command) == 0, runner.said


def test_a_conversion_prints_no_progress_bar(gguf_file: Path, cache: Path, tmp_path: Path, run_cli: Run) -> None:
    result = run_cli(*decoding(gguf_file, tmp_path), "--quiet")
    assert result.code == 0
    assert len(result.records) == 1
    assert result.err == ""


_LOADER = """
import json, os, random, sys, time
import gguf, torch, transformers
from specds.errors import SpecdsError
from specds.model import find_model, load_model
torch.set_num_threads(1)
random.seed(os.getpid())
cache = "\\0"
def dawdle(event, arguments):
    "Be slow now and then about a change to the cache, so that the other one can come in between."
    if event in ("os.rename", "os.mkdir", "os.remove", "os.rmdir") and str(arguments[0]).startswith(cache):
        time.sleep(random.random() * 0.02)
sys.addaudithook(dawdle)
print("ready", flush=True)
for line in sys.stdin:
    path, cache = json.loads(line)
    os.environ["XDG_CACHE_HOME"] = cache
    try:
        weights = load_model(path, device="cpu").network.lm_head.weight
        answer = [str(find_model(path)[0]), weights.double().sum().item()]
    except SpecdsError as error:
        answer = [str(error), None]
    print(json.dumps(answer), flush=True)
"""


class Loaders:
    """Processes that load a model all at once."""

    def __init__(self, processes: list[subprocess.Popen[str]]) -> None:
        self._processes = processes
        for process in processes:
            assert self._read(process) == "ready"

    def load(self, path: Path, cache: Path) -> list[list[Any]]:
        """For each process: where it found the model, or what it said, and the sum of what it loaded."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps([str(path), str(cache)]) + "\n")
            process.stdin.flush()
        return [json.loads(self._read(process)) for process in self._processes]

    @staticmethod
    def _read(process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        return process.stdout.readline().strip()


@pytest.fixture(scope="module")
def loaders() -> Iterator[Loaders]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _LOADER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )
        for _ in range(3)
    ]
    try:
        yield Loaders(processes)
    finally:
        for process in processes:
            process.communicate()


@pytest.mark.parametrize(
    "before",
    [
        "nothing",
        "a damaged leftover",
    ],
)
def test_processes_that_start_together_all_get_the_model(
    before: str, gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loaders: Loaders
) -> None:
    random.seed(0)
    for number in range(8):
        cache = tmp_path / f"cache-{number}"
        if before != "nothing":
            monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
            home, _ = find_model(str(gguf_file))
            damage(home / random.choice(["model.safetensors", "specds.json"]), "halved")
        answers = loaders.load(gguf_file, cache)
        assert None not in [weights for _, weights in answers], answers
        assert len({tuple(answer) for answer in answers}) == 1
        (name,) = entries(cache)
        assert answers[0][0] == str(cache / "specds" / "models" / name)
