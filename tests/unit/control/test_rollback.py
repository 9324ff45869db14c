"""The shortfall test fires for a worse drafter and stays silent for a healthy one."""

from __future__ import annotations

import random
from statistics import mean, stdev

import pytest

from leadout.control.rollback import (
    FIRST_CHECK,
    MAX_CHECKS,
    TOLERANCE,
    Shortfall,
    ShortfallTest,
    Tally,
)

K = 5


def request_acceptance(rng: random.Random, acceptance: float) -> float:
    """Requests differ in how well they are drafted."""
    return min(max(rng.gauss(acceptance, 0.12), 0.0), 0.98)


def request(rng: random.Random, acceptance: float) -> tuple[int, int]:
    """Steps and tokens of one answer."""
    probability = request_acceptance(rng, acceptance)
    steps = rng.randint(5, 80)
    tokens = 0
    for _ in range(steps):
        accepted = 0
        while accepted < K and rng.random() < probability:
            accepted += 1
        tokens += accepted + 1
    return steps, tokens


def true_length(acceptance: float) -> float:
    """Tokens per step over endless requests: E[1 + a + ... + a^K]."""
    rng = random.Random(0)
    drawn = [request_acceptance(rng, acceptance) for _ in range(100_000)]
    return mean(sum(each**position for position in range(K + 1)) for each in drawn)


def first_shortfall(
    expected: float, acceptance: float, requests: int, seed: int
) -> Shortfall | None:
    rng = random.Random(seed)
    test, tally = ShortfallTest(expected), Tally()
    for _ in range(requests):
        tally = tally.with_request(*request(rng, acceptance))
        shortfall = test.check(tally)
        if shortfall is not None:
            return shortfall
    return None


def test_standard_error_is_that_of_whole_requests() -> None:
    """Compared with the spread of the acceptance length over many samples of 50 requests."""
    rng = random.Random(1)
    lengths, errors = [], []
    for _ in range(400):
        tally = Tally()
        for _ in range(50):
            tally = tally.with_request(*request(rng, 0.6))
        assert tally.acceptance_length is not None
        lengths.append(tally.acceptance_length)
        errors.append(tally.standard_error())
    assert mean(errors) == pytest.approx(stdev(lengths), rel=0.1)


def test_worse_drafter_is_found_soon() -> None:
    expected = true_length(0.65)
    for seed in range(20):
        shortfall = first_shortfall(expected, 0.3, 4 * FIRST_CHECK, seed)
        assert shortfall is not None
        assert shortfall.high < shortfall.least < expected
        assert "expected at least" in str(shortfall)


def test_false_alarms_are_rarer_than_one_in_a_hundred() -> None:
    """Even for a drafter at the very edge of what is tolerated, over several checks."""
    edge = true_length(0.6) / (1 - TOLERANCE)
    alarms = [first_shortfall(edge, 0.6, 8 * FIRST_CHECK, seed) is not None for seed in range(500)]
    assert sum(alarms) < 5


def test_checks_are_few_and_end() -> None:
    test, tally, checks = ShortfallTest(3.0), Tally(), 0
    for _ in range(FIRST_CHECK * 2 ** (MAX_CHECKS - 1)):
        tally = tally.with_request(10, 30)
        before = test._checks
        assert test.check(tally) is None
        assert test.check(tally) is None
        checks += test._checks - before
    assert checks == MAX_CHECKS
    assert test.is_finished
    assert test.check(Tally(requests=10**6, steps=10**6, tokens=10**6)) is None


def test_no_traffic_is_no_shortfall() -> None:
    assert ShortfallTest(3.0).check(Tally()) is None
    assert Tally().acceptance_length is None
    assert Tally().with_request(3, 6).standard_error() == float("inf")
