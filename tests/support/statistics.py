"""Tests of equality between two samples of categories."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence

import torch

RARE = 10  # categories seen less often than this in both samples together are pooled


def equality_p_value(first: Sequence[Hashable], second: Sequence[Hashable]) -> float:
    """Probability of a difference at least this large if both samples, of equal size, come from
    one distribution: Pearson's two-sample chi-square test of homogeneity."""
    assert len(first) == len(second)
    counts = (Counter(first), Counter(second))
    statistic, categories, pooled = 0.0, 0, [0, 0]
    for category in counts[0].keys() | counts[1].keys():
        a, b = counts[0][category], counts[1][category]
        if a + b < RARE:
            pooled[0] += a
            pooled[1] += b
            continue
        statistic += (a - b) ** 2 / (a + b)
        categories += 1
    if sum(pooled) >= RARE:
        statistic += (pooled[0] - pooled[1]) ** 2 / sum(pooled)
        categories += 1
    freedom = torch.tensor((categories - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, torch.tensor(statistic / 2).double()))
