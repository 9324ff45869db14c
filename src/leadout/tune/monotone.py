"""The nearest curve that never falls: neighbours that contradict it by noise share their mean.

Verifying or drafting more never costs less, and more drafts never bring fewer tokens. Without this
the best K is often just the luckiest one.
"""

from __future__ import annotations

import torch
from torch import Tensor

_ALMOST_NOTHING = 1e-9  # a point that a draw left out takes its neighbours' value


def never_falling(values: Tensor, weights: Tensor) -> Tensor:
    """Weighted least squares among rising curves, in each row of [draws, places].

    It has a closed form: at place i the largest, over all starts a <= i, of the smallest mean of
    the places a..b over all ends b >= i.
    """
    weights = weights.clamp(min=_ALMOST_NOTHING)
    zero = torch.zeros_like(values[:, :1])
    sums = torch.cat([zero, (values * weights).cumsum(1)], dim=1)
    totals = torch.cat([zero, weights.cumsum(1)], dim=1)
    places = range(values.shape[1])
    means = {
        (a, b): (sums[:, b + 1] - sums[:, a]) / (totals[:, b + 1] - totals[:, a])
        for a in places
        for b in places[a:]
    }

    def at(i: int) -> Tensor:
        smallest = [torch.stack([means[a, b] for b in places[i:]]).amin(0) for a in places[: i + 1]]
        return torch.stack(smallest).amax(0)

    return torch.stack([at(i) for i in places], dim=1)
