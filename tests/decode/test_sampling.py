from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from specds.decode.contracts import Case, Drafter, Step, Target, Verifier
from specds.decode.draft import Draft, empty
from specds.decode.drafters.none import Null
from specds.decode.engine import Engine
from specds.decode.loop import decode
from specds.decode.method import Method
from specds.decode.pricing.budget import Fixed
from specds.decode.request import Listed, Request
from specds.decode.targets.generic import HuggingFaceTarget
from specds.decode.verifiers import make_verifier
from specds.errors import ModelError, UsageError
from specds.model import LanguageModel
from specds.sampling import Noise, Sampling, pick, pick_rows, warp

from ..conftest import VOCABULARY, make_model
from .drafts import Mixed, Oracle, Scripted, Wrong

PROMPT = [9, 30, 12, 5, 77, 64]


def drawn_steps(
    target: Target,
    drafter: Drafter,
    verifier: Verifier,
    prompt: list[int],
    length: int,
    *,
    noise: Noise,
    budget: int,
    stop_tokens: Collection[int] = (),
) -> Iterator[Step]:
    """The steps of one request with noise of its own."""
    request = Request(prompt, length, lambda slot: drafter, noise, stop_tokens)
    for _ in decode(target, Listed([request]), verifier, Fixed(budget)):
        assert request.error is None
        assert request.step is not None
        yield request.step


