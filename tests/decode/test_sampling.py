from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from scipy import stats

from specds.decode.draft import Draft
from specds.decode.drafters.none import Null
from specds.decode.loop import decode
from specds.decode.target import HuggingFaceTarget
from specds.decode.verifiers import make_verifier
from specds.errors import UsageError
from specds.model import LanguageModel
from specds.sampling import Noise, Sampling, pick, warp

from ..conftest import VOCABULARY, make_model
from .drafts import Mixed, Oracle, Wrong

PROMPT = [9, 30, 12, 5, 77, 64]


def sample(
    model: LanguageModel, drafter: object, sampling: Sampling, length: int, which: int = 0, target: object = None
) -> list[int]:
    steps = decode(
        target or HuggingFaceTarget(model),  # type: ignore[arg-type]
        drafter,  # type: ignore[arg-type]
        make_verifier("auto", sampling, PROMPT, which),
        PROMPT,
        max_new_tokens=length,
        budget=10,
        stop_tokens=model.stop_tokens,
    )
    return [token for step in steps for token in step.tokens]


@pytest.mark.parametrize("settings", [(0.7, 0, 0.95), (1.0, 0, 1.0), (1.3, 20, 1.0), (0.9, 50, 0.8)])
def test_every_drafter_gives_the_text_of_plain_sampling_with_the_same_seed(settings: tuple[float, int, float]) -> None:
    model = make_model(stop=False)
    for seed in range(6):
        sampling = Sampling(*settings, seed=seed)
        plain = sample(model, Null(Null.Options()), sampling, 30)
        for kind in (Oracle, Wrong, Mixed):
            assert sample(model, kind(plain, VOCABULARY, seed), sampling, 30) == plain


def test_seeds_samples_and_prompts_give_different_texts() -> None:
    model = make_model(stop=False)
    texts = {tuple(sample(model, Null(Null.Options()), Sampling(1.0, seed=seed), 12)) for seed in range(5)}
    texts |= {tuple(sample(model, Null(Null.Options()), Sampling(1.0), 12, which)) for which in range(1, 5)}
    assert len(texts) == 9


def exact(model: LanguageModel, sampling: Sampling, tokens: list[int]) -> np.ndarray:
    """The model's distribution of the next token, by softmax over transformers' own warped logits."""
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    with torch.inference_mode():
        scores = model.network(torch.tensor([tokens])).logits[:, -1].float()
        scores = TemperatureLogitsWarper(sampling.temperature)(None, scores)
        if sampling.top_k:
            scores = TopKLogitsWarper(sampling.top_k)(None, scores)
        if sampling.top_p < 1:
            scores = TopPLogitsWarper(sampling.top_p)(None, scores)
    return torch.softmax(scores[0].double(), -1).numpy()


@pytest.mark.parametrize("settings", [(0.7, 0, 0.95), (1.0, 0, 1.0), (2.0, 7, 0.9)])
def test_warping_is_that_of_transformers(settings: tuple[float, int, float]) -> None:
    sampling = Sampling(*settings)
    model = make_model(stop=False)
    for token in range(5, 60):
        with torch.inference_mode():
            logits = model.network(torch.tensor([[token, 9]])).logits[0, -1]
        kept, scaled = warp(logits, sampling)
        mine = np.zeros(VOCABULARY)
        mine[kept] = np.exp(scaled - scaled.max()) / np.exp(scaled - scaled.max()).sum()
        assert np.abs(mine - exact(model, sampling, [token, 9])).max() < 1e-6


