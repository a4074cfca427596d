"""AdaPLD and PLD+ against the paper's equations, written out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from specds.decode.contracts import TOP, Signal, Step
from specds.decode.draft import Draft, empty
from specds.decode.drafters.adapld import AdaPld
from specds.decode.drafters.pld_plus import PldPlus
from specds.decode.engine import Engine
from specds.decode.method import Method
from specds.errors import UsageError

from ..conftest import make_model
from .drafts import is_valid, paths

VOCABULARY, WIDTH = 12, 6


class World:
    """A text with made-up states, expectations and embeddings, handed over as the loop does."""

    def __init__(self, seed: int, text: Sequence[int]) -> None:
        random = np.random.default_rng(seed)
        self.text = list(text)
        self.states = random.normal(size=(len(text), WIDTH)).astype(np.float32)
        self.top = np.stack([random.permutation(VOCABULARY)[:TOP] for _ in text]).astype(np.int32)
        self.embedding = random.normal(size=(VOCABULARY, WIDTH)).astype(np.float32)

    def tell(self, drafter: AdaPld | PldPlus, prompt: int, steps: Sequence[int]) -> None:
        """The first `prompt` tokens at once, then steps of so many tokens, until all of the text is told."""
        drafter.start(self.text[:prompt])
        known, end = 0, prompt
        for size in [1, *steps]:
            if end >= len(self.text):
                break
            size = min(size, len(self.text) - end)
            forwarded = slice(known, end + size - 1)  # all but the last, which the target adds
            signals: dict[Signal, Any] = {
                Signal.LAYER: self.states[forwarded],
                Signal.CONTEXT_TOPK: self.top[forwarded],
            }
            if not known:
                signals[Signal.EMBEDDING] = lambda tokens: self.embedding[tokens]
            tokens = tuple(self.text[end : end + size])
            drafter.observe(Step(0, end, empty(), (), tokens, signals, 0.0, 0.0, 0.0, 0.0))
            known, end = forwarded.stop, end + size
        self.text = self.text[:end]


def cosine(one: NDArray[np.float32], other: NDArray[np.float32]) -> float:
    return float(one @ other / np.linalg.norm(one) / np.linalg.norm(other))


def reference(world: World, threshold: float, length: int, branches: int) -> set[tuple[int, ...]]:
    """§3.3 to 3.5, positions from 0, without any cleverness; all paths of the draft."""
    text, last = world.text, len(world.text) - 1

    def candidates(token: int) -> list[int]:
        same = [j for j in range(last) if text[j] == token]
        if same:
            return same  # Eq. 5
        return [j for j in range(last) if cosine(world.embedding[text[j]], world.embedding[token]) >= threshold]

    def best(places: list[int], state: NDArray[np.float32]) -> int:
        # Equally similar ones: the latest. The first position has no state before it.
        return max(places, key=lambda j: (cosine(world.states[j - 1], state) if j else -1.5, j))

    anchors = candidates(text[last])
    if not anchors:
        return set()
    lexical = text[last] in text[:last]
    anchor = best(anchors, world.states[last - 1])  # Eq. 6 and 7
    main = text[anchor + 1 : anchor + 1 + length] if lexical else []  # Eq. 8 and 9
    found = {tuple(main[: end + 1]) for end in range(len(main))}
    for branch in world.top[anchor][:branches].tolist():  # Eq. 10
        if main and branch == main[0]:
            continue  # Eq. 11
        found.add((branch,))
        places = candidates(branch)
        if places:
            found.add((branch, text[best(places, world.states[anchor]) + 1]))  # Eq. 13 to 15
    return found


@given(
    st.lists(st.integers(0, VOCABULARY - 1), min_size=3, max_size=40),
    st.integers(0, 1 << 20),
    st.integers(1, 30),
    st.lists(st.integers(1, 4), max_size=20),
    st.sampled_from([-0.9, 0.1, 0.6, 0.99]),
    st.integers(1, 9),
    st.integers(1, TOP),
)
def test_adapld_is_what_the_paper_says(
    text: list[int], seed: int, prompt: int, steps: list[int], threshold: float, length: int, branches: int
) -> None:
    world = World(seed, text)
    drafter = AdaPld(AdaPld.Options(threshold=threshold, length=length, branches=branches))
    world.tell(drafter, min(prompt, len(text) - 1), steps)
    draft = drafter.propose(100)
    assert is_valid(draft)
    assert paths(draft) == reference(world, threshold, length, branches)
    check_places(world, draft)
    plus = PldPlus(PldPlus.Options(length=length))
    world.tell(plus, min(prompt, len(text) - 1), steps)
    copied = plus.propose(100)
    check_places(world, copied)
    main = [node for node, name in enumerate(names(draft)) if name == "main"]
    assert copied.tokens.tolist() == draft.tokens[main].tolist()


def names(draft: Draft) -> list[str]:
    return draft.origin.names() if draft.origin is not None else []


def check_places(world: World, draft: Draft) -> None:
    """A node that says where it was copied from stands there in the text; a branch stands nowhere."""
    for node, name in enumerate(names(draft)):
        assert draft.origin is not None
        place = int(draft.origin.place[node])
        assert (place < 0) == name.endswith("branch")
        assert place < 0 or world.text[place] == int(draft.tokens[node])


def test_a_prompt_that_repeats_is_copied_on_the_main_path() -> None:
    world = World(0, [1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4])
    drafter = AdaPld(AdaPld.Options(length=3))
    world.tell(drafter, 10, [])
    draft = drafter.propose(20)
    assert draft.tokens[:3].tolist() == [5, 6, 7]
    assert names(draft)[:3] == ["main"] * 3
    assert {"branch", "successor"} <= set(names(draft)) <= {"main", "branch", "successor"}


def test_an_anchor_that_never_occurred_takes_the_semantic_path() -> None:
    world = World(0, [1, 2, 3, 4, 5, 6, 9])
    world.embedding[9] = world.embedding[3] + 0.01
    drafter = AdaPld(AdaPld.Options(threshold=0.9))
    world.tell(drafter, 6, [])
    draft = drafter.propose(20)
    assert set(names(draft)) == {"semantic branch", "semantic successor"}
    roots = draft.tokens[draft.parents < 0].tolist()
    assert roots == world.top[2].tolist()  # what was expected after the 3


def test_the_ablations_leave_their_part_out() -> None:
    world = World(3, [1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4])
    other = World(3, [1, 2, 3, 4, 5, 6, 9])

    def drafted(world: World, **switches: bool) -> set[str]:
        drafter = AdaPld(AdaPld.Options(**switches))
        world.tell(drafter, len(world.text) - 1, [])
        return set(names(drafter.propose(40)))

    assert drafted(world, no_branch=True) == {"main"}
    assert drafted(world, no_successor=True) == {"main", "branch"}
    assert drafted(other, lexical_only=True) == set()
    assert drafted(other, no_branch=True) == set()
    assert drafted(world, lexical_only=True) == {"main", "branch", "successor"}


@pytest.mark.parametrize("drafter", ["adapld", "pld-plus", "sam", "respec"])
def test_the_layer_is_a_number_or_a_share(drafter: str) -> None:
    """Also of a drafter that is somebody's fallback."""
    model = make_model(stop=False)
    options = {"fallback": "adapld"} if drafter in ("sam", "respec") else {"layer": "0.7"}
    engine = Engine(model, Method(drafter, options, budget=8))
    steps = list(engine.steps([9, 30, 12, 5, 77, 9, 30, 12], 40))
    assert sum(step.accepted for step in steps) > 0
    if drafter in ("adapld", "pld-plus"):
        list(Engine(model, Method(drafter, {"layer": "3"}, budget=8)).steps([9, 30, 12], 8))
        with pytest.raises(UsageError, match="layer 4 is asked for, and tiny has 3"):
            Engine(model, Method(drafter, {"layer": "4"}))
