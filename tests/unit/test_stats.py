"""Paired ratios, spreads with their intervals, and monotone curves."""

import math
import random
import statistics

import numpy as np
import pytest

from leadout.stats import (
    holm,
    never_falling,
    paired_p_value,
    paired_ratio,
    percentile,
    spread,
)


def test_spread_has_extremes_quartiles_and_median() -> None:
    found = spread([1.0, 2.0, 3.0, 4.0, 100.0])
    assert (found.rounds, found.median, found.low, found.high) == (5, 3.0, 1.0, 100.0)
    assert (found.lower_quartile, found.upper_quartile) == (2.0, 4.0)


def test_one_round_is_its_own_spread() -> None:
    found = spread([1.5])
    assert found.low == found.lower_quartile == found.median == found.high == 1.5


def test_no_interval_from_fewer_than_six_rounds() -> None:
    assert paired_ratio([[1.5] * 5]).low is None
    assert paired_ratio([[1.5] * 6, [1.5] * 5]).low is None
    found = paired_ratio([[1.5] * 6])
    assert (found.value, found.low, found.high) == pytest.approx((1.5, 1.5, 1.5))


@pytest.mark.parametrize(("sets", "rounds"), [(1, 6), (1, 12), (3, 6)])
def test_the_interval_covers_the_true_ratio_in_about_95_percent(sets: int, rounds: int) -> None:
    draw = random.Random(1)
    covered = 0
    for _ in range(400):
        found = paired_ratio(
            [[math.exp(draw.gauss(0.2, 0.1)) for _ in range(rounds)] for _ in range(sets)]
        )
        assert found.low is not None
        assert found.high is not None
        covered += found.low <= math.exp(0.2) <= found.high
    assert 0.92 <= covered / 400 <= 0.985


def test_the_interval_narrows_with_more_rounds() -> None:
    draw = random.Random(2)

    def width(rounds: int) -> float:
        found = paired_ratio([[math.exp(draw.gauss(0.0, 0.1)) for _ in range(rounds)]])
        return (found.high or 9.0) - (found.low or 0.0)

    assert statistics.fmean(width(40) for _ in range(10)) < statistics.fmean(
        width(6) for _ in range(10)
    )


def test_reciprocal_ratios_cancel_in_the_geometric_mean() -> None:
    assert paired_ratio([[2.0, 2.0], [0.5]]).value == pytest.approx(1.0)


def test_percentiles_lie_between_the_nearest_values() -> None:
    assert percentile([3.0, 1.0, 2.0], 50) == 2.0
    assert percentile([1.0, 2.0], 99) == pytest.approx(1.99)
    assert percentile([7.0], 1) == 7.0
    assert not math.isnan(percentile([1.0, 2.0, 3.0], 100))


def rising(values: list[float], weights: list[float]) -> list[float]:
    found = never_falling(np.array([values]), np.array([weights], dtype=np.float64))
    return [round(value, 6) for value in found[0].tolist()]


def test_a_rising_curve_is_unchanged() -> None:
    assert rising([1.0, 2.0, 2.0, 5.0], [1, 9, 1, 4]) == [1.0, 2.0, 2.0, 5.0]


def test_falling_neighbours_share_their_weighted_mean() -> None:
    assert rising([1.0, 3.0, 2.0], [1, 1, 1]) == [1.0, 2.5, 2.5]
    assert rising([1.0, 3.0, 2.0], [1, 3, 1]) == [1.0, 2.75, 2.75]
    assert rising([4.0, 2.0, 0.0], [1, 1, 1]) == [2.0, 2.0, 2.0]


def test_a_point_without_weight_takes_its_neighbours_value() -> None:
    assert rising([2.0, 0.0, 3.0], [1, 0, 1]) == [2.0, 2.0, 3.0]


def test_rows_are_independent() -> None:
    values = np.array([[2.0, 1.0], [1.0, 2.0]])
    found = never_falling(values, np.ones_like(values))
    assert found.tolist() == [[1.5, 1.5], [1.0, 2.0]]


def test_holm_corrects_in_steps_and_keeps_the_order() -> None:
    assert holm([0.03, 0.01, 0.02]) == pytest.approx([0.04, 0.03, 0.04])
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([0.04]) == [0.04]
    assert holm([]) == []


def test_p_values_of_differences_without_effect_are_uniform() -> None:
    draw = np.random.default_rng(0)
    wholes = draw.uniform(20, 60, (400, 24))
    found = [paired_p_value(draw.normal(0, 3, 24), row) for row in wholes]
    assert 0.02 < np.mean(np.array(found) < 0.05) < 0.08
    shifted = [paired_p_value(draw.normal(0, 3, 24) + 0.1 * row, row) for row in wholes]
    assert np.mean(np.array(shifted) < 0.05) > 0.95


def test_p_values_without_spread_or_with_one_unit() -> None:
    ones = np.ones(5)
    assert paired_p_value(np.zeros(5), ones) == 1.0
    assert paired_p_value(ones, ones) == 0.0
    assert paired_p_value(ones[:1], ones[:1]) == 1.0