@pytest.mark.parametrize("kind", [Oracle, Wrong, Mixed])
def test_the_first_three_tokens_are_distributed_as_the_model_says(kind: type) -> None:
    """Chi-square over 2,400 draws, for drafts that are right, wrong, and mixed."""
    model = make_model(stop=False, vocab_size=16)
    prompt = [9, 3, 12]
    sampling = Sampling(1.4, top_p=0.95)
    target = HuggingFaceTarget(model)
    likely = np.argsort(-exact(model, sampling, prompt))[:1]
    counts: Counter[tuple[int, ...]] = Counter()
    draws = 2_400
    for draw in range(draws):
        # A guess that is right about as often as the model is sure, and wrong otherwise.
        drafter = kind([*map(int, likely), 3, 5, 7], 16, draw)
        steps = decode(
            target,
            drafter,
            make_verifier("sampling", sampling, prompt, draw),
            prompt,
            max_new_tokens=3,
            budget=6,
        )
        counts[tuple(token for step in steps for token in step.tokens)] += 1
    expected: dict[tuple[int, ...], float] = {}
    first = exact(model, sampling, prompt)
    for one in np.flatnonzero(first):
        second = exact(model, sampling, [*prompt, int(one)])
        for two in np.flatnonzero(second):
            third = exact(model, sampling, [*prompt, int(one), int(two)])
            for three in np.flatnonzero(third):
                expected[(int(one), int(two), int(three))] = first[one] * second[two] * third[three] * draws
    assert set(counts) <= set(expected)
    common = [key for key, value in expected.items() if value >= 5]
    observed = [counts[key] for key in common] + [sum(v for k, v in counts.items() if k not in set(common))]
    predicted = [expected[key] for key in common] + [sum(v for k, v in expected.items() if k not in set(common))]
    assert len(common) > 20
    assert stats.chisquare(observed, np.array(predicted) * sum(observed) / sum(predicted)).pvalue > 1e-3


def test_noise_is_a_function_of_seed_prompt_sample_and_position() -> None:
    noise = Noise.of(3, [1, 2, 3])
    tokens = np.arange(100)
    assert np.array_equal(noise.gumbel(7, tokens, 100), noise.gumbel(7, tokens, 100))
    assert np.array_equal(noise.gumbel(7, tokens[40:50], 100), noise.gumbel(7, tokens, 100)[40:50])
    others = [noise.gumbel(8, tokens, 100)]
    others += [Noise.of(*key).gumbel(7, tokens, 100) for key in ((4, [1, 2, 3]), (3, [1, 2]), (3, [1, 2, 3], 1))]
    assert all(not np.array_equal(noise.gumbel(7, tokens, 100), other) for other in others)


def test_noise_is_standard_gumbel() -> None:
    noise = Noise.of(0, [5])
    drawn = np.concatenate([noise.gumbel(position, np.arange(500), 500) for position in range(40)])
    assert np.isfinite(drawn).all()
    assert stats.kstest(drawn, "gumbel_r").pvalue > 1e-3


def test_greedy_is_argmax_and_ties_go_to_the_lower_id() -> None:
    logits = torch.tensor([0.0, 2.0, 2.0, 1.0])
    assert pick(logits, Sampling(), Noise.of(0, []), 0) == 1


def test_verification_follows_drafted_picks_and_stops_at_the_first_that_was_not() -> None:
    logits = torch.full((4, 8), -10.0)
    # Row 0 picks 3 (node 0), row 1 picks 4 (node 2), row 3 picks 5, which nobody drafted.
    logits[0, 3] = logits[1, 4] = logits[3, 5] = 10.0
    draft = Draft(np.array([3, 6, 4], np.int32), np.array([-1, -1, 0], np.int32), np.ones(3, np.float32))
    verdict = make_verifier("greedy", Sampling(), []).verify(draft, logits, 0)
    assert verdict.path == (0, 2)
    assert verdict.next_token == 5


@pytest.mark.parametrize(
    "bad",
    [{"temperature": -1.0}, {"temperature": float("nan")}, {"top_p": 0.0}, {"top_p": 1.5}, {"top_k": -1}, {"seed": -1}],
)
def test_options_out_of_range_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        Sampling(**bad)  # type: ignore[arg-type]


def test_greedy_verification_refuses_a_temperature() -> None:
    with pytest.raises(UsageError, match="temperature"):
        make_verifier("greedy", Sampling(0.5), [])
    with pytest.raises(UsageError, match="no verifier"):
        make_verifier("magic", Sampling(), [])
