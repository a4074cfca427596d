"""Auto: one tree from every source there is, each node for what it is worth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from specds.decode.auto.acceptance import choose_acceptance
from specds.decode.auto.cross_request import CrossRequest
from specds.decode.auto.expansion import (
    CONTEXT,
    DENSE,
    GUESS,
    MODEL,
    ORIGINS,
    RECYCLING,
    SESSION,
    SOURCES,
    SUFFIX,
    SUFFIX_TRIES,
    Branches,
    Grown,
    Known,
    grow,
    make_tries,
)
from specds.decode.auto.feedback import Feedback, reached
from specds.decode.auto.lookups import neighbours, suffix_trees
from specds.decode.auto.ngrams import REACH, Followers, Rows
from specds.decode.contracts import NO_RESOURCES, Drafter, Resources, Signal, Step, Use
from specds.decode.draft import Draft, Origin, empty
from specds.decode.pricing.curve import Prices
from specds.decode.registry import option
from specds.decode.text.context import Context
from specds.errors import UsageError
from specds.jit import compiled

# More is forgotten: some 100 MB.
_SESSION_CONTEXTS, _SESSION_ROWS = 1 << 19, 1 << 18
# A source of which the offset at depth 1 is below this is asked now and then only.
_MUTED, _EVERY = -2.5, 16
# Drafting that takes less than this share of a plain step is always done.
_CHEAP = 0.02
_CONTEXT_STEP = 64
# Nodes that are less likely to be accepted are not gone into.
_FLOOR = 0.004
_SURE = 30.0
_EMPTY = np.empty(0, np.int32)
_NO_GAPS = np.empty(0, np.float32)


class Auto(Drafter):
    """Merges all sources into one tree whose nodes have calibrated probabilities, and verifies the part that pays."""

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
        self._suffix = resources.suffix if SUFFIX not in left_out else ()
        self._dense = resources.dense if DENSE not in left_out else ()
        self._draft_model = resources.draft_model if MODEL not in left_out else None
        always = {CONTEXT, RECYCLING, GUESS} | ({SUFFIX} if self._suffix else set())
        self._learning = self._shared.curve is not None
        self._session = shares_session(options.session, self._learning) and SESSION not in left_out
        self._active = {*always, *([SESSION] if self._session else [])} - left_out
        self.needs = frozenset({Signal.TREE_TOPK, Signal.TREE_GAPS}) | (
            frozenset({Signal.HIDDEN}) if self._dense else frozenset()
        )
        self._credit = np.full(len(self._suffix), 0.5)
        self._feedback = self._shared.feedback if self._learning else Feedback()
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
        if len(self._shared.rows) > _SESSION_ROWS:
            self._shared.rows = Rows()
        self._rows = self._shared.rows if self._session else Rows()
        self._followers.extend(self._context.tokens, min(1, len(prompt)))
        self._guesses = _EMPTY, _NO_GAPS
        self._sureness = 0.0, 0.0
        self._hidden: NDArray[np.float32] | None = None
        self.grown: Grown | None = None
        self._trials: list[tuple[int, int, Grown, Grown, float]] = []
        self._tops: list[tuple[int, int]] = []
        self._steps = 0
        self._counted = len(prompt)
        self._observing = 0.0
        self._nearness = 0.0, 0.0
        self._cost, self._cost_at = np.ones(self._shared.most + 2), -1
        if not self._learning:
            self._feedback = Feedback()

    def start(self, prompt: Sequence[int]) -> None:
        """See `Drafter.start`."""
        self._begin(prompt)
        self._feedback.start()
        self._shared.start()

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
            self._rows.keep(self._context.tokens, draft.tokens, draft.parents, ids, gaps)
        row = 0 if len(step.tokens) == 1 else step.path[len(step.tokens) - 2] + 1
        self._look(ids[row], gaps[row], step.tokens[-1])
        length = len(self._context.tokens)
        self._context.extend(step.tokens)
        if self._session:
            self._remember(length, step.index)
        if self._dense:
            self._hidden = step.signals[Signal.HIDDEN][-1]
        self._steps += 1
        self._observing = perf_counter() - began

    def _look(self, ids: NDArray[np.int32], gaps: NDArray[np.float32], picked: int) -> None:
        """What the distribution that the last token was picked from says beside it."""
        others, further, lead, entropy = _beside(ids, gaps, picked)
        self._guesses, self._sureness = (others, further), (lead, entropy)

    def _remember(self, length: int, index: int) -> None:
        """Earlier answers: the table of them takes in each token as it is committed."""
        if index == 0 and len(self._shared.answers) > _SESSION_CONTEXTS:
            self._shared.answers = Followers()
        text = self._context.tokens
        begin = max(0, length - REACH)
        self._shared.answers.extend(text[begin:], length - begin)

    def propose(self, budget: int) -> Draft:
        """The part of the merged tree that makes most expected tokens per second."""
        began = perf_counter()
        most = min(budget, self._shared.most)
        # Seconds of each source; `tree` is what those take together that are not named.
        self.asked = asking = dict[str, float]()
        self._trials = []
        if most < 1:
            return empty()
        cost = self._costs(most)
        dear = self._learning and self._shared.drafting > _CHEAP * cost[1]
        if dear and not self._shared.draft_benefit.decide(0):
            return empty()
        self._followers.extend(self._context.tokens, self._counted)
        self._counted = len(self._context.tokens)
        trees = self._suffix_trees()
        asked = perf_counter()
        if self._suffix:
            asking["suffix"] = asked - began
        at_once = bool(self._dense) and self._learning and self._shared.benefit[DENSE].trust()
        if at_once:
            trees = {**trees, **self._near(most)}
            asking[SOURCES[DENSE]] = perf_counter() - asked
            asked = perf_counter()
        grown = self._grow(trees, cost, most)
        tree = perf_counter() - asked
        for source, ask in ((DENSE, self._near), (MODEL, self._say)):
            if not (self._dense if source == DENSE else self._draft_model) or (source == DENSE and at_once):
                continue
            benefit = self._shared.benefit[source]
            kind = benefit.kind(grown.expected)
            if self._learning and not benefit.decide(kind):
                continue
            asked = perf_counter()
            found = ask(most)
            trees = {**trees, **found}
            better = self._grow(trees, cost, most) if found else grown
            seconds = perf_counter() - asked
            self._trials.append((source, kind, better, grown, seconds))
            grown = better
            asking[SOURCES[source]] = seconds
        asking["tree"] = tree + self._observing
        self.grown = grown
        if self._learning:
            spent = perf_counter() - began + self._observing
            self._shared.drafting += 0.05 * (min(spent, 0.005) - self._shared.drafting)
        return _draft(grown)

    def _costs(self, most: int) -> NDArray[np.float64]:
        """float64[most + 2]: seconds of a step over n rows, drafting included; 1 each where nothing is weighed."""
        context = len(self._context.tokens)
        curve = self._shared.curve
        if curve is None:
            return self._cost
        if self._cost_at < 0 or abs(context - self._cost_at) > _CONTEXT_STEP:
            self._cost, self._cost_at = curve.at(context) + self._shared.drafting, context
            # More rows than a node each are never needed, and entries are asked for one behind the last.
            self._cost = np.append(self._cost, self._cost[-1])
        return self._cost

    def _grow(self, trees: dict[int, tuple[Branches, float, int]], cost: NDArray[np.float64], most: int) -> Grown:
        similarity, margin = self._nearness
        active = sum(1 << source for source in self._active)
        known = Known(self._followers.rows, self._shared.answers.rows, self._rows.keys, self._rows.ids, self._rows.gaps)
        return grow(
            self._context.tokens,
            known,
            make_tries(trees, similarity, margin),
            self._guesses,
            self._sureness,
            self._ensemble,
            self._feedback.offsets,
            active,
            cost,
            most,
            _FLOOR,
        )

    def _suffix_trees(self) -> dict[int, tuple[Branches, float, int]]:
        """The trees of the store that has served best so far, of those the one with the longest match."""
        self._tops = []
        if SUFFIX not in self._active:
            return {}
        muted = self._feedback.offsets[SUFFIX, 0] < _MUTED
        if muted and self._steps % _EVERY:
            return {}
        tail = self._context.tokens[-self._options.max_match :]
        found = [suffix_trees(index.parts, tail) for index in self._suffix]
        best = 0
        if len(found) > 1:
            self._tops = [(number, int(one[0][0][0][0])) for number, one in enumerate(found) if one]
            values = [float(self._credit[n]) * min(one[0][2], 8) if one else 0.0 for n, one in enumerate(found)]
            best = int(np.argmax(values))
        return found[best]

    def _near(self, most: int) -> dict[int, tuple[Branches, float, int]]:
        """Continuations of the nearest states' neighbours, as a tree."""
        if self._hidden is None:
            return {}
        last = int(self._context.tokens[-1])
        near = neighbours(self._dense, self._hidden, last, self._options.neighbours, self._options.length)
        if near is None:
            return {}
        self._nearness = near.similarity, near.margin
        return {SUFFIX_TRIES: (near.branches, near.weight, 0)}

    def _say(self, most: int) -> dict[int, tuple[Branches, float, int]]:
        """What the draft model writes."""
        if self._draft_model is None:
            return {}
        text = self._context.tokens.tolist()
        tokens, scores, _ = self._draft_model.say(text, min(self._options.gamma, most), 0.0)
        if not tokens:
            return {}
        chain = np.arange(-1, len(tokens) - 1, dtype=np.int32)
        branches = np.array(tokens, np.int32), chain, np.array(scores, np.float64)
        return {SUFFIX_TRIES + 1: (branches, 1.0, 0)}

    def _judge(self, grown: Grown, committed: NDArray[np.int64]) -> None:
        """The benefit of drafting, that of asking the sources that take long, and which store was right."""
        if self._learning:
            saved = reached(grown, committed) * self._cost[1] - (self._cost[1 + grown.chosen] - self._cost[1])
            self._shared.draft_benefit.observe(0, float(saved), self._shared.drafting)
        for source, kind, better, before, seconds in self._trials:
            tokens = reached(better, committed) - reached(before, committed)
            cost = self._cost
            plain = float(cost[1]) / max(before.expected, 1.0)
            rows = float(cost[1 + better.chosen] - cost[1 + before.chosen])
            self._shared.benefit[source].observe(kind, tokens * plain - rows, seconds)
        for number, token in self._tops:
            self._credit[number] += 0.1 * (float(token == committed[0]) - self._credit[number])


