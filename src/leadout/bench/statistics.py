"""Ratios of rounds, and how far they spread.

A ratio is taken within one round, where both arms answer the same prompts one after the other: what
slows the machine down for a while cancels out. Rounds are then compared with each other.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Mapping, Sequence

from pydantic import BaseModel, ConfigDict

FEWEST_FOR_AN_INTERVAL = 3
_RESAMPLES = 2000


class Spread(BaseModel):
    """A median over rounds with all that lies around it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rounds: int
    median: float
    low: float  # the smallest
    high: float  # the largest
    lower_quartile: float
    upper_quartile: float
    interval: tuple[float, float] | None  # 95%, of the median; from three rounds on


def spread(values: Sequence[float]) -> Spread:
    lower, upper = min(values), max(values)
    if len(values) > 1:
        lower, _, upper = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(
        rounds=len(values),
        median=statistics.median(values),
        low=min(values),
        high=max(values),
        lower_quartile=lower,
        upper_quartile=upper,
        interval=_interval(values) if len(values) >= FEWEST_FOR_AN_INTERVAL else None,
    )


def _interval(values: Sequence[float]) -> tuple[float, float]:
    """Bootstrap: how the median would have varied had other rounds of the same kind been run."""
    draw = random.Random(0)
    medians = sorted(
        statistics.median(draw.choices(values, k=len(values))) for _ in range(_RESAMPLES)
    )
    cut = round(0.025 * _RESAMPLES)
    return medians[cut], medians[-cut - 1]


def ratios(arm: Mapping[int, float], bare: Mapping[int, float]) -> dict[int, float]:
    """By round, where both were measured."""
    return {number: arm[number] / bare[number] for number in sorted(arm) if number in bare}


def geometric_mean(by_set: Sequence[Mapping[int, float]]) -> dict[int, float]:
    """Of the ratios of several prompt sets, round by round, where all of them have one."""
    rounds = set.intersection(*(set(one) for one in by_set)) if by_set else set()
    return {
        number: math.exp(statistics.fmean(math.log(one[number]) for one in by_set))
        for number in sorted(rounds)
    }


def percentile(values: Sequence[float], percent: float) -> float:
    """Straight between the two nearest values."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])
