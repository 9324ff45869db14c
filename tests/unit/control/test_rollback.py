"""The shortfall test fires for a worse drafter and stays silent for a healthy one."""

from __future__ import annotations

import json
import random
from statistics import mean, stdev

import numpy as np
import pytest

from control_simulator.rollback_fleet import Hostile, Population, Scene, is_removed, tally_of
from leadout.control.rollback import (
    FIRST_CHECK,
    HOSTILE_BURST,
    HOSTILE_LENGTH,
    MAX_CHECKS,
    MAX_CLIENT_SHARE,
    MAX_REQUESTS_PER_PROMPT,
    Acceptance,
    Expectation,
    RequestLimits,
    Shortfall,
    ShortfallTest,
    Tally,
    tolerance,
)
from support.models import ROOT

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


def expecting(length: float, before: float | None = None, low_share: float = 0.0) -> Expectation:
    """An expectation without uncertainty."""
    return Expectation(
        Acceptance(length, length, low_share),
        None if before is None else Acceptance(before, before, low_share),
    )


def first_shortfall(
    expected: float, acceptance: float, requests: int, seed: int
) -> Shortfall | None:
    rng = random.Random(seed)
    test, tally = ShortfallTest(expecting(expected)), Tally()
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
        found = tally.estimate()
        assert found is not None
        lengths.append(found.length)
        errors.append(found.error)
    assert mean(errors) == pytest.approx(stdev(lengths), rel=0.1)


def test_worse_drafter_is_found_soon() -> None:
    expected = true_length(0.65)
    for seed in range(20):
        shortfall = first_shortfall(expected, 0.3, 4 * FIRST_CHECK, seed)
        assert shortfall is not None
        assert shortfall.high < shortfall.least < expected
        assert "expected at least" in str(shortfall)


def test_false_alarms_are_rarer_than_one_in_a_hundred(nightly: bool) -> None:
    """Even for a drafter at the very edge of what is tolerated, over several checks."""
    edge, count = true_length(0.6) / (1 - tolerance(10**6)), 300 if nightly else 100
    alarms = [
        first_shortfall(edge, 0.6, 8 * FIRST_CHECK, seed) is not None for seed in range(count)
    ]
    assert sum(alarms) < max(2, 0.01 * count)


def test_checks_are_few_and_end() -> None:
    test, tally, checks = ShortfallTest(expecting(3.0)), Tally(), 0
    for _ in range(FIRST_CHECK * 2 ** (MAX_CHECKS - 1)):
        tally = tally.with_request(10, 30)
        before = test.checks
        assert test.check(tally) is None
        assert test.check(tally) is None
        checks += test.checks - before
    assert checks == MAX_CHECKS
    assert test.is_finished
    assert test.check(Tally(requests=10**6, steps=10**6, tokens=10**6)) is None


def test_no_traffic_is_no_shortfall() -> None:
    assert ShortfallTest(expecting(3.0)).check(Tally()) is None
    assert Tally().acceptance_length is None
    assert Tally().with_request(3, 6).estimate() is None


# A small part of experiments/rollback_adversary.py, whose result is committed.

MEASURED = json.loads((ROOT / "results" / "learn" / "gate_noise.json").read_text())
TRAFFIC = Population.read(MEASURED["traffic"])
RUNS = 8
STRATEGIES = {
    "acceptance 1.0": Hostile(),
    "just not left out": Hostile(length="just kept", before=False),
    "bursts": Hostile(in_bursts=True, before=False),
    "one client": Hostile(share=0.4, clients="one", before=False),
    "one prompt": Hostile(share=0.4, one_prompt=True, before=False),
}


def removed(scene: Scene) -> int:
    draw = np.random.default_rng(0)
    return sum(is_removed(TRAFFIC, scene, draw) for _ in range(RUNS))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_hostile_requests_do_not_remove_a_good_version(strategy: str) -> None:
    assert removed(Scene(hostile=STRATEGIES[strategy])) == 0


def test_half_of_the_requests_from_many_clients_remove_a_good_version() -> None:
    """The test above can fail."""
    assert removed(Scene(hostile=Hostile(share=0.5, before=False))) == RUNS


@pytest.mark.parametrize("servers", [1, 2])
def test_a_version_a_tenth_below_its_promise_is_removed(servers: int) -> None:
    """Also if the servers are restarted meanwhile, as each of them is at a random time."""
    assert removed(Scene(below=0.1, servers=servers)) == RUNS
    assert removed(Scene(below=0.1, hostile=Hostile(share=0.0), servers=servers)) == RUNS


def test_harder_traffic_does_not_remove_a_good_version() -> None:
    harder = Scene(hostile=Hostile(share=0.0), harder_since_capture=0.15)
    assert removed(harder) == 0
    since_swap = Scene(hostile=Hostile(share=0.0), servers=2, harder_since_swap=0.15)
    assert removed(since_swap) == 0


def test_the_simulation_counts_as_servers_do() -> None:
    rng, whole = random.Random(0), Tally()
    drawn = [request(rng, 0.6) for _ in range(100)]
    for steps, tokens in drawn:
        whole = whole.with_request(steps, tokens)
    steps, tokens = np.array(drawn, dtype=np.float64).T
    both, found = tally_of(steps, tokens).estimate(), whole.estimate()
    assert both is not None
    assert found is not None
    assert both.length == pytest.approx(found.length)
    assert both.error == pytest.approx(found.error)


