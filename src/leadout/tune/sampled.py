"""An estimate with its values over bootstrap draws: the interval of whatever is made of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from leadout.control.interval import Interval

DRAWS = 1000
LEVEL = 0.95


@dataclass(frozen=True, slots=True)
class Sampled:
    """`values[0]` is the estimate from all that was measured, the others those of the draws."""

    values: Tensor  # [1 + DRAWS]

    @classmethod
    def exactly(cls, value: float) -> Sampled:
        return cls(torch.full((1 + DRAWS,), value, dtype=torch.float64))

    def __add__(self, other: Sampled) -> Sampled:
        return Sampled(self.values + other.values)

    def __truediv__(self, other: Sampled) -> Sampled:
        return Sampled(self.values / other.values)

    def interval(self) -> Interval:
        edge = (1 - LEVEL) / 2
        edges = torch.tensor([edge, 1 - edge], dtype=torch.float64)
        low, high = torch.quantile(self.values[1:], edges).tolist()
        return Interval(value=self.values[0].item(), low=low, high=high)


def multiplicities(units: int, seed: int) -> Tensor:
    """How often each unit counts, [1 + DRAWS, units]: once, then as drawn with repetition."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(units, (DRAWS, units), generator=generator)
    counts = torch.zeros(DRAWS, units, dtype=torch.float64)
    counts.scatter_add_(1, drawn, torch.ones_like(drawn, dtype=torch.float64))
    return torch.cat([torch.ones(1, units, dtype=torch.float64), counts])
