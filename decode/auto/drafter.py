"""Auto: one tree from every source there is, each node by its calibrated probability."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from specds.decode.auto.acceptance import choose_acceptance
from specds.decode.auto.cross_request import CrossRequest
from specds.decode.auto.expansion import Grown, Limits, grow
from specds.decode.auto.features import (
    ALTERNATIVES,
    CONTEXT,
    DENSE,
    MODEL,
    ORIGINS,
    RECYCLING,
    SESSION,
    SOURCES,
    SUFFIX,
)
from specds.decode.auto.feedback import Feedback, reached
from specds.decode.auto.lookups import SuffixLookup, neighbours
from specds.decode.auto.ngrams import REACH, Followers, Likeliest
from specds.decode.auto.sources import Known, Picked
from specds.decode.auto.tries import DENSE_TRIE, MODEL_TRIE, Continuations, all_trees
from specds.decode.contracts import NO_RESOURCES, Drafter, Resources, Signal, Step, Use
from specds.decode.draft import Draft, Origin, empty
from specds.decode.pricing.benefit import Benefit
from specds.decode.pricing.curve import Prices
from specds.decode.registry import option
from specds.decode.text.context import Context
from specds.errors import UsageError
from specds.jit import compiled

# More is forgotten: some 100 MB.
_MOST_ANSWER_CONTEXTS, _MOST_LIKELIEST = 1 << 19, 1 << 18
# A source of which the offset at depth 1 is below this is asked now and then only.
_MUTED, _EVERY = -2.5, 16
# Drafting that takes less than this share of a plain step is always done; trials and longest pause of drafting.
_CHEAP, _DRAFTING_TRIALS, _DRAFTING_PAUSE = 0.02, 32, 32
# How fast the time that drafting takes is learned, and the longest time of a step that counts.
_DRAFTING_RATE, _LONGEST_DRAFTING = 0.05, 0.005
# Nodes that are less likely to be accepted are not gone into.
_FLOOR = 0.004
_LARGEST_MARGIN = 30.0
_NOTHING_PICKED = Picked(np.empty(0, np.int32), np.empty(0, np.float32), 0.0, 0.0)


class _Trial(NamedTuple):
    """A source that was asked after the tree was grown without it.

    Attributes:
        source: which.
        kind: of the step, by what was expected without it.
        grown, before: the tree with it and without it.
        seconds: that asking took.
    """

    source: int
    kind: int
    grown: Grown
    before: Grown
    seconds: float


class Auto(Drafter):
    """Merges all sources into one tree whose nodes have calibrated probabilities, grown as far as it may pay."""

    @dataclass(frozen=True, slots=True)
    class Options:
        """Options of auto."""

        without: str = option("", f"sources that are not asked, + between them: {', '.join(SOURCES)}")
        calibration: str = option(
            "", "what `specds calibrate-drafts` wrote; default: what lies beside the store, or what comes with specds"
        )
        session: str = option(
            "auto",
            "draft from earlier answers of this run, too: yes, no, or auto, which is with --budget auto",
            tries=(),
        )
        max_match: int = option(16, "longest suffix looked up in a store", least=1, tries=())
        neighbours: int = option(48, "neighbours of which a dense index gives continuations", least=1, tries=(24,))
        length: int = option(12, "most tokens of a neighbour's continuation", least=1, tries=())
        gamma: int = option(6, "most tokens that a draft model writes a step", least=1, tries=(3,))

    summary: ClassVar[str] = "one tree from all sources there are, each node for its calibrated probability"
    indexes: ClassVar[tuple[str, ...]] = ("suffix", "dense")
    draft_model: ClassVar[Use] = Use.OPTIONAL

    def __init__(self, options: Options, resources: Resources = NO_RESOURCES) -> None:
        self._options = options
        self._shared = resources.shared or CrossRequest()
        self._ensemble = self._shared.acceptance.ensemble
        left_out = sources_of(options.without)
        suffix = resources.suffix if SUFFIX not in left_out else ()
        self._suffix = SuffixLookup(suffix, options.max_match)
        self._dense = resources.dense if DENSE not in left_out else ()
        self._draft_model = resources.draft_model if MODEL not in left_out else None
        self._learning = self._shared.curve is not None
        self._terms = self._shared.terms
        self._session = shares_session(options.session, self._learning) and SESSION not in left_out
        there = {SESSION: self._session, SUFFIX: suffix, DENSE: self._dense, MODEL: self._draft_model}
        self._active = {CONTEXT, RECYCLING, ALTERNATIVES, *(source for source, one in there.items() if one)} - left_out
        self.needs = frozenset({Signal.TREE_TOPK, Signal.TREE_GAPS}) | (
            frozenset({Signal.HIDDEN}) if self._dense else frozenset()
        )
        self.asked: dict[str, float] = {}
        """Seconds that each source took for the last draft; `tree` is what the others take together."""
        self._begin(())

    @classmethod
    def cross_request(
        cls, options: Options, curve: Prices | None, stores: Sequence[Path], fingerprint: str
    ) -> CrossRequest:
        """See `Drafter.cross_request`; probabilities are those that lie beside a store, or that come with specds."""
        return CrossRequest(curve, acceptance=choose_acceptance(options.calibration, stores, fingerprint))

    def _begin(self, prompt: Sequence[int]) -> None:
        self._context = Context(prompt)
        self._followers = Followers()
        if len(self._shared.likeliest) > _MOST_LIKELIEST:
            self._shared.likeliest = Likeliest()
        self._likeliest = self._shared.likeliest if self._session else Likeliest()
        self._followers.extend(self._context.tokens, min(1, len(prompt)))
        self._picked = _NOTHING_PICKED
        self._hidden: NDArray[np.float32] | None = None
        self.grown: Grown | None = None
        self._trials: list[_Trial] = []
        self._steps = 0
        self._counted = len(prompt)
        self._observing = 0.0
        # Of the dense index's best neighbour: its similarity, and by how much the second is less similar.
        self._similarity = 0.0, 0.0
        self._benefit = {source: Benefit(gains) for source, gains in self._shared.gains.items()}
        self._draft_benefit = Benefit(self._shared.draft_gains, _DRAFTING_TRIALS, _DRAFTING_PAUSE)
        self._feedback = Feedback(self._shared.corrections if self._learning else None)

    def start(self, prompt: Sequence[int]) -> None:
        """See `Drafter.start`."""
        self._begin(prompt)
        self._suffix.skip()

    def observe(self, step: Step) -> None:
        """Learn from the pass, and from what became of the draft."""
        began = perf_counter()
        committed = np.array(step.tokens, np.int64)
        grown, self.grown = self.grown, None
        if grown is not None:
            self._feedback.observe(grown, committed)
            self._judge(grown, committed)
        ids, gaps = step.signals[Signal.TREE_TOPK], step.signals[Signal.TREE_GAPS]
        draft = step.draft
        if grown is not None or not self._steps:
            self._likeliest.record(self._context.tokens, draft.tokens, draft.parents, ids, gaps)
        row = 0 if len(step.tokens) == 1 else step.path[len(step.tokens) - 2] + 1
        self._picked = Picked(*_picked(ids[row], gaps[row], step.tokens[-1]))
        length = len(self._context.tokens)
        self._context.extend(step.tokens)
        if self._session:
            self._remember(length, step.index)
        if self._dense:
            self._hidden = step.signals[Signal.HIDDEN][-1]
        self._steps += 1
        self._observing = perf_counter() - began

    def _remember(self, length: int, index: int) -> None:
        """Earlier answers: the table of them takes in each token as it is committed."""
        if index == 0 and len(self._shared.answers) > _MOST_ANSWER_CONTEXTS:
            self._shared.answers = Followers()
        text = self._context.tokens
        begin = max(0, length - REACH)
        self._shared.answers.extend(text[begin:], length - begin)

    def propose(self, budget: int) -> Draft:
        """The merged tree, as far as more of it may raise the expected tokens per second; the budget cuts it."""
        began = perf_counter()
        most = min(budget, self._shared.most)
        self.asked = {}
        self._trials = []
        if most < 1:
            return empty()
        limits = Limits(self._terms.cost, min(most, len(self._terms.cost) - 2), _FLOOR, self._terms.gain)
        expensive = self._learning and self._terms.drafting > _CHEAP * self._plain()
        if expensive and not self._draft_benefit.decide(0):
            return empty()
        self._followers.extend(self._context.tokens, self._counted)
        self._counted = len(self._context.tokens)
        trees = dict(self._ask_suffix())
        asked = perf_counter()
        if len(self._suffix):
            self.asked[SOURCES[SUFFIX]] = asked - began
        at_once = bool(self._dense) and self._learning and self._benefit[DENSE].trust()
        if at_once:
            trees |= self._ask_dense()
            self.asked[SOURCES[DENSE]] = perf_counter() - asked
            asked = perf_counter()
        grown = self._grow(trees, limits)
        tree = perf_counter() - asked
        if self._dense and not at_once:
            grown = self._try(DENSE, grown, trees, limits)
        if self._draft_model is not None:
            grown = self._try(MODEL, grown, trees, limits)
        self.asked["tree"] = tree + self._observing
        self.grown = grown
        if self._learning:
            spent = perf_counter() - began + self._observing
            self._terms.drafting += _DRAFTING_RATE * (min(spent, _LONGEST_DRAFTING) - self._terms.drafting)
        return _draft(grown)

    def _try(self, source: int, grown: Grown, trees: dict[int, Continuations], limits: Limits) -> Grown:
        """The tree with a source that takes long, or as it is where asking does not pay; `trees` takes in what it says.

        What asking brought is known when the step is observed.
        """
        benefit = self._benefit[source]
        kind = benefit.kind(grown.expected)
        if self._learning and not benefit.decide(kind):
            return grown
        asked = perf_counter()
        new = self._ask_dense() if source == DENSE else self._ask_model(limits.most)
        trees |= new
        better = self._grow(trees, limits) if new else grown
        seconds = perf_counter() - asked
        self._trials.append(_Trial(source, kind, better, grown, seconds))
        self.asked[SOURCES[source]] = seconds
        return better

    def _plain(self) -> float:
        """Seconds that a token takes without drafts."""
        return float(self._terms.cost[1]) / self._terms.gain

    def _grow(self, trees: Mapping[int, Continuations], limits: Limits) -> Grown:
        known = Known(
            sum(1 << source for source in self._active),
            self._followers.rows,
            self._shared.answers.rows,
            self._likeliest.rows,
            self._picked,
            all_trees(trees),
            *self._similarity,
        )
        return grow(self._context.tokens, known, self._ensemble, self._feedback.offsets, limits)

    def _ask_suffix(self) -> Mapping[int, Continuations]:
        """The trees of the store that has served best so far; a source that is muted is asked now and then."""
        muted = self._feedback.offsets[SUFFIX, 0] < _MUTED
        if SUFFIX not in self._active or (muted and self._steps % _EVERY):
            self._suffix.skip()
            return {}
        return self._suffix.ask(self._context.tokens)

    def _ask_dense(self) -> Mapping[int, Continuations]:
        """Continuations of the nearest states' neighbours, as a tree."""
        if self._hidden is None:
            return {}
        last = int(self._context.tokens[-1])
        nearest = neighbours(self._dense, self._hidden, last, self._options.neighbours, self._options.length)
        if nearest is None:
            return {}
        self._similarity = nearest.similarity, nearest.margin
        return {DENSE_TRIE: nearest.continuations}

    def _ask_model(self, most: int) -> Mapping[int, Continuations]:
        """What the draft model generates."""
        if self._draft_model is None:
            return {}
        text = self._context.tokens.tolist()
        tokens, scores, _ = self._draft_model.generate(text, min(self._options.gamma, most), 0.0)
        if not tokens:
            return {}
        chain = np.arange(-1, len(tokens) - 1, dtype=np.int32)
        return {MODEL_TRIE: Continuations(np.array(tokens, np.int32), chain, np.array(scores, np.float64), 1.0)}

    def _judge(self, grown: Grown, committed: NDArray[np.int64]) -> None:
        """The benefit of drafting, that of asking the sources that take long, and which store was right."""
        cost = self._terms.cost
        if self._learning:
            saved = reached(grown, committed) * self._plain() - (cost[1 + grown.chosen] - cost[1])
            self._draft_benefit.observe(0, float(saved), self._terms.drafting)
        for source, kind, better, before, seconds in self._trials:
            tokens = reached(better, committed) - reached(before, committed)
            plain = self._plain() / max(before.expected, 1.0)
            rows = float(cost[1 + better.chosen] - cost[1 + before.chosen])
            self._benefit[source].observe(kind, tokens * plain - rows, seconds)
        self._suffix.observe(int(committed[0]))