@compiled
def _beside(ids: Any, gaps: Any, picked: int) -> Any:
    """The likeliest tokens but the one that was picked, their gaps, and lead and entropy of them all."""
    others, further = np.empty(len(ids), np.int32), np.empty(len(ids), np.float32)
    count, mass, weighted, lead = 0, 0.0, 0.0, _SURE
    for rank in range(len(ids)):
        if ids[rank] < 0:
            break
        if rank == 1:
            lead = min(float(gaps[rank]), _SURE)
        weight = np.exp(-float(gaps[rank]))
        mass += weight
        weighted += weight * float(gaps[rank])
        if ids[rank] != picked:
            others[count], further[count] = ids[rank], gaps[rank]
            count += 1
    # Σ w (log Σ w + gap) / Σ w
    return others[:count], further[:count], lead, np.log(mass) + weighted / mass


def sources_of(text: str) -> set[int]:
    """Sources by name, with + between them.

    Raises:
        UsageError: there is no such source.
    """
    found = set()
    for name in filter(None, text.split("+")):
        if name not in SOURCES:
            raise UsageError(f"no source {name!r}", f"one of {', '.join(SOURCES)}")
        found.add(SOURCES.index(name))
    return found


def shares_session(text: str, learning: bool) -> bool:
    """Whether earlier answers are drafted from.

    Raises:
        UsageError: neither yes, no nor auto.
    """
    said = {"yes": True, "no": False, "auto": learning}
    if text not in said:
        raise UsageError(f"session is {text!r}", "yes, no or auto")
    return said[text]


def _draft(grown: Grown) -> Draft:
    chosen = grown.order[: grown.chosen]
    if not len(chosen):
        return empty()
    number = np.full(len(grown.tokens) + 1, -1, np.int32)
    number[chosen] = np.arange(len(chosen))
    return Draft(
        grown.tokens[chosen],
        number[grown.parents[chosen]],
        grown.chance[chosen].astype(np.float32),
        origin=Origin(ORIGINS, grown.mask[chosen].astype(np.int8), grown.place[chosen]),
    )