def sample(
    model: LanguageModel, drafter: Drafter, sampling: Sampling, length: int, which: int = 0, target: Any = None
) -> list[int]:
    verifier, noise = make_verifier("auto", sampling), Noise.of(sampling.seed, PROMPT, which)
    steps = drawn_steps(
        target or HuggingFaceTarget(model),
        drafter,
        verifier,
        PROMPT,
        length,
        noise=noise,
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


def exact_rows(model: LanguageModel, sampling: Sampling, texts: list[list[int]]) -> np.ndarray:
    """float64[texts, vocabulary]: the next token's distribution by softmax over transformers' own warped logits.

    Args:
        texts: of equal length.
    """
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    with torch.inference_mode():
        scores = model.network(torch.tensor(texts), use_cache=False).logits[:, -1].float()
        scores = TemperatureLogitsWarper(sampling.temperature)(None, scores)
        if sampling.top_k:
            scores = TopKLogitsWarper(sampling.top_k)(None, scores)
        if sampling.top_p < 1:
            scores = TopPLogitsWarper(sampling.top_p)(None, scores)
    return torch.softmax(scores.double(), -1).numpy()


def exact(model: LanguageModel, sampling: Sampling, tokens: list[int]) -> np.ndarray:
    """`exact_rows` for one text."""
    return exact_rows(model, sampling, [tokens])[0]


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


SMALL = 8
DRAWS = 2_000
DRAWN = Sampling(1.2, top_p=0.95)
START = [5, 3, 6]
DRAWN_TOKENS = 5


@pytest.fixture(scope="module")
def small() -> LanguageModel:
    """A model that can be asked for the probability of every short text."""
    return make_model(stop=False, vocab_size=SMALL, num_hidden_layers=1, hidden_size=16)


@pytest.fixture(scope="module")
def following(small: LanguageModel) -> list[np.ndarray]:
    """For lengths n from 0 to 4: float64[8, …, 8] with n + 1 axes, the next token's distribution after every n."""
    tables = []
    for length in range(DRAWN_TOKENS):
        texts = [[*START, *text] for text in np.ndindex((SMALL,) * length)]
        tables.append(exact_rows(small, DRAWN, texts).reshape((SMALL,) * (length + 1)))
    return tables


@pytest.fixture(scope="module")
def joint(following: list[np.ndarray]) -> np.ndarray:
    """float64[8, 8, 8]: the probability of every first three tokens."""
    one, two, three = following[:3]
    return one[:, None, None] * two[:, :, None] * three


@pytest.fixture(scope="module")
def undrafted(following: list[np.ndarray]) -> list[list[int]]:
    """What plain sampling writes with the noise of each draw, token by token: the Gumbel-max trick by the book."""
    texts = []
    with np.errstate(divide="ignore"):
        scores = [np.log(table) for table in following]
    for draw in range(DRAWS):
        noise, text = Noise.of(DRAWN.seed, START, draw), list[int]()
        for length, table in enumerate(scores):
            gumbel = noise.gumbel(len(START) + length, np.arange(SMALL))
            text.append(int(np.argmax(table[tuple(text)] + gumbel)))
        texts.append(text)
    return texts


def fits(texts: list[list[int]], joint: np.ndarray) -> list[float]:
    """p-values of chi-square tests of the first token, the first two and the first three, each taken together.

    What is expected less than 5 times counts as one.
    """
    values = []
    for length, cells in ((1, 7), (2, 40), (3, 100)):
        expected = joint.sum(tuple(range(length, 3))) * len(texts)
        counts = np.zeros_like(expected)
        np.add.at(counts, tuple(np.array(texts)[:, :length].T), 1)
        assert not counts[expected == 0].any(), "a token came that top-p leaves out"
        rare = expected < 5
        observed, predicted = (
            np.append(table[~rare], table[rare].sum()) if expected[rare].sum() >= 5 else table[expected > 0]
            for table in (counts, expected)
        )
        assert len(predicted) >= cells
        values.append(float(stats.chisquare(observed, predicted).pvalue))
    return values


@pytest.mark.parametrize("kind", [Oracle, Wrong, Mixed])
def test_the_first_three_tokens_are_distributed_as_the_model_says(
    kind: type[Scripted], small: LanguageModel, joint: np.ndarray, undrafted: list[list[int]]
) -> None:
    """2,000 draws, with drafts that are always right, always wrong, or trees of right and wrong branches."""
    target = HuggingFaceTarget(small)
    verifier = make_verifier("sampling", DRAWN)
    texts, steps = [], list[Step]()
    for number, plain in enumerate(undrafted):
        drafter, noise = kind(plain, SMALL, number), Noise.of(DRAWN.seed, START, number)
        one = list(drawn_steps(target, drafter, verifier, START, DRAWN_TOKENS, noise=noise, budget=6))
        texts.append([token for step in one for token in step.tokens])
        steps += one
    assert min(fits(texts, joint)) > 1e-3
    assert {len(text) for text in texts} == {DRAWN_TOKENS}
    # The drafts must have been what they are called.
    if kind is Oracle:
        # The prompt's pass gives one token; the next one has three drafted and adds its own.
        assert [step.accepted for step in steps] == [0, 3] * DRAWS
    elif kind is Wrong:
        assert [step.accepted for step in steps] == [0] * DRAWN_TOKENS * DRAWS
        # Nothing can be drafted for the first token, which the prompt's pass gives, and for the last.
        assert sum(len(step.draft) > 0 for step in steps) == (DRAWN_TOKENS - 2) * DRAWS
    else:
        drafted = [step for step in steps if len(step.draft)]
        accepting = [step for step in drafted if step.accepted]
        assert 0.5 < len(accepting) / len(drafted) < 0.97
        forked = [step for step in accepting if len(set(step.draft.parents.tolist())) < len(step.draft)]
        assert len(forked) > 0.3 * len(drafted)


@pytest.mark.parametrize("draft", ["itself", "another", "its own layers"])
def test_rejection_sampling_draws_from_the_target_whatever_the_draft_model(
    draft: str, small: LanguageModel, joint: np.ndarray
) -> None:
    """5,000 draws, with a draft model that is the target, one that knows nothing, and no model but some layers."""
    if draft == "its own layers":
        small = make_model(stop=False, vocab_size=SMALL, num_hidden_layers=3, hidden_size=16, seed=4)
        one, two, three = (
            exact_rows(small, DRAWN, [[*START, *text] for text in np.ndindex((SMALL,) * length)]).reshape(
                (SMALL,) * (length + 1)
            )
            for length in range(3)
        )
        joint = one[:, None, None] * two[:, :, None] * three
    models = {"itself": small, "another": make_model(stop=False, vocab_size=SMALL, hidden_size=16, seed=9)}
    engine = Engine(
        small,
        Method("model", {"gamma": "3"}, budget=3, verifier="rejection", draft_model=models.get(draft)),
        sampling=DRAWN,
    )
    texts, accepted = [], 0
    for draw in range(5_000):
        steps = list(engine.steps(START, 4, sample=draw))
        accepted += steps[1].accepted
        texts.append([token for step in steps for token in step.tokens])
    assert min(fits(texts, joint)) > 1e-3
    assert accepted == 10_000 if draft == "itself" else 1_000 < accepted < 9_000


def test_the_chi_square_test_notices_another_temperature(joint: np.ndarray, undrafted: list[list[int]]) -> None:
    assert min(fits(undrafted, joint)) > 1e-3
    # What a temperature of 1.7 gives, near enough.
    hotter = joint**0.7
    assert min(fits(undrafted, hotter / hotter.sum())) < 1e-6


def test_noise_is_a_function_of_seed_prompt_sample_and_position() -> None:
    noise = Noise.of(3, [1, 2, 3])
    tokens = np.arange(100)
    assert np.array_equal(noise.gumbel(7, tokens), noise.gumbel(7, tokens))
    assert np.array_equal(noise.gumbel(7, tokens[40:50]), noise.gumbel(7, tokens)[40:50])
    others = [noise.gumbel(8, tokens)]
    others += [Noise.of(*key).gumbel(7, tokens) for key in ((4, [1, 2, 3]), (3, [1, 2]), (3, [1, 2, 3], 1))]
    assert all(not np.array_equal(noise.gumbel(7, tokens), other) for other in others)


def test_noise_is_standard_gumbel() -> None:
    noise = Noise.of(0, [5])
    drawn = np.concatenate([noise.gumbel(position, np.arange(500)) for position in range(40)])
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
    verdict = make_verifier("greedy", Sampling()).verify(Case(draft, logits, 0, Noise.of(0, [])))
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
        make_verifier("greedy", Sampling(0.5))
    with pytest.raises(UsageError, match="no verifier"):
        make_verifier("magic", Sampling())


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 3000), st.floats(0.0, 60.0), st.floats(0.05, 5.0), st.integers(0, 1 << 40))
def test_the_race_is_the_argmax_of_all_sums(size: int, spread: float, temperature: float, seed: int) -> None:
    """Most logarithms are never taken; the winner is the one that taking all of them gives."""
    logits = (np.random.default_rng(seed).normal(size=size) * spread).astype(np.float32)
    noise = Noise.of(seed, [size])
    for position in range(3):
        sums = logits.astype(np.float64) / temperature + noise.gumbel(position, np.arange(size))
        drawn = pick(torch.from_numpy(logits), Sampling(temperature, seed=seed), noise, position)
        assert drawn == int(sums.argmax())