def tally(requests: int, length: float, low: int = 0) -> Tally:
    """Requests around an acceptance length, and some at 1."""
    rng, found = random.Random(requests), Tally()
    for _ in range(requests):
        found = found.with_request(40, max(40, round(40 * rng.gauss(length, 0.15 * length))))
    for _ in range(low):
        found = found.with_request(512, 512)
    return found


def test_a_burst_of_low_requests_right_after_a_swap_is_left_out() -> None:
    test = ShortfallTest(expecting(3.0))
    assert test.check(tally(FIRST_CHECK - HOSTILE_BURST, 3.0, low=HOSTILE_BURST)) is None
    assert ShortfallTest(expecting(3.0)).check(tally(10, 3.0, low=FIRST_CHECK - 10)) is not None


def test_low_requests_that_are_expected_are_not_left_out() -> None:
    """Otherwise a worse version would look better than it is where many requests are low."""
    mixed = tally(450, 2.7, low=50)
    few, many = (mixed.estimate(Acceptance(3.0, 3.0, share)) for share in (0.0, 0.1))
    assert few is not None
    assert many is not None
    assert few.length == pytest.approx(2.7, abs=0.05)
    assert many.length < few.length - 0.1


def test_the_share_of_low_requests_is_measured_with_the_expectation() -> None:
    found = Acceptance.of(tally(180, 3.0, low=20))
    assert found is not None
    assert 1 < found.low < found.length
    assert 0.05 < found.low_share < 0.1  # a lower bound
    assert tally(180, 3.0, low=20).low_requests(found.low) == 20
    assert HOSTILE_LENGTH * found.low > 1


def test_requests_of_a_prompt_count_up_to_a_limit() -> None:
    limits = RequestLimits()
    counted = [limits.admit("again", None)[0] for _ in range(10)]
    assert sum(counted) == MAX_REQUESTS_PER_PROMPT
    assert limits.admit("another", None) == (True, False)


def test_requests_of_a_client_count_up_to_a_share() -> None:
    limits, of_one = RequestLimits(), 0
    for number in range(1600):
        is_busy = number % 2 == 0
        counts, by_client = limits.admit(number, "busy" if is_busy else number)
        assert counts
        of_one += is_busy and by_client
    assert of_one == pytest.approx(1600 * MAX_CLIENT_SHARE, abs=1)


def test_a_busy_client_alone_does_not_remove_a_version() -> None:
    all_requests = tally(400, 3.0, low=300)
    by_client = tally(400, 3.0, low=40)
    assert ShortfallTest(expecting(3.0)).check(all_requests) is not None
    assert ShortfallTest(expecting(3.0)).check(all_requests, by_client) is None
    # With too few clients for a limit, all requests count.
    assert ShortfallTest(expecting(3.0)).check(all_requests, tally(70, 3.0)) is not None
    # Many clients with few requests each do not count for more than their requests.
    assert ShortfallTest(expecting(3.0)).check(tally(660, 3.0), tally(250, 3.0, low=200)) is None


def test_what_the_version_before_accepts_now_is_compared_with_what_it_did() -> None:
    now = tally(1000, 2.4)  # 3.0 was expected
    assert ShortfallTest(expecting(3.0, before=2.9), tally(500, 2.9)).check(now) is not None
    assert ShortfallTest(expecting(3.0, before=2.9), tally(500, 2.3)).check(now) is None
    # Other servers, at the same time, say more than this one before the swap.
    for control, is_short in ((2.3, False), (2.9, True)):
        test = ShortfallTest(expecting(3.0, before=2.9), tally(500, 2.9))
        assert (test.check(now, control=tally(500, control)) is not None) == is_short
    # Traffic that is easier does not raise what is expected.
    better = ShortfallTest(expecting(3.0, before=2.9), tally(500, 4.0))
    assert better.check(tally(1000, 3.0)) is None


def test_one_long_answer_counts_as_one_request() -> None:
    tally = Tally()
    for _ in range(40):
        tally = tally.with_request(30, 90)
    found = tally.with_request(100_000, 200_000).estimate()
    assert found is not None
    assert found.length > 2.97


def test_a_version_better_than_the_one_before_stays_below_its_promise() -> None:
    """Going back would make it worse."""
    before, now = tally(200, 2.0), tally(200, 2.5)
    assert ShortfallTest(expecting(3.0)).check(now) is not None
    assert ShortfallTest(expecting(3.0), before).check(now) is None
    assert ShortfallTest(expecting(3.0), now).check(before) is not None
    few = Tally().with_request(10, 20)  # says nothing
    assert ShortfallTest(expecting(3.0), few).check(now) is not None


def test_tallies_of_engines_and_runs_add_up() -> None:
    rng = random.Random(0)
    drawn = [request(rng, 0.5) for _ in range(50)]
    whole, first, second = Tally(), Tally(), Tally()
    for number, (steps, tokens) in enumerate(drawn):
        whole = whole.with_request(steps, tokens)
        if number < 20:
            first = first.with_request(steps, tokens)
        else:
            second = second.with_request(steps, tokens)
    both = (first + Tally.model_validate_json(second.model_dump_json())).estimate(
        Acceptance(3.0, 3.0)
    )
    alone = whole.estimate(Acceptance(3.0, 3.0))
    assert both is not None
    assert alone is not None
    assert both.length == pytest.approx(alone.length)
    assert both.error == pytest.approx(alone.error)
