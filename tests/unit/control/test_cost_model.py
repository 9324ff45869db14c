"""Interpolated step costs, their refinement from any curves, and the drafts chosen by them."""

import random
from itertools import accumulate, product
from operator import mul

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from control_simulator.traffic import MACHINES
from leadout.control.cost_model import (
    OUTLIERS_BEFORE_RESET,
    PiecewiseLinear,
    StepCostFilter,
    StepCosts,
    StepCostTable,
    drafts_to_verify,
    min_worthwhile_survival,
    throughput_by_k,
)
from leadout.errors import LeadoutError

MAX_DRAFTS = 7


@pytest.mark.parametrize("batch_size", [1, 2, 8, 16, 32])
@pytest.mark.parametrize("k", [0, 2, 7])
def test_costs_between_and_beyond_measured_points_are_linear(batch_size: int, k: int) -> None:
    sizes, counts = (1, 4, 16), (0, 3, MAX_DRAFTS)
    costs = StepCosts(
        verify={b: {v: 0.010 + 0.001 * b + 0.001 * b * v for v in counts} for b in sizes},
        draft={b: {k: 0.002 + 0.0005 * b * k for k in counts} for b in sizes},
    )
    assert costs.verify_seconds(batch_size, batch_size * k) == pytest.approx(
        0.010 + 0.001 * batch_size + 0.001 * batch_size * k
    )
    assert costs.draft_seconds(batch_size, k) == pytest.approx(0.002 + 0.0005 * batch_size * k)


def test_extrapolation_does_not_fall_below_the_measured_points() -> None:
    falling = PiecewiseLinear.through({1: 3.0, 2: 1.0})
    assert falling(10) == 1.0


def test_curve_without_points_is_rejected() -> None:
    with pytest.raises(LeadoutError, match="at least one measured point"):
        PiecewiseLinear.through({})
    with pytest.raises(LeadoutError, match="at least one measured batch size"):
        StepCosts(verify={}, draft={})


def scaled(costs: StepCosts, factor: float) -> StepCosts:
    return StepCosts(
        verify={b: {v: factor * s for v, s in row.items()} for b, row in costs.verify.items()},
        draft={b: {k: factor * s for k, s in row.items()} for b, row in costs.draft.items()},
    )


def observe_steps(
    filter_: StepCostFilter, costs: StepCosts, steps: int, noise: float = 0.08
) -> None:
    """Noisy steps of all kinds, one in a hundred four times too long."""
    rng = random.Random(3)
    for _ in range(steps):
        batch_size = rng.choice((1, 2, 4, 8, 16))
        k = rng.choice((0, 3, MAX_DRAFTS))
        drafts = rng.choice((0, 1, 4, MAX_DRAFTS)) * batch_size
        seconds = costs.verify_seconds(batch_size, drafts) + costs.draft_seconds(batch_size, k)
        outlier = 4.0 if rng.random() < 0.01 else 1.0
        filter_.observe(batch_size, drafts, k, seconds * outlier * rng.gauss(1, noise))


def max_error(table: StepCostTable, costs: StepCosts) -> float:
    """The largest relative error over steps without drafts and with all of them."""
    size = table.batch_size
    pairs = [
        (table.step[k][index], costs.verify_seconds(size, index) + costs.draft_seconds(size, k))
        for k in (0, MAX_DRAFTS)
        for index in (0, size * MAX_DRAFTS)
        if table.stride == 1
    ]
    return max(abs(estimate / truth - 1) for estimate, truth in pairs)


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("start", [None, 0.5, 2.0])
def test_estimates_converge_from_any_start(machine: str, start: float | None) -> None:
    truth = MACHINES[machine]()
    filter_ = StepCostFilter(MAX_DRAFTS, None if start is None else scaled(truth, start))
    observe_steps(filter_, truth, 600)
    for batch_size in (1, 4, 8):
        assert max_error(filter_.table(batch_size), truth) < 0.08


def test_right_curves_stay_right_under_noise() -> None:
    truth = MACHINES["cpu"]()
    filter_ = StepCostFilter(MAX_DRAFTS, truth)
    assert max_error(filter_.table(4), truth) < 1e-9
    observe_steps(filter_, truth, 600)
    assert max_error(filter_.table(4), truth) < 0.05


def test_single_slow_step_is_ignored_and_a_lasting_change_is_learnt() -> None:
    truth = MACHINES["cpu"]()
    filter_ = StepCostFilter(MAX_DRAFTS, truth)
    baseline = truth.bare_seconds(4) + truth.draft_seconds(4, 0)
    observe_steps(filter_, truth, 200, noise=0.02)
    filter_.observe(4, 0, 0, 10 * baseline)
    for _ in range(20):
        filter_.observe(4, 0, 0, baseline)
    assert filter_.table(4).baseline == pytest.approx(baseline, rel=0.05)
    for _ in range(OUTLIERS_BEFORE_RESET + 40):
        filter_.observe(4, 0, 0, 3 * baseline)
    assert filter_.table(4).baseline == pytest.approx(3 * baseline, rel=0.1)