@compiled
def _picked(ids: Any, gaps: Any, picked: int) -> Any:
    """`Picked` as a plain tuple.

    Args:
        ids: int32[TOP], likeliest first; -1 after the last.
        gaps: float32[TOP], by how much each one's logit is below the first's.
        picked: the token that was picked.
    """
    others, further = np.empty(len(ids), np.int32), np.empty(len(ids), np.float32)
    count, mass, weighted, margin = 0, 0.0, 0.0, _LARGEST_MARGIN
    for rank in range(len(ids)):
        if ids[rank] < 0:
            break
        if rank == 1:
            margin = min(float(gaps[rank]), _LARGEST_MARGIN)
        weight = np.exp(-float(gaps[rank]))
        mass += weight
        weighted += weight * float(gaps[rank])
        if ids[rank] != picked:
            others[count], further[count] = ids[rank], gaps[rank]
            count += 1
    # Σ w (log Σ w + gap) / Σ w
    return others[:count], further[:count], margin, np.log(mass) + weighted / mass


def sources_of(text: str) -> set[int]:
    """Sources by name, with + between them.

    Raises:
        UsageError: there is no such source.
    """
    names = [name for name in text.split("+") if name]
    for name in names:
        if name not in SOURCES:
            raise UsageError(f"no source {name!r}", f"one of {', '.join(SOURCES)}")
    return {SOURCES.index(name) for name in names}


def shares_session(text: str, learning: bool) -> bool:
    """Whether earlier answers are drafted from.

    Raises:
        UsageError: neither yes, no nor auto.
    """
    answers = {"yes": True, "no": False, "auto": learning}
    if text not in answers:
        raise UsageError(f"session is {text!r}", "yes, no or auto")
    return answers[text]


def _draft(grown: Grown) -> Draft:
    chosen = grown.order
    if not len(chosen):
        return empty()
    number = np.full(len(grown.tokens) + 1, -1, np.int32)
    number[chosen] = np.arange(len(chosen))
    return Draft(
        grown.tokens[chosen],
        number[grown.parents[chosen]],
        grown.chance[chosen].astype(np.float32),
        origin=Origin(ORIGINS, grown.sources[chosen].astype(np.int16), grown.places[chosen]),
    )
