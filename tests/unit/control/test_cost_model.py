"""Interpolated step costs, their refinement from any curves, and the drafts chosen by them."""

import random
from itertools import product

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from control_simulator.traffic import MACHINES
from leadout.control.cost_model import (
    OUTLIERS_BEFORE_RESET,
    Optimum,
    PiecewiseLinear,
    StepCostFilter,
    StepCosts,
    StepCostTable,
    optimise,
)
from leadout.errors import LeadoutError

MAX_DRAFTS = 7
LADDER = tuple(range(MAX_DRAFTS + 1))


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
        (
            table.uniform[drafts] + table.draft[k],
            costs.verify_seconds(size, drafts * size) + costs.draft_seconds(size, k),
        )
        for k in (0, MAX_DRAFTS)
        for drafts in (0, MAX_DRAFTS)
    ]
    return max(abs(estimate / truth - 1) for estimate, truth in pairs)


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("start", [None, 0.5, 2.0])
def test_estimates_converge_from_any_start(machine: str, start: float | None) -> None:
    truth = MACHINES[machine].costs()
    filter_ = StepCostFilter(LADDER, None if start is None else scaled(truth, start))
    observe_steps(filter_, truth, 600)
    for batch_size in (1, 4, 8):
        assert max_error(filter_.table(batch_size), truth) < 0.08


def test_right_curves_stay_right_under_noise() -> None:
    truth = MACHINES["cpu"].costs()
    filter_ = StepCostFilter(LADDER, truth)
    assert max_error(filter_.table(4), truth) < 1e-9
    observe_steps(filter_, truth, 600)
    assert max_error(filter_.table(4), truth) < 0.05


def test_single_slow_step_is_ignored_and_a_lasting_change_is_learnt() -> None:
    truth = MACHINES["cpu"].costs()
    filter_ = StepCostFilter(LADDER, truth)
    baseline = truth.bare_seconds(4) + truth.draft_seconds(4, 0)
    observe_steps(filter_, truth, 200, noise=0.02)
    filter_.observe(4, 0, 0, 10 * baseline)
    for _ in range(20):
        filter_.observe(4, 0, 0, baseline)
    assert filter_.table(4).baseline == pytest.approx(baseline, rel=0.05)
    for _ in range(OUTLIERS_BEFORE_RESET + 40):
        filter_.observe(4, 0, 0, 3 * baseline)
    assert filter_.table(4).baseline == pytest.approx(3 * baseline, rel=0.1)


def test_mixed_steps_have_a_cost_of_their_own() -> None:
    filter_ = StepCostFilter(LADDER)
    for drafts in [0, 1, 0, 20, 0, 4] * 20:
        seconds = 0.070 + (0.007 if drafts else 0.0) + 0.0004 * drafts
        filter_.observe(16, drafts, 0, seconds, is_mixed=bool(drafts))
    table = filter_.table(16)
    assert table.mixed_seconds(1) - table.uniform[0] == pytest.approx(0.007, rel=0.25)
    assert table.mixed_seconds(2) - table.mixed_seconds(1) < 0.002


def test_costs_may_fall_from_one_rung_to_the_next() -> None:
    filter_ = StepCostFilter((0, 1, 2, 3))
    seconds = {0: 0.010, 1: 0.014, 2: 0.013, 3: 0.011}
    for k in [0, 1, 2, 3] * 60:
        filter_.observe(8, 8 * k, k, seconds[k])
    table = filter_.table(8)
    found = table.uniform + table.draft
    assert found == pytest.approx(list(seconds.values()), rel=0.05)
    assert found[3] < found[2] < found[1]


def test_costs_of_decoding_are_learnt_from_steps_that_contain_prefill() -> None:
    truth = MACHINES["gpu"].costs()
    filter_, rng = StepCostFilter(LADDER), random.Random(1)
    for _ in range(400):
        k, prefill = rng.choice((0, 7)), rng.choice((128, 256, 512))
        seconds = truth.verify_seconds(4, 4 * k) + truth.draft_seconds(4, k) + 2e-5 * prefill
        filter_.observe(4, 4 * k, k, seconds * rng.gauss(1, 0.03), prefill=prefill)
    found, drafts = filter_.table(4), MAX_DRAFTS
    more = found.uniform[drafts] + found.draft[drafts] - found.baseline
    expected = truth.step_seconds(4, drafts) - truth.step_seconds(4, 0)
    assert more == pytest.approx(expected, rel=0.15)
    assert found.baseline == pytest.approx(truth.step_seconds(4, 0), rel=0.1)


def test_estimates_stay_positive_whatever_is_measured() -> None:
    filter_ = StepCostFilter(LADDER)
    rng = random.Random(0)
    for _ in range(50):  # nothing but noise
        drafts, k = rng.choice((0, 28)), rng.choice((0, MAX_DRAFTS))
        filter_.observe(4, drafts, k, rng.uniform(0.01, 0.1))
    table = filter_.table(4)
    assert table.uniform.min() > 0
    assert table.mixed.min() > 0
    assert table.draft.min() >= 0