def test_first_draft_of_a_batch_may_have_a_cost_of_its_own() -> None:
    filter_ = StepCostFilter(MAX_DRAFTS)
    for drafts in [0, 1, 0, 20, 0, 4] * 20:
        filter_.observe(16, drafts, 0, 0.070 + (0.007 if drafts else 0.0) + 0.0004 * drafts)
    none, first, second = filter_.table(16).verify[:3]
    assert first - none == pytest.approx(0.007, rel=0.2)
    assert second - first < 0.002


def test_more_drafts_never_cost_less() -> None:
    filter_ = StepCostFilter(MAX_DRAFTS)
    rng = random.Random(0)
    for _ in range(50):  # nothing but noise
        drafts, k = rng.choice((0, 28)), rng.choice((0, MAX_DRAFTS))
        filter_.observe(4, drafts, k, rng.uniform(0.01, 0.1))
    table = filter_.table(4)
    assert list(table.verify) == sorted(table.verify)
    assert list(table.draft) == sorted(table.draft)
    assert table.baseline > 0


def test_there_is_no_estimate_before_the_first_step() -> None:
    filter_ = StepCostFilter(MAX_DRAFTS)
    assert not filter_.has_estimate
    filter_.observe(1, 0, 0, 0.02)
    assert filter_.has_estimate
    assert filter_.table(1).baseline == pytest.approx(0.02, rel=0.05)


def test_impossible_settings_and_times_are_rejected() -> None:
    with pytest.raises(ValueError, match="max_drafts is 0, expected 1 or more"):
        StepCostFilter(0)
    with pytest.raises(ValueError, match="expected more than 0"):
        StepCostFilter(MAX_DRAFTS).observe(1, 0, 0, 0.0)


FEW_DRAFTS = 3  # so that all choices can be tried


def small_table(batch_size: int, per_draft: float, per_draft_token: float) -> StepCostTable:
    return StepCostTable(
        batch_size,
        1,
        [1.0 + per_draft * drafts for drafts in range(batch_size * FEW_DRAFTS + 1)],
        [0.0] + [0.2 + per_draft_token * batch_size * k for k in range(1, FEW_DRAFTS + 1)],
    )


probabilities = st.lists(st.floats(0.01, 0.99), min_size=FEW_DRAFTS, max_size=FEW_DRAFTS)


@given(st.lists(probabilities, min_size=1, max_size=3), st.floats(0.0, 0.5), st.floats(0.0, 0.1))
@settings(max_examples=60, deadline=None)
def test_no_other_choice_has_a_higher_throughput(
    requests: list[list[float]], per_draft: float, per_draft_token: float
) -> None:
    batch_size = len(requests)
    costs = small_table(batch_size, per_draft, per_draft_token)
    survivals = [tuple(accumulate(each, mul)) for each in requests]
    by_k = throughput_by_k(survivals, [FEW_DRAFTS] * batch_size, costs)

    def rate(k: int, verify: tuple[int, ...]) -> float:
        accepted = sum(sum(each[:count]) for each, count in zip(survivals, verify, strict=True))
        return (batch_size + accepted) / costs.step[k][sum(verify)]

    for k in range(1, FEW_DRAFTS + 1):
        best = max(rate(k, verify) for verify in product(range(k + 1), repeat=batch_size))
        assert by_k[k] == pytest.approx(best)
        limits = [k] * batch_size
        min_survival = min_worthwhile_survival(survivals, limits, costs, by_k[k])
        verify = tuple(drafts_to_verify(survivals, limits, min_survival))
        assert rate(k, verify) == pytest.approx(best)


def test_limits_of_requests_are_kept() -> None:
    costs = small_table(2, 0.0, 0.0)
    survivals = [(0.9, 0.8, 0.7)] * 2
    assert drafts_to_verify(survivals, [3, 1], 0.5) == [3, 1]
    limited = throughput_by_k(survivals, [3, 0], costs)
    assert limited[3] < throughput_by_k(survivals, [3, 3], costs)[3]
    assert throughput_by_k(survivals, [0, 0], costs)[3] < limited[0]


def test_nothing_is_verified_where_no_draft_is_worth_its_time() -> None:
    costs = small_table(1, 0.5, 0.0)
    survivals = [(0.1, 0.01, 0.001)]
    min_survival = min_worthwhile_survival(survivals, [3], costs, rate=1.0)
    assert drafts_to_verify(survivals, [3], min_survival) == [0]
