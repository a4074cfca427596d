"""Corrections follow what comes true."""

from __future__ import annotations

import numpy as np

from specds.decode.auto.acceptance import shipped
from specds.decode.auto.expansion import Limits, grow
from specds.decode.auto.features import CONTEXT
from specds.decode.auto.feedback import Feedback, no_corrections, reached

from .growing import random_known


def test_corrections_follow_what_is_right_and_start_again_with_each_request() -> None:
    random = np.random.default_rng(0)
    text, known = random_known(random, 4, 60)
    every = no_corrections()
    feedback = Feedback(every)
    known = known._replace(active=1 << CONTEXT)
    limits = Limits(np.ones(34), 32, 0.01)
    grown = grow(text, known, shipped().ensemble, feedback.offsets, limits)
    before = grown.chance[grown.parents < 0]
    for _ in range(30):
        feedback.observe(grown, np.array([99]))
    wrong = feedback.offsets[CONTEXT, 0]
    assert wrong < -1
    feedback = Feedback(every)
    again = feedback.offsets[CONTEXT, 0]
    assert wrong < again < 0
    top = int(grown.tokens[grown.parents < 0][np.argmax(before)])
    for _ in range(60):
        feedback.observe(grown, np.array([top]))
    assert feedback.offsets[CONTEXT, 0] > again
    assert reached(grown, np.array([99, 1])) == 0
    assert reached(grown, np.array([top])) == 1


def test_requests_at_once_learn_from_each_other_and_leave_what_is_each_ones_own_alone() -> None:
    text, known = random_known(np.random.default_rng(0), 4, 60)
    known = known._replace(active=1 << CONTEXT)
    every = no_corrections()
    one, other, alone = Feedback(every), Feedback(every), Feedback()
    grown = grow(text, known, shipped().ensemble, one.offsets, Limits(np.ones(34), 32, 0.01))
    top = int(grown.tokens[grown.parents < 0][np.argmax(grown.chance[grown.parents < 0])])
    for _ in range(30):
        one.observe(grown, np.array([99]))
        other.observe(grown, np.array([top]))
        alone.observe(grown, np.array([99]))
    # What is wrong in one is right in the other; each knows its own, as if it were alone.
    assert one.offsets[CONTEXT, 0] == alone.offsets[CONTEXT, 0] < -1
    assert other.offsets[CONTEXT, 0] > 0
    # Whoever comes next begins with what both have shown, and changes neither by beginning.
    before = one.offsets.copy(), other.offsets.copy()
    following = Feedback(every)
    assert one.offsets[CONTEXT, 0] < following.offsets[CONTEXT, 0] < other.offsets[CONTEXT, 0]
    following.observe(grown, np.array([99]))
    assert (one.offsets == before[0]).all()
    assert (other.offsets == before[1]).all()
