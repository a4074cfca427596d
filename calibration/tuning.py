"""Tuning: which drafter, options and budget would have been fastest on recorded answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specds.calibration.answers import Recorded
from specds.calibration.replay import Replay, Shared
from specds.decode.assembly import check_method, drafter_class
from specds.decode.method import Method, parse_budget
from specds.decode.pricing.curve import CostCurve
from specds.decode.registry import choices
from specds.errors import InputError, UsageError
from specds.model import LanguageModel

ALL = "all"
"""The group of all prompts."""

_BUDGETS = ("auto", "2", "4", "8", "16", "32", "64")
# Drafting is timed, and a clock is never quite the same twice.
_GAIN = 1.002
_READINGS = 1 << 30
_RESAMPLES = 2_000
_SURE = (2.5, 97.5)

LEAST_JUDGED = 5
"""Prompts below which a speed is not judged: an interval over fewer says nothing."""


@dataclass(frozen=True, slots=True)
class Margin:
    """A speed over another, with its 95 % interval over prompts drawn again and again."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Rejected:
    """A setting that was the fastest where it was chosen, and its speed over the default's where it was judged."""

    setting: Method
    margin: Margin


@dataclass(frozen=True, slots=True)
class Best:
    """The fastest setting for a group of prompts, and how fast it is on prompts that it was not chosen by.

    Attributes:
        group: its name; `all` for every prompt.
        setting: chosen on the training prompts, and surely not slower than the default on the held-out ones; else the
            default.
        untuned: the method as its word gives it, before its search.
        default: decoding without a configuration: drafter `auto`, with the stores that the methods name or without
            any, whichever is faster.
        prompts, held_out: how many it was chosen by, and how many it is judged on.
        tokens_per_second, untuned_tokens_per_second, default_tokens_per_second, plain_tokens_per_second: predicted on
            the held-out prompts; on the training prompts where none is held out.
        margin: the setting's speed over the default's, there.
        rejected: what was chosen on the training prompts, where the default stands instead.
    """

    group: str
    setting: Method
    untuned: Method
    default: Method
    prompts: int
    held_out: int
    tokens_per_second: float
    untuned_tokens_per_second: float
    default_tokens_per_second: float
    plain_tokens_per_second: float
    margin: Margin
    rejected: Rejected | None = None


@dataclass(frozen=True, slots=True)
class Tuning:
    """What a search found.

    Attributes:
        best: of all prompts first, then by group.
        trials: settings replayed.
        unjudged: groups with too few prompts to be judged, and how many there are to judge by.
    """

    best: tuple[Best, ...]
    trials: int
    unjudged: tuple[tuple[str, int], ...] = ()


def tune(
    model: LanguageModel,
    methods: Sequence[Method],
    answers: Sequence[Recorded],
    curve: CostCurve,
    *,
    held_out: float = 1 / 3,
    trials: int = 40,
    runtime: str = "auto",
    progress: Callable[[int], None] = lambda done: None,
) -> Tuning:
    """Search each method's options and budget by replay, for the fewest predicted seconds.

    From the defaults on, one thing after another is changed: the budget, then each option over the values that the
    drafter names; what helps stays. It ends when a round changes nothing, or after so many trials. What a method's
    word fixes is left as it is. Decoding without a configuration is tried, too: drafter `auto` without a store, and
    with all that the methods name. The fastest setting tried is taken, for all prompts and for each group, if it is
    surely not slower than that on prompts that it was not chosen by.

    Args:
        methods: without a draft model or a verifier.
        answers: of one model; their groups are told apart.
        curve: T(n) of the machine that will decode.
        held_out: share of each group's prompts that nothing is chosen by; at least one where there are two.
        trials: most settings of a method.
        progress: called with the number of settings tried.

    Raises:
        UsageError: no method to tune, a share outside [0, 1), or what `Replay` refuses.
        InputError: too few prompts to judge anything by.
    """
    if not methods or not 0 <= held_out < 1:
        raise UsageError(
            f"--held-out is {held_out}" if methods else "no method to tune", "0 or more, and below 1" if methods else ""
        )
    for method in methods:
        if method.verifier != "auto" or method.verifier_options:
            raise UsageError(f"{method.name} names a verifier", "the text is not tuned: leave it to lossless ones")
    judged = _held_out(answers, held_out)
    train = [answer for answer, out in zip(answers, judged, strict=True) if not out]
    rest = [answer for answer, out in zip(answers, judged, strict=True) if out] or train
    _check_enough(len(_prompts(rest, ALL)), len(_prompts(answers, ALL)), held_out)
    shared = Shared(model, runtime, bytes=_READINGS)
    Replay(model, methods, curve=curve, shared=shared)  # what cannot be replayed is refused before anything takes long
    tried = _Tried(train, curve, shared, progress)
    defaults = _defaults(methods)
    tried.begin(defaults)
    for method in methods:
        _search(method, tried, trials)
    named = dict.fromkeys(answer.group for answer in answers if answer.group)
    judges = {name: len(_prompts(rest, name)) for name in (named if len(named) > 1 else ())}
    groups = [ALL, *(name for name, count in judges.items() if count >= LEAST_JUDGED)]
    chosen = {group: tried.best(_members(train, group)) for group in groups}
    wanted = {*defaults, *chosen.values(), *(tried.origin[setting] for setting in chosen.values())}
    tested = _Tried(rest, curve, shared, lambda done: None)
    tested.run(sorted(wanted, key=lambda setting: setting.name))
    best = [
        _judge(group, setting, tried.origin[setting], defaults, tested, len(_prompts(train, group)), rest is not train)
        for group, setting in chosen.items()
    ]
    few = tuple((name, count) for name, count in judges.items() if count < LEAST_JUDGED)
    return Tuning(tuple(best), len(tried.seconds), few)


