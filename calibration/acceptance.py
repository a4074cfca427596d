"""How probable it is that a drafted token is accepted: nodes collected while decoding, and a model fitted to them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specds.decode.answering import Turn
from specds.decode.auto.acceptance import Acceptance, Reliability
from specds.decode.auto.drafter import Auto
from specds.decode.auto.expansion import Grown
from specds.decode.auto.features import FEATURES
from specds.decode.auto.probability import SUREST, Ensemble, log_odds
from specds.decode.contracts import Drafter, Step
from specds.decode.draft import Draft
from specds.decode.engine import Engine
from specds.errors import SpecdsError, UsageError
from specds.jit import compiled
from specds.reading.prompts import BadRow, Prompt

LOOKED_AT = 24
"""Nodes that growth goes through while nodes are collected: more than are verified, which then are known, too."""

_BINS = 20


@dataclass(slots=True)
class Nodes:
    """Candidates whose parent the target accepted, and whether it picked them.

    Attributes:
        features: float32[n, len(FEATURES)].
        right: bool[n].
        prompt: int32[n], numbers of the prompts.
    """

    features: NDArray[np.float32]
    right: NDArray[np.bool_]
    prompt: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.right)

    @classmethod
    def join(cls, parts: Sequence[Nodes]) -> Nodes:
        """Concatenated; prompts of different parts are different."""
        starts = np.cumsum([0, *(int(part.prompt.max(initial=0)) + 1 for part in parts)])
        return cls(
            np.concatenate([part.features for part in parts]),
            np.concatenate([part.right for part in parts]),
            np.concatenate([part.prompt + start for part, start in zip(parts, starts, strict=False)]),
        )


class Watched(Drafter):
    """A drafter `auto` whose trees are kept: what it looked at after each text, to be judged when the text is known.

    Args:
        rows: most nodes that are verified; growth goes further.

    Attributes:
        kept: what was grown, each with the length of the text that it was grown after.
        first: the tokens of the first step that it observed.
    """

    def __init__(self, inner: Auto, rows: int) -> None:
        self._inner, self._rows = inner, rows
        self.first: tuple[int, ...] = ()
        self.needs = inner.needs
        self.kept: list[tuple[int, Grown]] = []
        self._length = 0

    def start(self, prompt: Sequence[int]) -> None:
        """See `Drafter.start`."""
        self._length = len(prompt)
        self._inner.start(prompt)

    def observe(self, step: Step) -> None:
        """See `Drafter.observe`."""
        self.first = self.first or step.tokens
        self._length += len(step.tokens)
        self._inner.observe(step)

    def propose(self, budget: int) -> Draft:
        """See `Drafter.propose`."""
        draft = self._inner.propose(LOOKED_AT)
        if self._inner.grown is not None:
            self.kept.append((self._length, self._inner.grown))
        return draft.trim(min(budget, self._rows))


@compiled
def _judged(tokens: Any, parents: Any, text: Any, at: int, rows: Any, right: Any) -> int:
    """The nodes whose parent stands in the text, and which of them do; returns how many.

    Args:
        tokens, parents: integers [k], a draft; a parent of -1 is the root.
        text: integers [n]; `at` is where the draft's first token would stand.
        rows, right: integers [k] and bool[k], which are written.
    """
    node, count, start = -1, 0, 0
    while at < len(text):
        following = -1
        for child in range(start, len(tokens)):
            if parents[child] != node:
                continue
            rows[count], right[count] = child, tokens[child] == text[at]
            if right[count]:
                following = child
            count += 1
        if following < 0:
            break
        node, start = following, following + 1
        at += 1
    return count


def judge(kept: Sequence[tuple[int, Grown]], text: Sequence[int]) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """Features and outcomes of what was looked at, now that the text is whole.

    Args:
        kept: what was grown, each with the length of the text that it was grown after.
    """
    whole = np.array(text, np.int64)
    features, outcomes = [np.empty((0, len(FEATURES)), np.float32)], [np.empty(0, np.bool_)]
    for length, grown in kept:
        rows, right = np.empty(len(grown.tokens), np.int64), np.empty(len(grown.tokens), np.bool_)
        count = _judged(grown.tokens, grown.parents, whole, length, rows, right)
        features.append(grown.features[rows[:count]])
        outcomes.append(right[:count])
    return np.concatenate(features), np.concatenate(outcomes)


@dataclass(slots=True)
class Collected:
    """What was collected so far.

    Attributes:
        nodes: of each prompt.
        failed: prompts that could not be answered.
        tokens, steps: of all answers.
    """

    nodes: list[Nodes] = field(default_factory=list)
    failed: list[tuple[str, SpecdsError]] = field(default_factory=list)
    tokens: int = 0
    steps: int = 0


def collect(
    engine: Engine,
    prompts: Iterable[Prompt | BadRow],
    max_new_tokens: int,
    *,
    rows: int = 8,
    parallel: int = 1,
    progress: Callable[[Collected], None] = lambda state: None,
) -> Collected:
    """Decode prompts by `auto`, and keep what it looked at.

    Args:
        engine: of drafter `auto` with a fixed budget.
        rows: most nodes verified a step. Where a step begins depends on it, and so do the nodes that are met.
        parallel: most prompts answered at once. Where requests share what they learn, trees depend on it; they are the
            same again with the same number.

    Raises:
        UsageError: an engine of another drafter, or whose drafts depend on the clock.
    """
    if engine.method.drafter != "auto" or engine.method.budget is None:
        raise UsageError("calibrating drafts takes drafter auto with a fixed budget", f"--budget {LOOKED_AT}")
    state = Collected()
    watched: list[Watched] = []

    def watch(drafter: Any) -> Watched:
        watched.append(Watched(drafter, rows))
        return watched[-1]

    def kept(turn: Turn) -> list[tuple[int, Grown]]:
        """What was grown for a turn's text, which is then not kept any more."""
        # The very tuple, not an equal one: two requests may begin alike.
        own = [one for one in watched if one.first is turn.steps[0].tokens]
        watched[:] = [one for one in watched if one.first is not turn.steps[0].tokens]
        return own[0].kept if own else []  # of a text of one step nothing was drafted

    engine.wrap = watch
    try:
        for answered in engine.answers(prompts, max_new_tokens, parallel=parallel):
            if answered.answer is None:
                assert answered.error is not None
                state.failed.append((answered.prompt.id, answered.error))
                continue
            turns = [judge(kept(turn), [*turn.prompt, *turn.tokens]) for turn in answered.answer.turns]
            right = np.concatenate([outcomes for _, outcomes in turns])
            features = np.concatenate([seen for seen, _ in turns])
            state.nodes.append(Nodes(features, right, np.zeros(len(right), np.int32)))
            state.tokens += answered.answer.counters.tokens
            state.steps += answered.answer.counters.steps
            progress(state)
    finally:
        engine.wrap = None
    return state


