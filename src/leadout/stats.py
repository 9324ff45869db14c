"""Statistics of measurements: 95% confidence intervals, tests, bootstrap, ratios, monotone curves.

scipy is imported where it is used: reading a file with intervals in it must stay fast.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]

LEVEL = 0.95
RESAMPLES = 2000
DRAWS = 1000  # of a `Sampled` estimate
MIN_ROUNDS_FOR_INTERVAL = 6
_MIN_WEIGHT = 1e-9  # a point that a draw left out takes the value of its neighbours


class Interval(BaseModel):
    """A measured number with its 95% confidence interval."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    value: float
    low: float
    high: float

    def times(self, factor: float) -> Interval:
        return Interval(value=self.value * factor, low=self.low * factor, high=self.high * factor)

    def plus(self, term: float) -> Interval:
        return Interval(value=self.value + term, low=self.low + term, high=self.high + term)

    def __format__(self, spec: str) -> str:
        spec = spec or ".2f"
        return f"{self.value:{spec}} ({self.low:{spec}} to {self.high:{spec}})"

    def __str__(self) -> str:
        return f"{self:.2f}"


def bootstrap(count: int, statistic: Callable[[Indices], Any]) -> Interval:
    """The statistic of `count` units, with a percentile bootstrap over the units.

    `statistic` takes indices of units [..., count] and returns one number for each row.
    """
    from scipy import stats

    units = np.arange(count)
    value = float(statistic(units))
    if count < 2:
        return Interval(value=value, low=value, high=value)
    result = stats.bootstrap(
        (units,),
        lambda drawn, axis: statistic(drawn),
        n_resamples=RESAMPLES,
        batch=200,
        vectorized=True,
        confidence_level=LEVEL,
        method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval
    return Interval(value=value, low=float(result.low), high=float(result.high))


def ratio_interval(parts: Floats, wholes: Floats) -> Interval:
    """Sum of parts over sum of wholes, both [units], with a bootstrap interval over units."""
    return bootstrap(
        len(parts), lambda drawn: parts[drawn].sum(-1) / np.maximum(wholes[drawn].sum(-1), 1)
    )


def paired_p_value(differences: Floats, wholes: Floats) -> float:
    """Two-sided p-value that the sum of differences over the sum of wholes, both [units], is zero.

    A t-test of the linearised ratio with units as clusters. 1.0 with fewer than two units.
    """
    from scipy import stats

    count, total = len(differences), float(wholes.sum())
    if count < 2 or total == 0:
        return 1.0
    ratio = float(differences.sum()) / total
    residuals = differences - ratio * wholes
    error = math.sqrt(float(residuals @ residuals) * count / (count - 1)) / total
    if error == 0:
        return 1.0 if ratio == 0 else 0.0
    return float(2 * stats.t.sf(abs(ratio) / error, count - 1))


def holm(p_values: Sequence[float]) -> list[float]:
    """P-values corrected for the number of tests by Holm's method, in the same order.

    Rejecting where the corrected value is at most 5% keeps the probability of even one false
    rejection below 5%, however the tests depend on each other.
    """
    corrected = [1.0] * len(p_values)
    highest = 0.0
    for rank, place in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        highest = max(highest, min(1.0, p_values[place] * (len(p_values) - rank)))
        corrected[place] = highest
    return corrected


class Spread(BaseModel):
    """A median over rounds with its range and quartiles."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rounds: int
    median: float
    low: float  # minimum
    high: float  # maximum
    lower_quartile: float
    upper_quartile: float


def spread(values: Sequence[float]) -> Spread:
    lower, upper = np.percentile(np.asarray(values, dtype=np.float64), [25, 75])
    return Spread(
        rounds=len(values),
        median=statistics.median(values),
        low=min(values),
        high=max(values),
        lower_quartile=float(lower),
        upper_quartile=float(upper),
    )


class Ratio(BaseModel):
    """A geometric mean of paired ratios; no interval with fewer rounds than 6."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    value: float
    low: float | None  # 95% interval
    high: float | None
    pairs: int

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.value:.2f}"
        return f"{self.value:.2f} ({self.low:.2f} to {self.high:.2f})"


def paired_ratio(by_set: Sequence[Sequence[float]]) -> Ratio:
    """The geometric mean over sets of the ratios of their rounds.

    The interval is a percentile bootstrap of the log ratios over the rounds of each set. With few
    rounds the percentiles of a bootstrap are too narrow; their distance from the mean is increased
    by what Student's t adds to the normal quantile, and by sqrt(n / (n - 1)) for the variance.
    """
    from scipy import stats

    logs = [np.log(np.asarray(values, dtype=np.float64)) for values in by_set]
    value = float(np.mean([rounds.mean() for rounds in logs]))
    pairs = sum(map(len, logs))
    if min(map(len, logs)) < MIN_ROUNDS_FOR_INTERVAL:
        return Ratio(value=math.exp(value), low=None, high=None, pairs=pairs)
    draw = np.random.default_rng(0)
    errors = np.zeros(RESAMPLES)  # of the mean over sets
    for rounds in logs:
        count = len(rounds)
        means = rounds[draw.integers(count, size=(RESAMPLES, count))].mean(axis=1)
        errors += (means - rounds.mean()) * math.sqrt(count / (count - 1)) / len(logs)
    edge = (1 - LEVEL) / 2
    wider = stats.t.ppf(edge, df=pairs - len(logs)) / stats.norm.ppf(edge)
    low, high = value + wider * np.quantile(errors, [edge, 1 - edge])
    return Ratio(value=math.exp(value), low=math.exp(low), high=math.exp(high), pairs=pairs)


def percentile(values: Sequence[float], percent: float) -> float:
    return float(np.percentile(values, percent))


@dataclass(frozen=True, slots=True)
class Sampled:
    """An estimate with its bootstrap draws, so that numbers computed from it have intervals too.

    `values[0]` is the estimate from all measurements, the others are those of the draws.
    """

    values: Floats  # [1 + DRAWS]

    @classmethod
    def exactly(cls, value: float) -> Sampled:
        return cls(np.full(1 + DRAWS, value))

    def __add__(self, other: Sampled) -> Sampled:
        return Sampled(self.values + other.values)

    def __truediv__(self, other: Sampled) -> Sampled:
        return Sampled(self.values / other.values)

    def interval(self) -> Interval:
        edge = (1 - LEVEL) / 2
        low, high = np.quantile(self.values[1:], [edge, 1 - edge])
        return Interval(value=float(self.values[0]), low=float(low), high=float(high))


def multiplicities(units: int, seed: int) -> Floats:
    """Weights of units [1 + DRAWS, units]: all ones, then as drawn with replacement."""
    drawn = np.random.default_rng(seed).multinomial(units, np.full(units, 1 / units), size=DRAWS)
    return np.concatenate([np.ones((1, units)), drawn.astype(np.float64)])


def never_falling(values: Floats, weights: Floats) -> Floats:
    """Weighted isotonic (non-decreasing) regression of each row of [draws, places].

    Verifying or drafting more never costs less, and more drafts never yield fewer tokens. Without
    this constraint the best K is often just the one with the luckiest measurement.
    """
    from scipy.optimize import isotonic_regression

    weights = np.maximum(weights, _MIN_WEIGHT)
    rows = [
        isotonic_regression(row, weights=weight).x
        for row, weight in zip(values, weights, strict=True)
    ]
    return np.stack(rows)
