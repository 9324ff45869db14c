"""Costs between measured points, and what drafting gains by them."""

import pytest

from leadout.control.acceptance_model import AcceptanceCurve
from leadout.control.cost_model import Line, NoCostsError, StepCosts
from leadout.control.tuned_file import gain

# A step: 10 ms, 1 ms a request, 1 ms a verified draft; drafting: 2 ms and 0.5 ms a slot.
BATCHES, MOST = (1, 4, 16), 7
COSTS = StepCosts(
    verify={b: {v: 0.010 + 0.001 * b + 0.001 * b * v for v in (0, 3, MOST)} for b in BATCHES},
    draft={b: {k: 0.002 + 0.0005 * b * k for k in (0, 3, MOST)} for b in BATCHES},
)


@pytest.mark.parametrize("batch", [1, 2, 8, 16, 32])
@pytest.mark.parametrize("k", [0, 2, 7])
def test_points_between_the_measured_ones_follow_the_law_that_made_them(batch: int, k: int) -> None:
    assert COSTS.verify_seconds(batch, batch * k) == pytest.approx(
        0.010 + 0.001 * batch + 0.001 * batch * k
    )
    assert COSTS.draft_seconds(batch, k) == pytest.approx(0.002 + 0.0005 * batch * k)


def test_a_noisy_last_piece_does_not_lead_below_what_was_measured() -> None:
    falling = Line.through({1: 3.0, 2: 1.0})
    assert falling(10) == 1.0


def test_a_curve_without_points_is_refused() -> None:
    with pytest.raises(NoCostsError, match="found no point"):
        Line.through({})
    with pytest.raises(NoCostsError, match="found no batch size"):
        StepCosts(verify={}, draft={})


def test_tokens_follow_from_odds_and_from_survival() -> None:
    assert AcceptanceCurve.of_odds([0.5, 0.5]).tokens == (1.0, 1.5, 1.75)
    assert AcceptanceCurve.of_survival([0.5, 0.25]).tokens == (1.0, 1.5, 1.75)
    with pytest.raises(ValueError, match="wanted exactly 1 token"):
        AcceptanceCurve((1.2, 1.5))


def test_gain_is_tokens_over_time_against_a_bare_step() -> None:
    curve = AcceptanceCurve.of_odds([0.8, 0.7, 0.6])
    found = gain(COSTS, curve, batch=4, k=3)
    step = COSTS.verify_seconds(4, 12) + COSTS.draft_seconds(4, 3)
    assert found.tokens_per_second == pytest.approx(4 * curve.tokens[3] / step)
    assert found.speedup == pytest.approx(curve.tokens[3] / step * COSTS.bare_seconds(4))
    assert found.perfect == pytest.approx(4 / step * COSTS.bare_seconds(4))
    assert found.perfect > found.speedup
    assert found.free > found.speedup


def test_a_drafter_that_is_never_right_only_costs() -> None:
    useless = AcceptanceCurve.of_odds([0.0] * MOST)
    assert all(gain(COSTS, useless, batch, k).speedup < 1 for batch in BATCHES for k in range(MOST))
