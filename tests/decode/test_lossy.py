"""Lossy verifiers, against what their papers say of every token that is accepted lossily."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from specds.datastore.corrections import key_of
from specds.decode.contracts import Case, Verdict
from specds.decode.draft import Draft, Origin, Source
from specds.decode.engine import Engine
from specds.decode.method import Method
from specds.decode.verifiers import make_verifier
from specds.decode.verifiers.csd import Csd
from specds.errors import UsageError
from specds.model import LanguageModel
from specds.sampling import Noise, Sampling

from ..conftest import make_model
from .drafts import drafts
from .requests import Arriving, Asked

VOCABULARY = 8
NOISE = Noise.of(0, [])
_SOURCES = (Source("copy", retrieved=True), Source("guess", retrieved=False))


@st.composite
def judged(draw: st.DrawFn) -> tuple[Draft, torch.Tensor]:
    """A draft with sources, and logits over it, coarse enough for near ties."""
    draft = draw(drafts(vocabulary=VOCABULARY, most=16))
    count = len(draft)
    source = np.array(draw(st.lists(st.integers(0, 1), min_size=count, max_size=count)), np.int8)
    draft = Draft(
        draft.tokens, draft.parents, draft.score, None, Origin(_SOURCES, source, np.full(count, -1, np.int32))
    )
    random = np.random.default_rng(draw(st.integers(0, 1 << 20)))
    logits = random.normal(size=(count + 1, VOCABULARY)) * draw(st.sampled_from([0.3, 1.0, 3.0]))
    return draft, torch.from_numpy(logits.astype(np.float32))


def relaxed(draft: Draft, logits: torch.Tensor, **options: float) -> Verdict:
    settings = {name: str(value) for name, value in options.items()}
    return make_verifier("respec", Sampling(), settings).verify(Case(draft, logits, 0, NOISE))


def greedy(draft: Draft, logits: torch.Tensor) -> Verdict:
    return make_verifier("greedy", Sampling()).verify(Case(draft, logits, 0, NOISE))


@given(judged(), st.integers(1, 4), st.sampled_from([0.5, 2.0, 50.0]), st.integers(0, 3), st.integers(1, 4))
def test_what_respec_lets_pass_is_what_the_paper_allows(
    case: tuple[Draft, torch.Tensor], k: int, tau: float, matches: int, attempts: int
) -> None:
    draft, logits = case
    verdict = relaxed(draft, logits, k=k, tau=tau, matches=matches, attempts=attempts)
    strict = greedy(draft, logits)
    assert verdict.path[: len(strict.path)] == strict.path
    assert len(verdict.rescues) <= attempts
    lossily = {rescue.node: rescue for rescue in verdict.rescues}
    assert [node for node in verdict.path if node in lossily] == [rescue.node for rescue in verdict.rescues]
    parent, since = -1, 0
    log_p = torch.log_softmax(logits.double(), -1).numpy()
    for node in verdict.path:
        assert draft.parents[node] == parent
        row, token = log_p[parent + 1], int(draft.tokens[node])
        if node in lossily:
            assert int(draft.origin.source[node]) == 0  # type: ignore[union-attr]
            assert token in np.argsort(-row)[:k]  # Eq. 6
            assert row.max() - row[token] <= tau + 1e-6  # Eq. 7
            assert lossily[node].picked == int(row.argmax()) != token
            assert lossily[node].log_ratio == pytest.approx(row[token] - row.max(), abs=1e-5)
            assert since >= matches or node == verdict.rescues[0].node
            since = 0
        else:
            assert token == int(row.argmax())
            since += 1
        parent = node
    assert not verdict.rescues or since >= matches
    assert verdict.next_token == int(log_p[parent + 1].argmax())


@given(judged())
def test_respec_without_tolerance_or_attempts_is_strict(case: tuple[Draft, torch.Tensor]) -> None:
    for options in ({"tau": 0.0}, {"attempts": 0}):
        assert relaxed(*case, tau=options.get("tau", 9.0), attempts=options.get("attempts", 3)) == greedy(*case)


def test_respec_takes_the_copy_that_leads_furthest() -> None:
    # Two copies of the place where the target wants 7: one goes on to match once, the other twice.
    tokens, parents = [1, 2, 3, 4, 5], [-1, -1, 0, 1, 3]
    origin = Origin(_SOURCES, np.zeros(5, np.int8), np.full(5, -1, np.int32))
    draft = Draft(np.array(tokens, np.int32), np.array(parents, np.int32), np.ones(5, np.float32), None, origin)
    logits = torch.zeros(6, VOCABULARY)
    logits[0] = torch.tensor([0.0, 8, 8.5, 0, 0, 0, 0, 9])
    logits[1, 3] = logits[2, 4] = logits[4, 5] = logits[5, 6] = logits[3, 6] = 9.0
    assert greedy(draft, logits) == Verdict((), 7)
    verdict = relaxed(draft, logits, matches=1)
    assert (verdict.path, verdict.next_token) == ((1, 3, 4), 6)
    assert relaxed(draft, logits, matches=1, k=1).path == ()
    assert relaxed(draft, logits, matches=3).path == ()
    assert relaxed(draft, logits, matches=1, tau=0.4).path == ()


def test_lossy_verifiers_say_so_and_refuse_what_they_cannot_do() -> None:
    model = make_model(stop=False)
    assert not Engine(model, Method("pld", verifier="respec")).lossless
    assert Engine(model, Method("pld")).lossless
    with pytest.raises(UsageError, match="decodes greedily"):
        Engine(model, Method("pld", verifier="respec"), sampling=Sampling(0.7))
    with pytest.raises(UsageError, match="has no option 'gamma'"):
        Engine(model, Method("pld", verifier="respec", verifier_options={"gamma": "1"}))


def test_a_fallback_that_guesses_is_verified_strictly() -> None:
    """The whole text is greedy decoding's where nothing retrieved is drafted, however lenient the verifier."""
    model = make_model(stop=False)
    prompt = [9, 30, 12, 5, 77, 9, 30, 12]
    lenient = {"tau": "1000", "k": "128", "matches": "0", "attempts": "9"}
    plain = [step.tokens[0] for step in Engine(model).steps(prompt, 60)]

    def text(drafter: str, **options: str) -> list[int]:
        engine = Engine(model, Method(drafter, options, budget=12, verifier="respec", verifier_options=lenient))
        return [token for step in engine.steps(prompt, 60) for token in step.tokens]

    assert text("recycling") == plain
    assert text("respec", entropy="0") == plain  # never triggered: all of it is the fallback's
    assert text("pld") != plain


