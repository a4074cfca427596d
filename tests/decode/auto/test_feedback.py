"""Corrections follow what comes true."""

from __future__ import annotations

import numpy as np

from specds.decode.auto.acceptance import shipped
from specds.decode.auto.expansion import Limits, grow
from specds.decode.auto.features import CONTEXT
from specds.decode.auto.feedback import Feedback, reached

from .growing import random_known


def test_corrections_follow_what_is_right_and_start_again_with_each_request() -> None:
    random = np.random.default_rng(0)
    text, known = random_known(random, 4, 60)
    feedback = Feedback()
    feedback.start()
    known = known._replace(active=1 << CONTEXT)
    limits = Limits(np.ones(34), 32, 0.01)
    grown = grow(text, known, shipped().ensemble, feedback.offsets, limits)
    before = grown.chance[grown.parents < 0]
    for _ in range(30):
        feedback.observe(grown, np.array([99]))
    wrong = feedback.offsets[CONTEXT, 0]
    assert wrong < -1
    feedback.start()
    again = feedback.offsets[CONTEXT, 0]
    assert wrong < again < 0
    top = int(grown.tokens[grown.parents < 0][np.argmax(before)])
    for _ in range(60):
        feedback.observe(grown, np.array([top]))
    assert feedback.offsets[CONTEXT, 0] > again
    assert reached(grown, np.array([99, 1])) == 0
    assert reached(grown, np.array([top])) == 1
