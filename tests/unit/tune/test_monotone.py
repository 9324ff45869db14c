"""The nearest curve that never falls."""

import numpy as np

from leadout.stats import never_falling


def rising(values: list[float], weights: list[float]) -> list[float]:
    found = never_falling(np.array([values]), np.array([weights], dtype=np.float64))
    return [round(value, 6) for value in found[0].tolist()]


def test_a_rising_curve_stays_as_it_is() -> None:
    assert rising([1.0, 2.0, 2.0, 5.0], [1, 9, 1, 4]) == [1.0, 2.0, 2.0, 5.0]


def test_neighbours_in_the_wrong_order_share_their_weighted_mean() -> None:
    assert rising([1.0, 3.0, 2.0], [1, 1, 1]) == [1.0, 2.5, 2.5]
    assert rising([1.0, 3.0, 2.0], [1, 3, 1]) == [1.0, 2.75, 2.75]
    assert rising([4.0, 2.0, 0.0], [1, 1, 1]) == [2.0, 2.0, 2.0]


def test_a_point_without_weight_takes_its_neighbours_value() -> None:
    assert rising([2.0, 0.0, 3.0], [1, 0, 1]) == [2.0, 2.0, 3.0]


def test_every_row_is_on_its_own() -> None:
    values = np.array([[2.0, 1.0], [1.0, 2.0]])
    found = never_falling(values, np.ones_like(values))
    assert found.tolist() == [[1.5, 1.5], [1.0, 2.0]]