def csd(
    draft: Draft, logits: torch.Tensor, memory: dict[int, int], sampling: Sampling, **options: object
) -> tuple[Verdict, Csd]:
    settings = {name: str(value) for name, value in options.items()}
    verifier = make_verifier("csd", sampling, settings)
    assert isinstance(verifier, Csd)
    verifier.memory.counts.update(memory)
    return verifier.verify(Case(draft, logits, 0, NOISE)), verifier


def any_memory(draft: Draft, seed: int) -> dict[int, int]:
    random = np.random.default_rng(seed)
    return {key_of(d, t): int(random.integers(0, 12)) for d in range(VOCABULARY) for t in range(VOCABULARY)}


@given(judged(), st.integers(0, 1 << 20), st.integers(0, 8), st.sampled_from([0.01, 0.3, 0.9]))
def test_csd_accepts_what_algorithm_1_accepts(
    case: tuple[Draft, torch.Tensor], seed: int, frequency: int, tau: float
) -> None:
    draft, logits = case
    memory = any_memory(draft, seed)
    verdict, verifier = csd(draft, logits, memory, Sampling(), frequency=frequency, tau=tau)
    strict = greedy(draft, logits)
    assert verdict.path[: len(strict.path)] == strict.path
    rescued = {rescue.node: rescue for rescue in verdict.rescues}
    seen: dict[int, int] = dict(memory)
    node = -1
    for chosen in [*verdict.path, None]:
        row = logits[node + 1].numpy()
        picked = int(row.argmax())
        children = [child for child in range(len(draft)) if draft.parents[child] == node]
        if chosen is not None and int(draft.tokens[chosen]) == picked:
            assert chosen not in rescued
            node = chosen
            continue
        # The target's token was not drafted: the children that pass both tests, by counts from before this moment.
        passing = [
            child
            for child in children
            if seen[key_of(int(draft.tokens[child]), picked)] >= frequency
            and row[draft.tokens[child]] - row[picked] >= np.log(tau)
        ]
        best = max(passing, key=lambda child: (draft.score[child], -child), default=None)
        assert chosen == best
        if chosen is not None:
            rescue = rescued[chosen]
            assert (rescue.picked, rescue.count) == (picked, seen[key_of(int(draft.tokens[chosen]), picked)])
            assert rescue.log_ratio == pytest.approx(float(row[draft.tokens[chosen]] - row[picked]))
        for child in children:
            seen[key_of(int(draft.tokens[child]), picked)] += 1
        if chosen is None:
            assert verdict.next_token == picked
            break
        node = chosen
    assert verifier.memory.counts == seen


