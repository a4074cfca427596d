"""Corrections follow what comes true."""

from __future__ import annotations

import numpy as np

from specds.decode.auto.acceptance import shipped
from specds.decode.auto.expansion import (
    grow,
    make_tries,
)
from specds.decode.auto.feedback import Feedback, reached

from .growing import random_known


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
