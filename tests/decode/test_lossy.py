"""Verifiers that let near misses pass, against what their papers say of every token they let pass."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specds.decode.contracts import Verdict
from specds.decode.draft import Draft, Origin, Source
from specds.decode.engine import Engine
from specds.decode.verifiers import make_verifier
from specds.errors import UsageError
from specds.sampling import Sampling

from ..conftest import make_model
from .drafts import drafts

VOCABULARY = 8
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
    return make_verifier("respec", Sampling(), settings).verify(draft, logits, 0)


def greedy(draft: Draft, logits: torch.Tensor) -> Verdict:
    return make_verifier("greedy", Sampling()).verify(draft, logits, 0)


@given(judged(), st.integers(1, 4), st.sampled_from([0.5, 2.0, 50.0]), st.integers(0, 3), st.integers(1, 4))
def test_what_respec_lets_pass_is_what_the_paper_allows(
    case: tuple[Draft, torch.Tensor], k: int, tau: float, matches: int, attempts: int
) -> None:
    draft, logits = case
    verdict = relaxed(draft, logits, k=k, tau=tau, matches=matches, attempts=attempts)
    strict = greedy(draft, logits)
    assert verdict.path[: len(strict.path)] == strict.path
    assert len(verdict.rescues) <= attempts
    let_pass = {rescue.node: rescue for rescue in verdict.rescues}
    assert [node for node in verdict.path if node in let_pass] == [rescue.node for rescue in verdict.rescues]
    parent, since = -1, 0
    log_p = torch.log_softmax(logits.double(), -1).numpy()
    for node in verdict.path:
        assert draft.parents[node] == parent
        row, token = log_p[parent + 1], int(draft.tokens[node])
        if node in let_pass:
            assert int(draft.origin.source[node]) == 0  # type: ignore[union-attr]
            assert token in np.argsort(-row)[:k]  # Eq. 6
            assert row.max() - row[token] <= tau + 1e-6  # Eq. 7
            assert let_pass[node].picked == int(row.argmax()) != token
            assert let_pass[node].log_ratio == pytest.approx(row[token] - row.max(), abs=1e-5)
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
    assert not Engine(model, "pld", verifier="respec").lossless
    assert Engine(model, "pld").lossless
    with pytest.raises(UsageError, match="decodes greedily"):
        Engine(model, "pld", verifier="respec", sampling=Sampling(0.7))
    with pytest.raises(UsageError, match="has no option 'gamma'"):
        Engine(model, "pld", verifier="respec", verifier_options={"gamma": "1"})


def test_a_fallback_that_guesses_is_verified_strictly() -> None:
    """The whole text is greedy decoding's where nothing retrieved is drafted, however lenient the verifier."""
    model = make_model(stop=False)
    prompt = [9, 30, 12, 5, 77, 9, 30, 12]
    lenient = {"tau": "1000", "k": "128", "matches": "0", "attempts": "9"}
    plain = [step.tokens[0] for step in Engine(model).steps(prompt, 60)]

    def text(drafter: str, **options: str) -> list[int]:
        engine = Engine(model, drafter, options, verifier="respec", verifier_options=lenient, budget=12)
        return [token for step in engine.steps(prompt, 60) for token in step.tokens]

    assert text("recycling") == plain
    assert text("respec", entropy="0") == plain  # never triggered: all of it is the fallback's
    assert text("pld") != plain