@given(judged(), st.integers(0, 1 << 20), st.sampled_from([0.0, 0.7]))
def test_csd_without_counts_or_beyond_the_gate_is_strict(
    case: tuple[Draft, torch.Tensor], seed: int, temperature: float
) -> None:
    draft, logits = case
    sampling = Sampling(temperature, seed=seed)
    strict = make_verifier("rejection", sampling).verify(Case(draft, logits, 0, NOISE))
    assert csd(draft, logits, {}, sampling, update=False)[0] == strict
    assert csd(draft, logits, any_memory(draft, seed), sampling, tau=1.5)[0] == strict
    if temperature == 0:
        assert strict == greedy(draft, logits)


@given(judged(), st.integers(0, 1 << 20))
def test_the_rules_that_csd_is_made_of_are_its_extremes(case: tuple[Draft, torch.Tensor], seed: int) -> None:
    draft, logits = case
    memory = any_memory(draft, seed)
    lossy = make_verifier("lossy", Sampling(), {"tau": "0.3"}).verify(Case(draft, logits, 0, NOISE))
    gate_alone = csd(draft, logits, {}, Sampling(), tau=0.3, frequency=0)[0]
    assert (lossy.path, lossy.next_token) == (gate_alone.path, gate_alone.next_token)
    ocm = make_verifier("ocm", Sampling(), {"frequency": "3"})
    ocm.memory.counts.update(memory)  # type: ignore[attr-defined]
    assert ocm.verify(Case(draft, logits, 0, NOISE)) == csd(draft, logits, memory, Sampling(), tau=0, frequency=3)[0]


@given(judged(), st.integers(0, 3), st.sampled_from([0.0, 0.5, 0.9]))
def test_fly_passes_mismatches_where_the_target_is_unsure_and_the_draft_goes_on(
    case: tuple[Draft, torch.Tensor], window: int, threshold: float
) -> None:
    draft, logits = case
    settings = {"window": str(window), "entropy": str(threshold)}
    verdict = make_verifier("fly", Sampling(), settings).verify(Case(draft, logits, 0, NOISE))
    passed = {rescue.node for rescue in verdict.rescues}
    p = torch.softmax(logits.double(), -1).numpy()
    shares = -(p * np.log(p)).sum(-1) / np.log(VOCABULARY)
    assert verdict.path[: len(greedy(draft, logits).path)] == greedy(draft, logits).path
    for place, node in enumerate(verdict.path):
        parent = int(draft.parents[node])
        if node in passed:
            assert shares[parent + 1] > threshold - 1e-5
            following = verdict.path[place + 1 : place + 1 + window]
            assert len(following) == window
            assert not passed & set(following)
        else:
            assert int(draft.tokens[node]) == int(p[parent + 1].argmax())


@pytest.mark.parametrize("quality", [0.0, 1.0, 4.0])
def test_rejection_sampling_keeps_the_targets_distribution(quality: float) -> None:
    """6,000 draws of one token with a draft model's q that is near p, or far from it; and of a tree without q."""
    random = np.random.default_rng(5)
    scores = random.normal(size=VOCABULARY) * 1.5
    logits = torch.from_numpy(np.stack([scores, random.normal(size=VOCABULARY)]).astype(np.float32))
    p = np.exp(scores - scores.max())
    p /= p.sum()
    guess = scores + random.normal(size=VOCABULARY) * quality
    q = np.exp(guess - guess.max())
    q /= q.sum()
    verifier = make_verifier("rejection", Sampling(1.0))
    drawn, accepted = np.zeros(VOCABULARY), 0
    for draw in range(6_000):
        token = int(random.choice(VOCABULARY, p=q))
        row = q[None].astype(np.float32)
        draft = Draft(np.array([token], np.int32), np.array([-1], np.int32), np.ones(1, np.float32), row)
        verdict = verifier.verify(Case(draft, logits, 3, Noise.of(0, [draw])))
        accepted += len(verdict.path)
        drawn[token if verdict.path else verdict.next_token] += 1
    assert stats.chisquare(drawn, p * drawn.sum()).pvalue > 1e-3
    share = np.minimum(p, q).sum()
    assert accepted / 6_000 == pytest.approx(share, abs=4 * np.sqrt(share * (1 - share) / 6_000) + 1e-3)


