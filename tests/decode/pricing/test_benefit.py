"""Which sources are asked, by what asking saved."""

from __future__ import annotations

from specds.decode.pricing.benefit import Benefit


def test_a_source_that_does_not_pay_is_asked_rarely_and_one_that_does_always() -> None:
    for gain, low, high in ((0.0, 8, 30), (2e-3, 1000, 1000)):
        benefit, asked = Benefit(), 0
        for _ in range(1000):
            if benefit.decide(0):
                asked += 1
                benefit.observe(0, gain, 1e-3)
        assert low <= asked <= high


def test_a_request_finds_out_by_itself_that_a_source_pays() -> None:
    """After many requests in which it did not; and what one found does not bind the next."""
    benefit = Benefit()

    def asks(gain: float) -> int:
        benefit.start()
        asked = 0
        for _ in range(60):
            if benefit.decide(0):
                asked += 1
                benefit.observe(0, gain, 1e-3)
        return asked

    for _ in range(20):
        useless = asks(-1e-4)
    assert useless <= 8
    assert asks(8e-3) == 60
    for _ in range(40):
        useless = asks(-1e-4)
    assert useless <= 8


def test_a_source_that_pays_by_far_is_compared_now_and_then() -> None:
    benefit = Benefit()
    for gain, expected in ((8e-3, 70), (2e-3, 0), (0.0, 0)):
        benefit.start()
        sure = 0
        for _ in range(86):
            if benefit.trust():
                sure += 1
            else:
                benefit.observe(0, gain, 1e-3)
        assert abs(sure - expected) <= 2
    # Where steps become such as it does not pay in, it finds out.
    benefit = Benefit()
    for _ in range(20):
        benefit.observe(3, -1e-3, 1e-3)
    benefit.start()
    for _ in range(20):
        benefit.observe(1, 8e-3, 1e-3)
    asked = 0
    for _ in range(400):
        if benefit.trust():
            asked += 1
        elif benefit.decide(3):
            asked += 1
            benefit.observe(3, -1e-3, 1e-3)
    assert asked < 150