def _check_enough(judges: int, prompts: int, held_out: float) -> None:
    if judges >= LEAST_JUDGED:
        return
    least = math.floor((LEAST_JUDGED - 0.5) / held_out) + 1 if held_out else LEAST_JUDGED
    raise InputError(
        f"{judges} of {prompts} prompts are there to judge by, and by fewer than {LEAST_JUDGED} nothing can be said",
        f"decode and give {least} or more"
        + (f", or --held-out {LEAST_JUDGED / prompts:.2f}" if prompts >= 2 * LEAST_JUDGED else ""),
    )


def _defaults(methods: Sequence[Method]) -> tuple[Method, ...]:
    """What `decode` does without a configuration: without a store, and with all that the methods name."""
    stores = tuple(dict.fromkeys(path for method in methods for path in method.paths))
    return tuple(dict.fromkeys((Method("auto"), Method("auto", stores=stores))))


class _Tried:
    """Settings replayed over some answers: predicted seconds of each answer, and what each was changed from."""

    def __init__(
        self, answers: Sequence[Recorded], curve: CostCurve, shared: Shared, progress: Callable[[int], None]
    ) -> None:
        self.answers = answers
        self.seconds: dict[Method, NDArray[np.float64]] = {}
        self.origin: dict[Method, Method] = {}
        self.plain = np.zeros(len(answers))
        self._curve, self._shared, self._progress = curve, shared, progress

    def begin(self, settings: Sequence[Method]) -> None:
        """Replay settings that were changed from nothing."""
        self.run(settings)
        self.origin.update({setting: setting for setting in settings})

    def run(self, settings: Sequence[Method]) -> None:
        """Replay those that were not yet."""
        new = [setting for setting in dict.fromkeys(settings) if setting not in self.seconds]
        if not new:
            return
        replay = Replay(self._shared.model, new, curve=self._curve, shared=self._shared)
        table = np.zeros((len(new), len(self.answers)))
        for place, answer in enumerate(self.answers):
            for row, result in enumerate(replay.of(answer)):
                table[row, place] = result.seconds
                self.plain[place] = result.plain_seconds
        self.seconds.update(zip(new, table, strict=True))
        self._progress(len(self.seconds))

    def total(self, setting: Method) -> float:
        return float(self.seconds[setting].sum())

    def best(self, members: NDArray[np.bool_]) -> Method:
        """The fastest of all over some answers."""
        return _fastest({setting: float(seconds[members].sum()) for setting, seconds in self.seconds.items()})


def _search(method: Method, tried: _Tried, trials: int) -> None:
    kind = drafter_class(method.drafter)
    best = start = replace(method, stores=method.paths, word="")
    tried.begin([start])
    if not kind.drafts:
        return
    axes: dict[str, list[str]] = {} if method.budget is not None else {"": list(_BUDGETS)}
    axes |= {name: values for name, values in choices(kind.Options).items() if name not in method.options}
    done = {best}
    moved = True
    while moved:
        moved = False
        for name, values in axes.items():
            others = [setting for setting in (_changed(best, name, value) for value in values) if setting not in done]
            others = [setting for setting in others if _allowed(setting)][: max(0, trials - len(done))]
            done.update(others)
            tried.run(others)
            tried.origin.update({setting: start for setting in others if setting not in tried.origin})
            fastest = _fastest({setting: tried.total(setting) for setting in (best, *others)})
            best, moved = fastest, moved or fastest != best