def test_rejection_sampling_keeps_it_on_trees_without_q() -> None:
    random = np.random.default_rng(6)
    logits = torch.from_numpy((random.normal(size=(4, VOCABULARY)) * 1.5).astype(np.float32))
    p = torch.softmax(logits[0].double(), -1).numpy()
    draft = Draft(np.array([2, 5, 1], np.int32), np.full(3, -1, np.int32), np.ones(3, np.float32))
    verifier = make_verifier("rejection", Sampling(1.0))
    drawn = np.zeros(VOCABULARY)
    accepted = 0
    for draw in range(6_000):
        verdict = verifier.verify(Case(draft, logits, 3, Noise.of(0, [draw])))
        accepted += len(verdict.path)
        drawn[int(draft.tokens[verdict.path[0]]) if verdict.path else verdict.next_token] += 1
    assert stats.chisquare(drawn, p * drawn.sum()).pvalue > 1e-3
    share = p[[2, 5, 1]].sum()
    assert accepted / 6_000 == pytest.approx(share, abs=4 * np.sqrt(share * (1 - share) / 6_000))


@pytest.fixture(scope="module")
def hesitant() -> LanguageModel:
    """A model of few tokens that repeats itself, so that prompt lookup is often nearly right."""
    return make_model(seed=2, stop=False, vocab_size=16, max_position_embeddings=512)


def many(model: LanguageModel, verifier: str, parallel: int, temperature: float = 0.0, **options: str) -> Arriving:
    """Twelve requests at once by a lossy verifier, with a fixed budget."""
    method = Method("pld", budget=8, verifier=verifier, verifier_options=options)
    engine = Engine(model, method, Sampling(temperature, seed=1), runtime="cpu")
    asked = [Asked(tuple((5 + 7 * seed + 7 * (place % 9)) % 16 for place in range(12)), 30) for seed in range(12)]
    arriving = Arriving(engine, asked)
    arriving.run(parallel)
    return arriving


def counts(arriving: Arriving) -> dict[int, int]:
    memory = arriving.engine.memory
    assert memory is not None
    return memory.counts


VERIFIERS = [
    ("respec", 0.0, {"matches": "0", "tau": "9", "k": "4"}),
    ("lossy", 0.0, {"tau": "0.05"}),
    ("lossy", 0.9, {"tau": "0.05"}),
    ("fly", 0.0, {"window": "1"}),
    ("csd", 0.0, {"frequency": "3", "tau": "0.01"}),
    ("csd", 0.9, {"frequency": "3", "tau": "0.01"}),
    ("ocm", 0.0, {"frequency": "3"}),
]


@pytest.mark.parametrize(("verifier", "temperature", "options"), VERIFIERS)
def test_lossy_texts_of_many_requests_are_the_same_each_time(
    verifier: str, temperature: float, options: dict[str, str], hesitant: LanguageModel
) -> None:
    """With a fixed budget; where nothing is counted also those of each request alone."""
    first, again, alone = (many(hesitant, verifier, parallel, temperature, **options) for parallel in (4, 4, 1))
    texts = [[one.text(number) for number in range(12)] for one in (first, again, alone)]
    assert texts[0] == texts[1]
    assert any(step.rescues for steps in first.steps.values() for step in steps)
    if first.engine.memory is None:
        assert texts[0] == texts[2]
    else:
        assert counts(first) == counts(again)


@pytest.mark.parametrize("verifier", ["csd", "ocm"])
def test_divergences_add_up_to_the_same_in_whatever_order_requests_count_them(
    verifier: str, hesitant: LanguageModel
) -> None:
    """As long as none passes; later it depends on who saw a pair first, and so on how many are decoded at once."""
    alone, *others = (many(hesitant, verifier, parallel, frequency="1000000") for parallel in (1, 4, 12))
    assert sum(counts(alone).values()) > 50
    for other in others:
        assert counts(other) == counts(alone)
