"""The watch over a promise: it fires for a worse drafter and is silent for a healthy one."""

from __future__ import annotations

import random
from statistics import mean, stdev

import pytest

from leadout.control.rollback import (
    FIRST_LOOK,
    LOOKS,
    MARGIN,
    PromiseWatch,
    Shortfall,
    Tally,
)

K = 5


def own_acceptance(generator: random.Random, acceptance: float) -> float:
    """Requests differ in how well they are drafted."""
    return min(max(generator.gauss(acceptance, 0.12), 0.0), 0.98)


def request(generator: random.Random, acceptance: float) -> tuple[int, int]:
    """Steps and tokens of one answer."""
    own = own_acceptance(generator, acceptance)
    steps = generator.randint(5, 80)
    tokens = 0
    for _ in range(steps):
        accepted = 0
        while accepted < K and generator.random() < own:
            accepted += 1
        tokens += accepted + 1
    return steps, tokens


def true_length(acceptance: float) -> float:
    """Tokens per step over endless requests: 1 + a + ... + a^K, over all that a can be."""
    generator = random.Random(0)
    owns = [own_acceptance(generator, acceptance) for _ in range(100_000)]
    return mean(sum(own**place for place in range(K + 1)) for own in owns)


def watched(promised: float, acceptance: float, requests: int, seed: int) -> Shortfall | None:
    generator = random.Random(seed)
    watch, tally = PromiseWatch(promised), Tally()
    for _ in range(requests):
        tally = tally.with_request(*request(generator, acceptance))
        shortfall = watch.look(tally)
        if shortfall is not None:
            return shortfall
    return None


def test_the_error_is_that_of_whole_requests() -> None:
    """Against the spread of the acceptance length over many samples of 50 requests."""
    generator = random.Random(1)
    lengths, errors = [], []
    for _ in range(400):
        tally = Tally()
        for _ in range(50):
            tally = tally.with_request(*request(generator, 0.6))
        assert tally.acceptance_length is not None
        lengths.append(tally.acceptance_length)
        errors.append(tally.standard_error())
    assert mean(errors) == pytest.approx(stdev(lengths), rel=0.1)


def test_a_worse_drafter_is_called_short_soon() -> None:
    promised = true_length(0.65)
    for seed in range(20):
        shortfall = watched(promised, 0.3, 4 * FIRST_LOOK, seed)
        assert shortfall is not None
        assert shortfall.high < shortfall.least < promised
        assert "wanted" in str(shortfall)


def test_false_alarms_stay_below_one_in_a_hundred() -> None:
    """Even for a drafter at the very edge of what the promise allows, over several looks."""
    edge = true_length(0.6) / (1 - MARGIN)
    alarms = [watched(edge, 0.6, 8 * FIRST_LOOK, seed) is not None for seed in range(500)]
    assert sum(alarms) < 5


def test_looks_are_few_and_end() -> None:
    watch, tally, looks = PromiseWatch(3.0), Tally(), 0
    for _ in range(FIRST_LOOK * 2 ** (LOOKS - 1)):
        tally = tally.with_request(10, 30)
        before = watch._looks
        assert watch.look(tally) is None
        assert watch.look(tally) is None
        looks += watch._looks - before
    assert looks == LOOKS
    assert watch.is_over
    assert watch.look(Tally(requests=10**6, steps=10**6, tokens=10**6)) is None


def test_nothing_served_is_no_shortfall() -> None:
    assert PromiseWatch(3.0).look(Tally()) is None
    assert Tally().acceptance_length is None
    assert Tally().with_request(3, 6).standard_error() == float("inf")