def test_leaving_the_graphs_is_expensive_until_it_was_measured() -> None:
    costs = MACHINES["graphs"].costs()
    with_graphs = StepCostFilter(LADDER, costs, has_graphs=True)
    without = StepCostFilter(LADDER, costs)
    assert with_graphs.table(8).mixed[3] > 1.2 * with_graphs.table(8).uniform[3]
    assert without.table(8).mixed[3] == pytest.approx(without.table(8).uniform[3])
    for _ in range(60):  # next to steps that stay in the graphs
        seconds = costs.verify_seconds(8, 20) + costs.draft_seconds(8, 7)
        with_graphs.observe(8, 20, 7, seconds, is_mixed=True)
        for k in (0, 3, 7):
            with_graphs.observe(8, 8 * k, k, costs.step_seconds(8, k))
    # Most of it is gone; the rest is shared with other coefficients of such a step.
    table = with_graphs.table(8)
    assert table.mixed_seconds(20) == pytest.approx(costs.verify_seconds(8, 20), rel=0.15)


def test_there_is_no_estimate_before_the_first_step() -> None:
    filter_ = StepCostFilter(LADDER)
    assert not filter_.has_estimate
    filter_.observe(1, 0, 0, 0.02)
    assert filter_.has_estimate
    assert filter_.table(1).baseline == pytest.approx(0.02, rel=0.05)


def test_impossible_settings_and_times_are_rejected() -> None:
    for ladder in ((0,), (1, 2), (0, 3, 2), (0, 1, 1)):
        with pytest.raises(ValueError, match="expected 0 and at least one larger K, ascending"):
            StepCostFilter(ladder)
    with pytest.raises(ValueError, match="expected more than 0"):
        StepCostFilter(LADDER).observe(1, 0, 0, 0.0)


FEW_DRAFTS = 3  # so that all choices can be tried


def small_table(
    batch_size: int, uniform: list[float], mixed: list[float], draft: list[float]
) -> StepCostTable:
    return StepCostTable(
        batch_size, np.arange(FEW_DRAFTS + 1), np.array(uniform), np.array(mixed), np.array(draft)
    )


def best_of(survival: np.ndarray, limits: list[int], costs: StepCostTable) -> Optimum:
    """Every request is a group of its own."""
    counts = (np.arange(FEW_DRAFTS) < np.array(limits)[:, None]).astype(np.int64)
    return optimise(survival, counts, min(limits), costs)


probabilities = st.lists(st.floats(0.01, 0.99), min_size=FEW_DRAFTS, max_size=FEW_DRAFTS)
any_costs = st.lists(st.floats(0.5, 2.0), min_size=FEW_DRAFTS + 1, max_size=FEW_DRAFTS + 1)


@given(st.lists(probabilities, min_size=1, max_size=3), any_costs, any_costs, any_costs)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_no_other_choice_has_a_higher_throughput(
    requests: list[list[float]], uniform: list[float], mixed: list[float], draft: list[float]
) -> None:
    """Whatever the costs, also where more drafts cost less."""
    batch_size = len(requests)
    costs = small_table(batch_size, uniform, sorted(mixed), draft)
    survival = np.cumprod(np.array(requests), axis=1)
    found = best_of(survival, [FEW_DRAFTS] * batch_size, costs)

    def rate(k: int, verify: tuple[int, ...]) -> float:
        accepted = sum(
            float(row[:count].sum()) for row, count in zip(survival, verify, strict=True)
        )
        is_uniform = len(set(verify)) == 1
        seconds = costs.uniform[verify[0]] if is_uniform else costs.mixed_seconds(sum(verify))
        return float((batch_size + accepted) / (seconds + costs.draft[k]))

    assert found.rates[0] == pytest.approx(rate(0, (0,) * batch_size))
    best = max(
        rate(k, verify)
        for k in range(FEW_DRAFTS + 1)
        for verify in product(range(k + 1), repeat=batch_size)
        if len(set(verify)) > 1 or verify[0] == k
    )
    assert found.rates.max() >= 0.9999 * best
    chosen = int(found.rates.argmax())
    if not found.min_survival[chosen]:
        assert found.rates[chosen] == pytest.approx(rate(chosen, (chosen,) * batch_size))


def test_limits_of_requests_are_kept() -> None:
    costs = small_table(2, [1.0] * 4, [1.0] * 4, [0.0] * 4)
    survival = np.array([(0.9, 0.8, 0.7)] * 2)
    limited = best_of(survival, [3, 0], costs)
    assert limited.rates[3] == pytest.approx((2 + 2.4) / 1.0)
    assert 0 < limited.min_survival[3] <= 0.7  # not the same number for both
    assert best_of(survival, [3, 3], costs).rates[3] == pytest.approx(2 + 4.8)
    assert best_of(survival, [0, 0], costs).rates.max() == pytest.approx(2.0)


def test_steps_are_uniform_unless_leaving_the_graph_pays() -> None:
    survival = np.array([(0.95, 0.9, 0.86), (0.05, 0.0, 0.0)])
    uniform, draft = [1.0, 1.2, 1.4, 1.6], [0.0, 0.1, 0.1, 0.1]
    limits = [3, 3]
    penalty = best_of(survival, limits, small_table(2, uniform, [1.8, 2.0, 2.2, 2.4], draft))
    assert not penalty.min_survival.any()
    free = best_of(survival, limits, small_table(2, uniform, uniform, draft))
    assert free.min_survival[3] > 0.05
    assert free.rates[3] > penalty.rates[3]
