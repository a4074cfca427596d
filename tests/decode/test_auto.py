"""The merged tree: its sources against brute force, its choice against all subtrees, and its temper among liars."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from specds.datastore.suffix import SuffixIndex
from specds.datastore.suffix_array import build_suffix_array
from specds.datastore.suffix_lookup import Parts
from specds.decode.acceptance import shipped
from specds.decode.contracts import TOP, Signal, Step
from specds.decode.cost import CostCurve
from specds.decode.draft import Draft, empty
from specds.decode.drafters.auto import Auto
from specds.decode.engine import Engine
from specds.decode.expansion import (
    DEPTHS,
    FEATURES,
    ORIGINS,
    SOURCES,
    SUFFIX,
    Grown,
    Known,
    Tries,
    grow,
    log_odds,
    make_tries,
)
from specds.decode.feedback import Feedback, Worth, reached
from specds.decode.lookups import _prefixes, suffix_trees
from specds.decode.ngrams import (
    COUNTS,
    ORDERS,
    PLACES,
    RECENT,
    TOKENS,
    TOTAL,
    WIDTH,
    Followers,
    Rows,
    find_row,
    hash_tail,
)
from specds.decode.stream import Stream
from specds.errors import UsageError

from ..conftest import make_model
from .test_draft import is_valid
from .test_loop import PROMPT

# A row costs a tenth of a pass, as on a CPU.
FAIR = CostCurve((1, 65), (100,), np.array([[1.0, 7.4]]))


def key(context: Sequence[int]) -> np.uint64:
    hashes = np.zeros(len(ORDERS), np.uint64)
    hash_tail(np.array(context[::-1], np.int64), len(context), hashes)
    found: np.uint64 = hashes[list(ORDERS).index(len(context))]
    return found


@given(st.lists(st.integers(0, WIDTH - 1), min_size=1, max_size=80), st.integers(1, 9))
def test_followers_are_counted_by_every_order(tokens: list[int], piece: int) -> None:
    followers, text = Followers(), np.array(tokens, np.int64)
    for end in range(piece, len(tokens) + piece, piece):
        part = text[:end]
        followers.extend(part, max(1, end - piece))
    for order in ORDERS.tolist():
        expected: dict[tuple[int, ...], list[int]] = {}
        for at in range(order, len(tokens)):
            expected.setdefault(tuple(tokens[at - order : at]), []).append(at)
        for context, places in expected.items():
            row = followers.rows[find_row(followers.rows, key(context))]
            seen = Counter(tokens[at] for at in places)
            assert row[TOTAL] == len(places)
            found = {int(row[TOKENS + slot]): int(row[COUNTS + slot]) for slot in range(WIDTH) if row[COUNTS + slot]}
            assert found == seen
            assert tokens[places[-1]] == row[TOKENS + row[RECENT]]
            assert places[-1] == row[PLACES + row[RECENT]]
        unknown = key([9] * order)
        assert find_row(followers.rows, unknown) < 0


def test_a_new_follower_takes_the_place_of_the_rarest_and_oldest() -> None:
    followers = Followers()
    text = [7, 0, 7, 1, 7, 0, 7, 2, 7, 3, 7, 4]
    followers.extend(np.array(text, np.int64), 1)
    row = followers.rows[find_row(followers.rows, key([7]))]
    assert sorted(row[TOKENS : TOKENS + WIDTH].tolist()) == [0, 2, 3, 4]
    assert row[TOTAL] == 6


def test_rows_are_kept_by_what_stands_before_them_in_the_tree() -> None:
    rows = Rows()
    text, tokens, parents = np.array([5, 6, 7]), np.array([8, 9, 10], np.int32), np.array([-1, 0, -1], np.int32)
    ids = np.arange(4 * TOP, dtype=np.int32).reshape(4, TOP)
    rows.keep(text, tokens, parents, ids, ids.astype(np.float32))
    for context, row in (([5, 6, 7], 0), ([6, 7, 8], 1), ([7, 8, 9], 2), ([6, 7, 10], 3)):
        for size in (1, 2, 3):
            assert rows.ids[find_row(rows.keys, key(context[-size:]))].tolist() == ids[row].tolist()
    many = np.arange(20_000, dtype=np.int32).reshape(-1, TOP)
    for start in range(0, len(many), 50):
        chain = np.arange(100 + start, 149 + start, dtype=np.int32)
        below = np.arange(-1, 48, dtype=np.int32)
        rows.keep(text, chain, below, many[start : start + 50], many[start : start + 50].astype(np.float32))
    assert rows.ids[find_row(rows.keys, key([6, 7, 8]))].tolist() == ids[1].tolist()


def random_known(random: np.random.Generator, vocabulary: int, length: int) -> tuple[NDArray[np.int64], Known]:
    text = random.integers(0, vocabulary, length)
    followers, rows = Followers(), Rows()
    followers.extend(text, 1)
    for _ in range(6):
        ids = np.argsort(random.random((1, max(TOP, vocabulary))), axis=1)[:, :TOP].astype(np.int32)
        gaps = np.sort(random.random((1, TOP)).astype(np.float32) * 6, axis=1)
        end = int(random.integers(1, length + 1))
        rows.keep(text[:end], np.empty(0, np.int32), np.empty(0, np.int32), ids, gaps - gaps[:, :1])
    return text, Known(followers.rows, Followers().rows, rows.keys, rows.ids, rows.gaps)


def random_tries(random: np.random.Generator, vocabulary: int) -> Tries:
    trees = {}
    for number in range(3):
        if random.random() < 0.6:
            tokens, parents, weights = [], [], []
            total = int(random.integers(1, 20))
            stack = [(-1, total, 0)]
            while stack:
                parent, count, depth = stack.pop()
                if depth == 3:
                    continue
                for token in random.permutation(vocabulary)[:2]:
                    share = int(random.integers(0, count + 1))
                    if share and len(tokens) < 12:
                        tokens.append(token)
                        parents.append(parent)
                        weights.append(float(share))
                        stack.append((len(tokens) - 1, share, depth + 1))
                        count -= share
            branches = np.array(tokens, np.int32), np.array(parents, np.int32), np.array(weights)
            if tokens:
                trees[number] = branches, float(total), 3 - number
    return make_tries(trees)


def grown_with(
    random: np.random.Generator, text: NDArray[np.int64], known: Known, tries: Tries, cost: NDArray[np.float64]
) -> Grown:
    guesses = random.integers(0, 5, 2).astype(np.int32), np.array([0.4, 2.0], np.float32)
    offsets = random.normal(size=(len(SOURCES), DEPTHS))
    return grow(
        text, known, tries, guesses, (1.0, 0.5), shipped().ensemble, offsets, 0b1111111, cost, len(cost) - 2, 0.12
    )


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 1 << 30), st.integers(2, 5), st.integers(4, 40))
def test_the_tree_chosen_is_the_best_of_all_subtrees(seed: int, vocabulary: int, length: int) -> None:
    random = np.random.default_rng(seed)
    text, known = random_known(random, vocabulary, length)
    tries = random_tries(random, vocabulary)
    # Prices that rise in steps, as those of a pass do: neither concave nor convex.
    cost = np.cumsum(random.random(34) * random.integers(0, 2, 34)) + 1.0
    state = random.bit_generator.state
    whole = grown_with(random, text, known, tries, np.ones(34))
    random.bit_generator.state = state
    chosen = grown_with(random, text, known, tries, cost)
    nodes = whole.order.tolist()
    if len(nodes) > 12:
        nodes = nodes[:12]
        cost = cost[:14]
        random.bit_generator.state = state
        chosen = grown_with(random, text, known, tries, cost)
    above = {node: int(whole.parents[node]) for node in nodes}
    best = 1.0 / cost[1]
    for subset in range(1 << len(nodes)):
        kept = {node for place, node in enumerate(nodes) if subset >> place & 1}
        if all(above[node] < 0 or above[node] in kept for node in kept) and len(kept) + 2 <= len(cost):
            best = max(best, (1.0 + sum(whole.path[node] for node in kept)) / cost[1 + len(kept)])
    gain = 1.0 + chosen.path[chosen.order[: chosen.chosen]].sum()
    assert gain == pytest.approx(chosen.expected)
    assert gain / cost[1 + chosen.chosen] == pytest.approx(best)
    assert (np.diff(chosen.path[chosen.order]) <= 1e-12).all()


def test_a_source_that_is_not_asked_proposes_nothing() -> None:
    random = np.random.default_rng(1)
    text, known = random_known(random, 4, 40)
    tries = random_tries(random, 4)
    guesses = np.array([3], np.int32), np.array([0.1], np.float32)
    seen = []
    for active in (0, 1, 1 << SUFFIX, 0b1111111):
        found = grow(
            text,
            known,
            tries,
            guesses,
            (1.0, 0.5),
            shipped().ensemble,
            np.zeros((len(SOURCES), DEPTHS)),
            active,
            np.ones(34),
            32,
            0.01,
        )
        assert (found.mask & ~active == 0).all()
        seen.append(int(np.bitwise_or.reduce(found.mask, initial=0)))
    assert seen[:2] == [0, 1]
    assert seen[3].bit_count() > 2


def test_sources_of_nodes_say_whether_they_were_copied() -> None:
    names = {origin.name: origin.retrieved for origin in ORIGINS}
    assert len(names) == 1 << len(SOURCES) == 128
    assert names["context"]
    assert names["context+recycling"]
    assert names["suffix"]
    assert names["dense"]
    assert not names["recycling"]
    assert not names["recycling+runners-up"]
    assert not names["model"]


@given(st.integers(0, 1 << 30))
@settings(max_examples=30, deadline=None)
def test_trees_of_a_match_are_the_index_own(seed: int) -> None:
    random = np.random.default_rng(seed)
    text = random.integers(0, 5, 300).astype(np.uint16)
    text[::37] = 65535
    index = SuffixIndex(Parts([(text, build_suffix_array(text))]))
    tail = random.integers(0, 5, 12)
    found = suffix_trees(index.parts, tail)
    match = index.match(tail, 16, 1)
    assert found[0][1:] == (match.occurrences, match.length)
    tokens, parents, counts = index.continuations(match, 12, 40)
    for mine, own in zip(found[0][0], (tokens, parents, counts), strict=True):
        assert mine.tolist() == own.tolist()
    if match.length > 1:
        last = index.match(tail[-1:], 1, 1)
        assert found[2][1:] == (last.occurrences, 1)


Documents = list[tuple[list[int], list[int]]]


def index_of(documents: Documents) -> SuffixIndex:
    """A suffix index over documents, as a store would hold it."""
    flat = [token for prompt, answer in documents for token in (*prompt, *answer, 65535)]
    text = np.array(flat, np.uint16)
    return SuffixIndex(Parts([(text, build_suffix_array(text))]))


class Simulation:
    """Drives a drafter through a text that is known, without a model: the likeliest tokens are what `top` says."""

    def __init__(self, drafter: Auto, text: list[int], prompt: int, seed: int = 0, vocabulary: int = 20_000) -> None:
        self.drafter, self.text, self.prompt = drafter, text, prompt
        self.random, self.vocabulary = np.random.default_rng(seed), vocabulary

    def signals(self, rows: int) -> dict[Signal, NDArray[np.generic]]:
        ids = self.random.integers(0, self.vocabulary, (rows, TOP)).astype(np.int32)
        gaps = np.sort(self.random.random((rows, TOP)).astype(np.float32) * 4, axis=1)
        return {Signal.TREE_TOPK: ids, Signal.TREE_GAPS: gaps - gaps[:, :1]}

    def run(self) -> list[tuple[Draft, int]]:
        """Drafts, and how many of their tokens were accepted."""
        text, drafter = self.text, self.drafter
        drafter.start(text[: self.prompt])
        at = self.prompt
        step = Step(0, at, empty(), (), (text[at],), self.signals(1), 0.0, 0.0, 0.0, 0.0)
        at += 1
        found = []
        while at < len(text) - 1:
            drafter.observe(step)
            draft = drafter.propose(64)
            assert is_valid(draft)
            children, node, path = draft.children(), -1, []
            while at + len(path) < len(text) - 1 and (node, text[at + len(path)]) in children:
                node = children[node, text[at + len(path)]]
                path.append(node)
            tokens = tuple(text[at : at + len(path) + 1])
            found.append((draft, len(path)))
            step = Step(1, at, draft, tuple(path), tokens, self.signals(len(draft) + 1), 0.0, 0.0, 0.0, 0.0)
            at += len(tokens)
        return found


def near_misses(text: list[int], random: np.random.Generator) -> Documents:
    """Documents that hold every token of a text, each followed by what does not follow it there.

    Longer contexts would overlap, and tell the truth in their middle.
    """
    return [([token], [int(wrong) for wrong in random.integers(20_000, 30_000, 6)]) for token in text]


@pytest.mark.parametrize("kind", ["nothing", "random", "foreign", "near misses", "frequent misses"])
def test_liars_are_soon_believed_no_more(kind: str) -> None:
    random = np.random.default_rng(3)
    text = [int(token) for token in random.permutation(20_000)[:160]]
    documents: dict[str, Documents] = {
        "random": [([1], [int(token) for token in random.integers(0, 20_000, 500)]) for _ in range(40)],
        "foreign": [([1], [int(token) for token in random.integers(30_000, 40_000, 500)]) for _ in range(40)],
        "near misses": near_misses(text, random),
        "frequent misses": [one for one in near_misses(text, random) for _ in range(5)],
    }
    indexes = [] if kind == "nothing" else [index_of(documents[kind])]
    drafter = Auto(Auto.Options(), indexes, Stream(FAIR))
    drafts = [draft for draft, _ in Simulation(drafter, text, 8).run()]
    assert len(drafts) > 140
    rows = [1 + len(draft) for draft in drafts]
    assert max(rows[32:]) <= 2
    assert np.mean(rows[32:]) <= 1.2


def test_a_good_store_beside_a_liar_still_serves() -> None:
    random = np.random.default_rng(5)
    text = [int(token) for token in random.integers(0, 20_000, 200)]
    steps = []
    for bad in (False, True):
        indexes = [index_of(near_misses(text, random))] if bad else []
        indexes.append(index_of([(text[:4], text[4:])]))
        steps.append(len(Simulation(Auto(Auto.Options(), indexes, Stream(FAIR)), text, 8).run()))
    assert steps[0] < 40
    assert steps[1] < 2 * steps[0] + 20


def test_a_source_that_lied_is_heard_again_when_it_tells_the_truth() -> None:
    random = np.random.default_rng(4)
    lies = [int(token) for token in random.integers(0, 20_000, 80)]
    truth = [int(token) for token in random.integers(0, 20_000, 400)]
    index = index_of([*near_misses(lies, random), (truth[:2], truth[2:])])
    drafter = Auto(Auto.Options(), [index], Stream(FAIR))
    found = Simulation(drafter, lies + truth, 8).run()
    assert sum(accepted for _, accepted in found) > 150


def test_earlier_answers_of_a_run_are_drafted_from_where_requests_share_what_they_learn() -> None:
    random = np.random.default_rng(6)
    text = [int(token) for token in random.permutation(20_000)[:80]]

    def steps_of_the_second(stream: Stream, session: str) -> int:
        found = 0
        for _ in range(2):
            found = len(Simulation(Auto(Auto.Options(session=session), [], stream), text, 8).run())
        return found

    alone = steps_of_the_second(Stream(FAIR), "no")
    assert alone > 60
    assert steps_of_the_second(Stream(FAIR), "auto") < 0.6 * alone
    assert steps_of_the_second(Stream(), "yes") < alone / 2
    assert steps_of_the_second(Stream(), "auto") == steps_of_the_second(Stream(), "no")
    with pytest.raises(UsageError, match="session is 'maybe'"):
        Auto(Auto.Options(session="maybe"))


def test_corrections_follow_what_is_right_and_start_again_with_each_request() -> None:
    random = np.random.default_rng(0)
    text, known = random_known(random, 4, 60)
    feedback = Feedback()
    feedback.start()
    found = grow(
        text,
        known,
        make_tries({}),
        (np.empty(0, np.int32), np.empty(0, np.float32)),
        (1.0, 0.5),
        shipped().ensemble,
        feedback.offsets,
        1,
        np.ones(34),
        32,
        0.01,
    )
    before = found.chance[found.parents < 0]
    for _ in range(30):
        feedback.observe(found, np.array([99]))
    wrong = feedback.offsets[0, 0]
    assert wrong < -1
    feedback.start()
    again = feedback.offsets[0, 0]
    assert wrong < again < 0
    top = int(found.tokens[found.parents < 0][np.argmax(before)])
    for _ in range(60):
        feedback.observe(found, np.array([top]))
    assert feedback.offsets[0, 0] > again
    assert reached(found, np.array([99, 1])) == 0
    assert reached(found, np.array([top])) == 1


def test_a_source_that_does_not_pay_is_asked_rarely_and_one_that_does_always() -> None:
    for gain, low, high in ((0.0, 8, 30), (2e-3, 1000, 1000)):
        worth, asked = Worth(), 0
        for _ in range(1000):
            if worth.asks(0):
                asked += 1
                worth.observe(0, gain, 1e-3)
        assert low <= asked <= high


def test_a_request_finds_out_by_itself_that_a_source_pays() -> None:
    """After many requests in which it did not; and what one found does not bind the next."""
    worth = Worth()

    def asks(gain: float) -> int:
        worth.start()
        asked = 0
        for _ in range(60):
            if worth.asks(0):
                asked += 1
                worth.observe(0, gain, 1e-3)
        return asked

    for _ in range(20):
        useless = asks(-1e-4)
    assert useless <= 8
    assert asks(8e-3) == 60
    for _ in range(40):
        useless = asks(-1e-4)
    assert useless <= 8


def test_a_source_that_pays_by_far_is_compared_now_and_then() -> None:
    worth = Worth()
    for gain, expected in ((8e-3, 70), (2e-3, 0), (0.0, 0)):
        worth.start()
        sure = 0
        for _ in range(86):
            if worth.sure():
                sure += 1
            else:
                worth.observe(0, gain, 1e-3)
        assert abs(sure - expected) <= 2
    # Where steps become such as it does not pay in, it finds out.
    worth = Worth()
    for _ in range(20):
        worth.observe(3, -1e-3, 1e-3)
    worth.start()
    for _ in range(20):
        worth.observe(1, 8e-3, 1e-3)
    asked = 0
    for _ in range(400):
        if worth.sure():
            asked += 1
        elif worth.asks(3):
            asked += 1
            worth.observe(3, -1e-3, 1e-3)
    assert asked < 150


def test_features_have_names_and_the_shipped_model_reads_them() -> None:
    ensemble = shipped().ensemble
    row = np.full(len(FEATURES), -1.0, np.float32)
    low = log_odds(ensemble, row)
    row[FEATURES.index("context order")] = row[FEATURES.index("context own order")] = 16
    row[FEATURES.index("context share")] = 0.95
    row[FEATURES.index("context count")] = 20
    row[FEATURES.index("context recent")] = row[FEATURES.index("agreement")] = 1
    row[FEATURES.index("recycling order")] = 3
    row[FEATURES.index("recycling rank")] = row[FEATURES.index("recycling gap")] = 0
    row[FEATURES.index("recycling lead")] = 8
    assert log_odds(ensemble, row) > max(low, 1.5)


def test_drafts_of_a_budget_depend_on_the_request_alone_and_name_their_sources() -> None:
    model = make_model(stop=False)
    engine = Engine(model, "auto", budget=8)
    first = [step.draft for step in engine.steps(PROMPT, 40)]
    list(engine.steps(PROMPT[::-1], 40))
    second = [step.draft for step in engine.steps(PROMPT, 40)]
    assert [draft.tokens.tolist() for draft in first] == [draft.tokens.tolist() for draft in second]
    names = {name for draft in first if draft.origin is not None for name in draft.origin.names()}
    assert {part for name in names for part in name.split("+")} <= set(SOURCES)
    steps = list(Engine(model, "auto", {"without": "recycling+runners-up"}, budget=8).steps(PROMPT, 40))
    origins = [step.draft.origin for step in steps if step.draft.origin is not None]
    assert {name for origin in origins for name in origin.names()} == {"context"}
    assert all("tree" in step.asked for step in steps[1:-1])
    with pytest.raises(UsageError, match="no source 'nobody'"):
        Engine(model, "auto", {"without": "nobody"})


def test_a_draft_model_is_a_source_like_others() -> None:
    model = make_model(stop=False)
    plain = [token for step in Engine(model).steps(PROMPT, 30) for token in step.tokens]
    for budget in (6, None):
        engine = Engine(model, "auto", budget=budget, draft_model="skip:1")
        steps = list(engine.steps(PROMPT, 30))
        assert [token for step in steps for token in step.tokens] == plain
        assert any("model" in step.asked for step in steps)


@given(st.integers(0, 1 << 30))
@settings(max_examples=30, deadline=None)
def test_neighbours_become_one_tree_weighed_by_similarity(seed: int) -> None:
    random = np.random.default_rng(seed)
    block = random.integers(-1, 3, (int(random.integers(1, 9)), 4))
    similarity = np.sort(random.random(len(block)).astype(np.float32))[::-1].copy()
    tokens, parents, mass, total, top, margin = _prefixes(block, similarity)
    weights = np.exp(12.0 * (similarity.astype(np.float64) - similarity[0]))
    expected: Counter[tuple[int, ...]] = Counter()
    for row, weight in zip(block.tolist(), weights.tolist(), strict=True):
        path = row[: row.index(-1)] if -1 in row else row
        for end in range(1, len(path) + 1):
            expected[tuple(path[:end])] += weight
    found = {}
    for node in range(len(tokens)):
        path, at = [], node
        while at >= 0:
            path.append(int(tokens[at]))
            at = parents[at]
        found[tuple(path[::-1])] = mass[node]
    assert found.keys() == expected.keys()
    assert all(found[path] == pytest.approx(expected[path]) for path in found)
    assert total == pytest.approx(weights.sum())
    assert top == similarity[0]
    assert margin == pytest.approx(similarity[0] - (similarity[1] if len(block) > 1 else -1.0))


def test_where_a_pass_takes_less_than_drafting_nothing_is_drafted() -> None:
    curve = CostCurve((1, 65), (100,), np.array([[1e-7, 7e-7]]))
    random = np.random.default_rng(6)
    text = [int(token) for token in random.integers(0, 50, 30)] * 30
    text[2::4] = [int(token) for token in random.integers(0, 50, len(text[2::4]))]
    asked = []
    for prices in (FAIR, curve):
        drafter = Auto(Auto.Options(), [], Stream(prices))
        found = Simulation(drafter, text, 30).run()
        asked.append(sum(len(draft) > 0 for draft, _ in found) / len(found))
    assert asked[0] > 0.5
    assert asked[1] < 0.25