def _fastest(seconds: Mapping[Method, float]) -> Method:
    """Of settings that are as good as equally fast, the first: the nearest to the defaults."""
    least = min(seconds.values())
    return next(setting for setting, spent in seconds.items() if spent <= least * _GAIN)


def _changed(method: Method, name: str, value: str) -> Method:
    if not name:
        return replace(method, budget=parse_budget(value))
    return replace(method, options=dict(sorted({**method.options, name: value}.items())))


def _allowed(method: Method) -> bool:
    try:
        check_method(method)
    except UsageError:  # a range that is empty
        return False
    return True


def _held_out(answers: Sequence[Recorded], share: float) -> list[bool]:
    """Of each group the prompts at even distances."""
    out: set[tuple[str, str]] = set()
    for group in dict.fromkeys(answer.group for answer in answers):
        names = list(dict.fromkeys(answer.id for answer in answers if answer.group == group))
        count = _share(share, len(names)) if share and len(names) > 1 else 0
        out.update((group, names[(2 * place + 1) * len(names) // (2 * count)]) for place in range(count))
    return [(answer.group, answer.id) in out for answer in answers]


def _share(share: float, prompts: int) -> int:
    return min(prompts - 1, max(1, round(share * prompts)))


def _members(answers: Sequence[Recorded], group: str) -> NDArray[np.bool_]:
    return np.array([group in (ALL, answer.group) for answer in answers], np.bool_)


def _prompts(answers: Sequence[Recorded], group: str) -> set[tuple[str, str]]:
    return {(answer.group, answer.id) for answer in answers if group in (ALL, answer.group)}


def _judge(
    group: str,
    chosen: Method,
    untuned: Method,
    defaults: Sequence[Method],
    tested: _Tried,
    prompts: int,
    held_out: bool,
) -> Best:
    members = _members(tested.answers, group)
    seconds = {setting: tested.seconds[setting][members] for setting in (chosen, untuned, *defaults)}
    default = min(defaults, key=lambda setting: float(seconds[setting].sum()))
    answers = [answer for answer, member in zip(tested.answers, members, strict=True) if member]
    margin = _margin(answers, seconds[chosen], seconds[default])
    setting, rejected = chosen, None
    if chosen != default and margin.low < 1:
        setting, rejected = default, Rejected(chosen, margin)
        margin, untuned = Margin(1.0, 1.0, 1.0), default
    tokens = sum(len(answer.tokens) for answer in answers)
    return Best(
        group,
        setting,
        untuned,
        default,
        prompts,
        len(_prompts(answers, ALL)) if held_out else 0,
        tokens / float(seconds[setting].sum()),
        tokens / float(seconds[untuned].sum()),
        tokens / float(seconds[default].sum()),
        tokens / float(tested.plain[members].sum()),
        margin,
        rejected,
    )


def _margin(answers: Sequence[Recorded], chosen: NDArray[np.float64], usual: NDArray[np.float64]) -> Margin:
    """How often as fast the first is as the second. Turns of a prompt go together."""
    names = {name: place for place, name in enumerate(dict.fromkeys((answer.group, answer.id) for answer in answers))}
    places = [names[answer.group, answer.id] for answer in answers]
    sums = np.zeros((2, len(names)))
    for row, seconds in enumerate((chosen, usual)):
        np.add.at(sums[row], places, seconds)
    drawn = np.random.default_rng(0).integers(0, len(names), (_RESAMPLES, len(names)))
    low, high = np.percentile(sums[1][drawn].sum(axis=1) / sums[0][drawn].sum(axis=1), _SURE)
    return Margin(float(usual.sum() / chosen.sum()), float(low), float(high))


def summary(tuning: Tuning) -> list[Mapping[str, Any]]:
    """As JSON."""
    return [
        {
            "group": best.group,
            "setting": best.setting.name,
            "untuned": best.untuned.name,
            "default": best.default.name,
            "prompts": best.prompts,
            "held_out": best.held_out,
            "tokens_per_second": best.tokens_per_second,
            "untuned_tokens_per_second": best.untuned_tokens_per_second,
            "default_tokens_per_second": best.default_tokens_per_second,
            "plain_tokens_per_second": best.plain_tokens_per_second,
            "margin": asdict(best.margin),
            "rejected": best.rejected
            and {"setting": best.rejected.setting.name, "margin": asdict(best.rejected.margin)},
        }
        for best in tuning.best
    ]