@settings(max_examples=300, deadline=None)
@given(
    st.integers(1, 2000), st.sampled_from([0.0, 0.01, 1.0, 10.0, 80.0]), st.floats(0.01, 0.999), st.integers(0, 1 << 40)
)
def test_the_nucleus_is_that_of_sorting_everything(size: int, spread: float, top_p: float, seed: int) -> None:
    logits = (np.random.default_rng(seed).normal(size=size) * spread).astype(np.float32)
    kept, _ = warp(torch.from_numpy(logits), Sampling(1.0, top_p=top_p))
    order = np.argsort(logits, kind="stable")
    mass = torch.softmax(torch.from_numpy(logits[order]).double(), dim=-1).cumsum(-1).numpy()
    expected = set(order[mass > 1 - top_p].tolist()) | {int(order[-1])}
    # Where the mass reaches the mark to within rounding, one token more or less is right.
    edge = {int(order[i]) for i in np.flatnonzero(np.abs(mass - (1 - top_p)) < 1e-9)}
    assert set(kept.tolist()) ^ expected <= edge
    assert (np.diff(kept) > 0).all()


@pytest.mark.parametrize("choice", [(0.0, 0, 1.0), (1.0, 0, 1.0), (0.7, 0, 0.95), (1.3, 20, 1.0), (0.9, 50, 0.5)])
def test_drawing_all_rows_on_their_device_is_drawing_each(choice: tuple[float, int, float]) -> None:
    sampling = Sampling(*choice, seed=3)
    logits = torch.from_numpy((np.random.default_rng(0).normal(size=(64, 5000)) * 3).astype(np.float32))
    noise, positions = Noise.of(3, [1, 2]), list(range(100, 164))
    each = [pick(row, sampling, noise, position) for row, position in zip(logits, positions, strict=True)]
    assert pick_rows(logits, sampling, noise, positions) == each
    assert len(set(each)) > 30


@pytest.mark.parametrize("choice", [(0.0, 0, 1.0), (1.0, 0, 1.0), (0.7, 5, 0.9)])
def test_logits_that_are_no_numbers_are_refused(choice: tuple[float, int, float]) -> None:
    logits = torch.tensor([1.0, float("nan"), 2.0] * 5)
    with pytest.raises(ModelError, match="NaN"):
        pick(logits, Sampling(*choice), Noise.of(0, []), 0)
    # Drawn on another device, or after warping: only the row itself is refused.
    rows = torch.stack([logits.nan_to_num(0.0), logits])
    assert [token < 0 for token in pick_rows(rows, Sampling(*choice), Noise.of(0, []), [0, 1])] == [False, True]
    for verifier in ("auto", "rejection", "csd"):
        for dtype in (torch.float32, torch.bfloat16):
            judge = make_verifier(verifier, Sampling(*choice))
            for row, case in enumerate(Case(empty(), rows[at : at + 1].to(dtype), 0, Noise.of(0, [])) for at in (0, 1)):
                (verdict,) = judge.verify_all([case])
                assert isinstance(verdict, ModelError) == bool(row)


def test_a_tiny_temperature_is_nearly_greedy() -> None:
    logits = torch.tensor([5.0, 9.0, 1.0])
    for top_p in (1.0, 0.9):
        assert pick(logits, Sampling(1e-40, top_p=top_p), Noise.of(0, []), 0) == 1
