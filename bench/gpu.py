"""Time the cuda runtime on a random model of a known shape: T(n), and T(1) against what memory allows.

    python bench/gpu.py --shape 7b                    # a 7B Llama in bfloat16, its weights made on the device
    python bench/gpu.py --shape tiny --device cpu     # does the same without a GPU, to see that it runs

The floor of T(1) is the size of the weights that a pass reads / the measured bandwidth of a large copy.
"""

from __future__ import annotations

import argparse
import time
from statistics import median
from typing import Any

import torch
from transformers import LlamaConfig

from specds.decode.contracts import Item
from specds.decode.draft import chain
from specds.decode.prompt import hold
from specds.decode.targets.cuda import CudaTarget
from specds.model import LanguageModel

SHAPES: dict[str, dict[str, int]] = {
    "7b": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32},
    "1b": {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32},
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4},
}
ROWS = (1, 2, 4, 8, 16, 32, 64)


class RandomWeights:
    """A checkpoint of any shape that is never stored."""

    def __init__(self, config: Any, device: torch.device, dtype: torch.dtype) -> None:
        self._config, self._device, self._dtype = config, device, dtype
        self.bytes = 0

    def tensor(self, name: str) -> torch.Tensor | None:
        hidden, inner = self._config.hidden_size, self._config.intermediate_size
        shapes = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
        part = name.removesuffix(".weight").split(".")[-1]
        if name.endswith(".bias") or part in ("q_norm", "k_norm"):
            return None
        if "norm" in part:
            return torch.ones(hidden, device=self._device, dtype=self._dtype)
        vocabulary = (self._config.vocab_size, hidden)
        shape = vocabulary if part in ("embed_tokens", "lm_head") else shapes.get(part, (hidden, hidden))
        values = torch.randn(shape, device=self._device, dtype=self._dtype) * 0.02
        if part != "embed_tokens":  # of those a pass reads a few rows
            self.bytes += values.numel() * values.element_size()
        return values


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="7b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--context", type=int, default=300)
    parser.add_argument("--repeats", type=int, default=30)
    options = parser.parse_args()

    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    config = LlamaConfig(
        vocab_size=32_000, max_position_embeddings=4096, tie_word_embeddings=False, **SHAPES[options.shape]
    )
    weights = RandomWeights(config, device, dtype)
    model = LanguageModel(
        name=options.shape, fingerprint="random", tokenizer=None, config=config, architecture="LlamaForCausalLM",
        stop_tokens=frozenset(), context_length=4096, device=device, dtype=options.dtype, _weights=weights,
    )  # fmt: skip
    target = CudaTarget(model)
    tokens = torch.randint(0, 32_000, (options.context,)).tolist()
    slot = hold(target, tokens, options.context + ROWS[-1])
    floor = weights.bytes / bandwidth(device)
    print(
        f"{options.shape}, {options.dtype}, {device}: {weights.bytes / 1e9:.2f} GB a pass, floor {floor * 1e3:.3f} ms"
    )
    times: dict[int, list[float]] = {rows: [] for rows in ROWS}
    for repeat in range(options.repeats + 2):
        for rows in ROWS:
            draft = chain(tokens[: rows - 1], [0.5] * (rows - 1))
            began = time.perf_counter()
            target.forward([Item.draft(slot, 0, draft)]).logits.argmax(-1).tolist()
            if repeat >= 2:
                times[rows].append(time.perf_counter() - began)
    single = median(times[1])
    for rows in ROWS:
        middle = median(times[rows])
        print(f"T({rows}) = {middle * 1e3:.3f} ms, {middle / single:.2f} × T(1), {middle / floor:.2f} × floor")


def bandwidth(device: torch.device) -> float:
    """Bytes read a second, by copying a large buffer; a copy reads and writes."""
    source = torch.empty(1 << (30 if device.type == "cuda" else 26), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    spent = []
    for _ in range(12):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        target.copy_(source)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        spent.append(time.perf_counter() - began)
    return 2 * source.numel() / median(spent[2:])


if __name__ == "__main__":
    main()
