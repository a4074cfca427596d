"""transformers' own greedy generation: what lossless is measured against, and what a speedup is compared with."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specds.model import LanguageModel
    from specds.sampling import Sampling

PLAIN: dict[str, Any] = {
    "do_sample": False,
    "num_beams": 1,
    "temperature": None,
    "top_p": None,
    "top_k": None,
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "bad_words_ids": None,
    "min_length": 0,
    "min_new_tokens": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "sequence_bias": None,
    "exponential_decay_length_penalty": None,
    "guidance_scale": None,
}
"""Arguments that keep a checkpoint's own generation settings (Qwen's repetition penalty…) out of `generate`:
what `specds decode` writes is what the logits say."""


def generate_plain(model: LanguageModel, prompt: Sequence[int], max_new_tokens: int, **more: Any) -> list[int]:
    """The token ids that `model.generate(do_sample=False)` puts after a prompt, a stop token included.

    Args:
        more: further arguments of `generate`, such as `prompt_lookup_num_tokens`.
    """
    import torch

    output = model.network.generate(
        torch.tensor([list(prompt)], device=model.device),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long, device=model.device),
        max_new_tokens=max_new_tokens,
        eos_token_id=sorted(model.stop_tokens) or None,
        pad_token_id=min(model.stop_tokens, default=0),
        **PLAIN,
        **more,
    )
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens


def lead(model: LanguageModel, tokens: Sequence[int]) -> float:
    """By how much the likeliest next token leads the second, in logits: near 0, rounding decides between them."""
    import torch

    with torch.inference_mode():
        logits = model.network(torch.tensor([list(tokens)], device=model.device), use_cache=False).logits[0, -1]
    best = torch.topk(logits.float(), 2).values
    return float(best[0] - best[1])


def logit_gap(
    model: LanguageModel, tokens: Sequence[int], candidates: Sequence[int], sampling: Sampling, prompt: Sequence[int]
) -> float:
    """By how much the worst of some candidates is below what the model picks after `tokens`, in logits.

    Near 0, rounding decides between them. Above temperature 0 the draws' own noise counts, as it does in picking;
    infinite for a token that top-k or top-p leaves out.

    Args:
        prompt: the request's token ids, with which `tokens` begins; the noise is keyed by them.
    """
    import numpy as np
    import torch

    from specds.sampling import Noise, warp

    with torch.inference_mode():
        inputs = torch.tensor([list(tokens)], device=model.device)
        logits = model.network(inputs, use_cache=False, logits_to_keep=1).logits[0, -1]
    if sampling.greedy:
        row = logits.double().cpu().numpy()
        return float(row.max() - min(row[list(candidates)]))
    kept, scaled = warp(logits, sampling)
    race = scaled + Noise.of(sampling.seed, prompt).gumbel(len(tokens), kept)
    places = [np.flatnonzero(kept == candidate) for candidate in candidates]
    if not all(map(len, places)):
        return float("inf")
    return float((race.max() - min(race[place[0]] for place in places)) * sampling.temperature)


class LogProbabilities:
    """What the model thinks of answers: by ordinary passes of the network, the prompt's once for all its answers."""

    def __init__(self, model: LanguageModel) -> None:
        self._model = model
        self._prompt: list[int] = []
        self._cache: Any = None
        self._first: Any = None

    def of(self, prompt: Sequence[int], answer: Sequence[int]) -> float:
        """The log-probability (nats, raw logits) of an answer after a prompt."""
        import torch

        network, device = self._model.network, self._model.device
        with torch.inference_mode():
            if list(prompt) != self._prompt:
                result = network(torch.tensor([list(prompt)], device=device), use_cache=True, logits_to_keep=1)
                self._prompt, self._cache, self._first = list(prompt), result.past_key_values, result.logits[0]
            tokens = torch.tensor(list(answer), device=device)
            rows = [self._first]
            if len(answer) > 1:
                result = network(tokens[None, :-1], past_key_values=self._cache, use_cache=True)
                rows.append(result.logits[0])
                self._cache.crop(1 - len(answer))
        logits = torch.cat(rows).float()
        return float(torch.log_softmax(logits, dim=-1).gather(1, tokens[:, None]).sum())


def until_stop(tokens: list[int], stop_tokens: Collection[int]) -> list[int]:
    """The tokens up to the first stop token, which is kept."""
    for index, token in enumerate(tokens):
        if token in stop_tokens:
            return tokens[: index + 1]
    return tokens
