"""The nearest curve that never falls."""

import torch
from torch import Tensor

from leadout.tune.monotone import never_falling


def rising(values: list[float], weights: list[float]) -> list[float]:
    rows: tuple[Tensor, Tensor] = (
        torch.tensor([values]).double(),
        torch.tensor([weights]).double(),
    )
    return [round(value, 6) for value in never_falling(*rows)[0].tolist()]


def test_a_rising_curve_stays_as_it_is() -> None:
    assert rising([1.0, 2.0, 2.0, 5.0], [1, 9, 1, 4]) == [1.0, 2.0, 2.0, 5.0]


def test_neighbours_in_the_wrong_order_share_their_weighted_mean() -> None:
    assert rising([1.0, 3.0, 2.0], [1, 1, 1]) == [1.0, 2.5, 2.5]
    assert rising([1.0, 3.0, 2.0], [1, 3, 1]) == [1.0, 2.75, 2.75]
    assert rising([4.0, 2.0, 0.0], [1, 1, 1]) == [2.0, 2.0, 2.0]


def test_a_point_without_weight_takes_its_neighbours_value() -> None:
    assert rising([2.0, 0.0, 3.0], [1, 0, 1]) == [2.0, 2.0, 3.0]


def test_every_row_is_on_its_own() -> None:
    values = torch.tensor([[2.0, 1.0], [1.0, 2.0]]).double()
    found = never_falling(values, torch.ones_like(values))
    assert found.tolist() == [[1.5, 1.5], [1.0, 2.0]]
