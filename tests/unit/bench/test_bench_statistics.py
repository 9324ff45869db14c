"""Ratios are paired within rounds, and spreads say how sure they are."""

import math
import random
import statistics

import pytest

from leadout.stats import geometric_mean, percentile, ratios, spread


def test_drift_that_hits_all_arms_alike_leaves_the_ratio_alone() -> None:
    slow = [1.0, 0.5, 0.25, 0.7, 1.3]
    bare = {n: 100.0 * s for n, s in enumerate(slow)}
    arm = {n: 140.0 * s for n, s in enumerate(slow)}
    found = spread(list(ratios(arm, bare).values()))
    assert found.low == pytest.approx(1.4)
    assert found.high == pytest.approx(1.4)
    # Unpaired, the same numbers would say nothing.
    assert spread(list(arm.values())).low < spread(list(bare.values())).high


def test_only_rounds_that_both_arms_have_are_compared() -> None:
    assert ratios({0: 2.0, 1: 3.0, 2: 9.0}, {0: 1.0, 1: 2.0}) == {0: 2.0, 1: 1.5}


def test_a_spread_tells_extremes_quartiles_and_median() -> None:
    found = spread([1.0, 2.0, 3.0, 4.0, 100.0])
    assert (found.rounds, found.median, found.low, found.high) == (5, 3.0, 1.0, 100.0)
    assert (found.lower_quartile, found.upper_quartile) == (2.0, 4.0)


def test_no_interval_from_fewer_than_three_rounds() -> None:
    assert spread([1.5]).interval is None
    assert spread([1.5, 1.6]).interval is None
    assert spread([1.5, 1.6, 1.7]).interval == (1.5, 1.7)


def test_one_round_is_its_own_spread() -> None:
    found = spread([1.5])
    assert found.low == found.lower_quartile == found.median == found.high == 1.5


def test_the_interval_covers_the_true_median_about_as_often_as_it_says() -> None:
    draw = random.Random(1)
    covered = 0
    for _ in range(200):
        low, high = spread([draw.gauss(1.3, 0.05) for _ in range(12)]).interval or (0.0, 0.0)
        covered += low <= 1.3 <= high
    assert 0.90 <= covered / 200 <= 0.99


def test_the_interval_narrows_with_more_rounds() -> None:
    draw = random.Random(2)

    def width(rounds: int) -> float:
        low, high = spread([draw.gauss(1.0, 0.1) for _ in range(rounds)]).interval or (0, 9)
        return high - low

    assert statistics.fmean(width(40) for _ in range(10)) < statistics.fmean(
        width(5) for _ in range(10)
    )


def test_the_geometric_mean_is_taken_round_by_round() -> None:
    found = geometric_mean([{0: 2.0, 1: 1.0}, {0: 8.0, 1: 1.0, 2: 5.0}])
    assert found == {0: pytest.approx(4.0), 1: pytest.approx(1.0)}
    assert geometric_mean([]) == {}


def test_a_gain_and_an_equal_loss_cancel_out_in_the_geometric_mean() -> None:
    assert geometric_mean([{0: 2.0}, {0: 0.5}]) == {0: pytest.approx(1.0)}


def test_percentiles_lie_between_the_nearest_values() -> None:
    assert percentile([3.0, 1.0, 2.0], 50) == 2.0
    assert percentile([1.0, 2.0], 99) == pytest.approx(1.99)
    assert percentile([7.0], 1) == 7.0
    assert not math.isnan(percentile([1.0, 2.0, 3.0], 100))