@dataclass(frozen=True, slots=True)
class Fit:
    """How a model is fitted.

    Attributes:
        trees, leaves, least: their number, their size, and the fewest nodes in a leaf.
        rate: how much of each tree counts.
        held_out: every so many prompts one is kept to measure the calibration on; 0: none.
    """

    trees: int = 60
    leaves: int = 12
    least: int = 80
    rate: float = 0.12
    held_out: int = 4


FIT = Fit()


def fit(nodes: Nodes, about: Mapping[str, Any], how: Fit = FIT) -> Acceptance:
    """Fit gradient-boosted trees (log loss) to nodes; the calibration is measured on prompts that are held out.

    Raises:
        UsageError: there are too few nodes, or all went the same way.
    """
    from sklearn.ensemble import HistGradientBoostingClassifier

    if len(nodes) < 2 * how.least or nodes.right.all() or not nodes.right.any():
        raise UsageError(
            f"{len(nodes):,} candidates were seen, {int(nodes.right.sum()):,} of them right", "give more prompts"
        )
    held = nodes.prompt % how.held_out == how.held_out - 1 if how.held_out else np.zeros(len(nodes), np.bool_)
    if held.all() or nodes.right[~held].all() or not nodes.right[~held].any():
        held[:] = False

    def fitted(kept: NDArray[np.bool_]) -> Ensemble:
        forest = HistGradientBoostingClassifier(
            max_iter=how.trees,
            max_leaf_nodes=how.leaves,
            min_samples_leaf=how.least,
            learning_rate=how.rate,
            early_stopping=False,
            random_state=0,
        )
        forest.fit(nodes.features[kept], nodes.right[kept])
        return _ensemble(forest)

    ensemble = fitted(~held)
    measured = reliability(chances(ensemble, nodes.features[held]), nodes.right[held]) if held.any() else None
    counted = {"nodes": len(nodes), "prompts": len(np.unique(nodes.prompt))}
    return Acceptance(ensemble, measured, {**about, **counted})


def _ensemble(forest: Any) -> Ensemble:
    """scikit-learn's trees as arrays."""
    roots: list[int] = []
    feature: list[int] = []
    threshold: list[float] = []
    left: list[int] = []
    right: list[int] = []
    for (predictor,) in forest._predictors:
        start = len(feature)
        roots.append(start)
        for node in predictor.nodes:
            leaf = bool(node["is_leaf"])
            feature.append(-1 if leaf else int(node["feature_idx"]))
            threshold.append(float(node["value"] if leaf else node["num_threshold"]))
            left.append(-1 if leaf else start + int(node["left"]))
            right.append(-1 if leaf else start + int(node["right"]))
    base = float(np.asarray(forest._baseline_prediction).reshape(-1)[0])
    return Ensemble(
        base,
        np.array(roots, np.int32),
        np.array(feature, np.int32),
        np.array(threshold, np.float32).round(5),
        np.array(left, np.int32),
        np.array(right, np.int32),
    )


@compiled
def _odds(ensemble: Any, features: Any) -> Any:
    """float64[n]: the log-odds of each row of features, float32[n, columns]."""
    odds = np.empty(len(features))
    for row in range(len(features)):
        odds[row] = log_odds(ensemble, features[row])
    return odds


def chances(ensemble: Ensemble, features: NDArray[np.float32]) -> NDArray[np.float64]:
    """float64[n]: the probabilities that `grow` gives nodes, before corrections and before siblings share 1."""
    odds: NDArray[np.float64] = _odds(ensemble, features)
    return np.minimum(1.0 / (1.0 + np.exp(-odds)), SUREST)


def reliability(chance: NDArray[np.float64], right: NDArray[np.bool_]) -> Reliability:
    """How far probabilities are from how often they came true."""
    edges = np.linspace(0.0, 1.0, _BINS + 1)
    place = np.minimum((chance * _BINS).astype(np.int64), _BINS - 1)
    counts = np.bincount(place, minlength=_BINS)
    predicted = np.bincount(place, chance, _BINS) / np.maximum(counts, 1)
    accepted = np.bincount(place, right.astype(np.float64), _BINS) / np.maximum(counts, 1)
    off = counts * np.abs(predicted - accepted)
    likely = slice(_BINS // 10, None)
    return Reliability(
        tuple(edges.round(6).tolist()),
        tuple(counts.tolist()),
        tuple(predicted.round(5).tolist()),
        tuple(accepted.round(5).tolist()),
        float(off.sum() / max(counts.sum(), 1)),
        float(off[likely].sum() / max(counts[likely].sum(), 1)),
    )
