"""Costs refined by measured steps, from curves, wrong curves and nothing."""

import random

import pytest

from control_simulator.traffic import MACHINES
from leadout.control.cost_model import STUBBORN, LearnedCosts, Prices, StepCosts

MOST = 7


def scaled(costs: StepCosts, factor: float) -> StepCosts:
    return StepCosts(
        verify={b: {v: factor * s for v, s in row.items()} for b, row in costs.verify.items()},
        draft={b: {k: factor * s for k, s in row.items()} for b, row in costs.draft.items()},
    )


def work(learned: LearnedCosts, costs: StepCosts, steps: int, noise: float = 0.08) -> None:
    """Steps of all kinds, noisy, one in a hundred four times too long."""
    draws = random.Random(3)
    for _ in range(steps):
        batch = draws.choice((1, 2, 4, 8, 16))
        k = draws.choice((0, 3, MOST))
        drafts = draws.choice((0, 1, 4, MOST)) * batch
        seconds = costs.verify_seconds(batch, drafts) + costs.draft_seconds(batch, k)
        stumble = 4.0 if draws.random() < 0.01 else 1.0
        learned.observe(batch, drafts, k, seconds * stumble * draws.gauss(1, noise))


def furthest(found: Prices, costs: StepCosts) -> float:
    """The largest relative error over steps without and with all drafts."""
    batch = found.batch
    pairs = [
        (found.step[k][place], costs.verify_seconds(batch, place) + costs.draft_seconds(batch, k))
        for k in (0, MOST)
        for place in (0, batch * MOST)
        if found.stride == 1
    ]
    return max(abs(guess / truth - 1) for guess, truth in pairs)


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("start", [None, 0.5, 2.0])
def test_prices_come_near_the_truth_from_any_start(machine: str, start: float | None) -> None:
    truth = MACHINES[machine]()
    learned = LearnedCosts(MOST, None if start is None else scaled(truth, start))
    work(learned, truth, 600)
    for batch in (1, 4, 8):
        assert furthest(learned.prices(batch), truth) < 0.08


def test_right_curves_stay_right_under_noise() -> None:
    truth = MACHINES["cpu"]()
    learned = LearnedCosts(MOST, truth)
    assert furthest(learned.prices(4), truth) < 1e-9
    work(learned, truth, 600)
    assert furthest(learned.prices(4), truth) < 0.05


def test_a_stumble_is_ignored_and_a_new_pace_is_learnt() -> None:
    truth = MACHINES["cpu"]()
    learned = LearnedCosts(MOST, truth)
    bare = truth.bare_seconds(4) + truth.draft_seconds(4, 0)
    work(learned, truth, 200, noise=0.02)
    learned.observe(4, 0, 0, 10 * bare)
    for _ in range(20):
        learned.observe(4, 0, 0, bare)
    assert learned.prices(4).bare == pytest.approx(bare, rel=0.05)
    for _ in range(STUBBORN + 40):
        learned.observe(4, 0, 0, 3 * bare)
    assert learned.prices(4).bare == pytest.approx(3 * bare, rel=0.1)


def test_the_first_draft_of_a_batch_may_have_a_price_of_its_own() -> None:
    learned = LearnedCosts(MOST)
    for drafts in [0, 1, 0, 20, 0, 4] * 20:
        learned.observe(16, drafts, 0, 0.070 + (0.007 if drafts else 0.0) + 0.0004 * drafts)
    none, first, second = learned.prices(16).verify[:3]
    assert first - none == pytest.approx(0.007, rel=0.2)
    assert second - first < 0.002


def test_more_drafts_never_cost_less() -> None:
    learned = LearnedCosts(MOST)
    draws = random.Random(0)
    for _ in range(50):  # nothing but noise
        learned.observe(4, draws.choice((0, 28)), draws.choice((0, MOST)), draws.uniform(0.01, 0.1))
    prices = learned.prices(4)
    assert list(prices.verify) == sorted(prices.verify)
    assert list(prices.draft) == sorted(prices.draft)
    assert prices.bare > 0


def test_nothing_is_known_before_the_first_step() -> None:
    learned = LearnedCosts(MOST)
    assert not learned.known
    learned.observe(1, 0, 0, 0.02)
    assert learned.known
    assert learned.prices(1).bare == pytest.approx(0.02, rel=0.05)


def test_impossible_settings_and_times_are_refused() -> None:
    with pytest.raises(ValueError, match="found a largest K of 0"):
        LearnedCosts(0)
    with pytest.raises(ValueError, match="wanted more than 0"):
        LearnedCosts(MOST).observe(1, 0, 0, 0.0)
