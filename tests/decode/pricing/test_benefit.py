"""Which sources are asked, by what asking saved."""

from __future__ import annotations

from specds.decode.pricing.benefit import Benefit, Gains


def test_a_source_that_does_not_pay_is_asked_rarely_and_one_that_does_always() -> None:
    for gain, low, high in ((0.0, 8, 30), (2e-3, 1000, 1000)):
        benefit, asked = Benefit(Gains()), 0
        for _ in range(1000):
            if benefit.decide(0):
                asked += 1
                benefit.observe(0, gain, 1e-3)
        assert low <= asked <= high


def test_a_request_finds_out_by_itself_that_a_source_pays() -> None:
    """After many requests in which it did not; and what one found does not bind the next."""
    gains = Gains()

    def asks(gain: float) -> int:
        benefit, asked = Benefit(gains), 0
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
    gains = Gains()
    for gain, expected in ((8e-3, 70), (2e-3, 0), (0.0, 0)):
        benefit, sure = Benefit(gains), 0
        for _ in range(86):
            if benefit.trust():
                sure += 1
            else:
                benefit.observe(0, gain, 1e-3)
        assert abs(sure - expected) <= 2
    # Where steps become such as it does not pay in, it finds out.
    gains = Gains()
    benefit = Benefit(gains)
    for _ in range(20):
        benefit.observe(3, -1e-3, 1e-3)
    benefit = Benefit(gains)
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


def test_requests_at_once_ask_each_as_it_pays_in_them() -> None:
    """One in which a source pays beside one in which it does not; what all have seen is theirs together."""
    gains = Gains()
    poor, rich = Benefit(gains), Benefit(gains)
    asked = {poor: 0, rich: 0}
    for step in range(400):
        for benefit, gain in ((poor, -2e-3), (rich, 2e-3)):
            if benefit.decide(0):
                asked[benefit] += step >= 100
                benefit.observe(0, gain, 1e-3)
    assert asked[rich] == 300
    assert asked[poor] < 150
    assert gains.observed == gains.asked.sum() >= sum(asked.values())
    assert poor.cost == rich.cost == gains.cost


def test_a_request_that_begins_forgets_nothing_of_those_beside_it() -> None:
    """Its own trials and pauses are its own."""
    gains = Gains()
    first = Benefit(gains)
    for _ in range(300):
        if first.decide(0):
            first.observe(0, 0.0, 1e-3)
    seen = []
    for _ in range(60):
        seen.append(first.decide(0))
        second = Benefit(gains)
        assert second.decide(0)  # asked by each at first, whatever the others saw
        second.observe(0, 0.0, 1e-3)
        if seen[-1]:
            first.observe(0, 0.0, 1e-3)
    assert sum(seen) <= 2
