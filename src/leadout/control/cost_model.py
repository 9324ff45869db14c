"""Seconds of an engine step: measured, refined online, and the drafts that make the most of them.

A step verifies the drafts of the step before and drafts for the next one:

    step(batch_size, drafts, k) = verify(batch_size, drafts) + draft(batch_size, k)

`batch_size` is the number of decoding requests, `drafts` the number of draft tokens verified for
all of them together, and `k` the number drafted for each of them. `verify(batch_size, 0)` is a step
without a drafter; `draft(batch_size, 0)` is the cost of keeping the drafter's context up to date
while nothing is drafted. `StepCosts` interpolates measured costs, `StepCostFilter` refines them.

With b requests, K drafted tokens for each and v_i verified drafts of request i, a step yields

    tokens / seconds = (b + Σ_i Σ_{j ≤ v_i} S_i(j)) / (verify(b, Σ_i v_i) + draft(b, K))

where S_i(j) is the probability that the first j drafts of request i are all accepted (its survival
function). Every verified draft adds its own S_i(j), independently of the others, and S_i falls with
j. So the best n drafts of a batch are simply those with the n highest survival probabilities, and
they always are the first drafts of their requests.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import truediv

from leadout.errors import LeadoutError


@dataclass(frozen=True, slots=True)
class PiecewiseLinear:
    """Linear interpolation between points, extrapolated with the outermost segments."""

    xs: tuple[float, ...]  # ascending
    ys: tuple[float, ...]

    @classmethod
    def through(cls, points: Mapping[int, float]) -> PiecewiseLinear:
        if not points:
            raise LeadoutError("A cost curve needs at least one measured point, but has none.")
        xs = sorted(points)
        return cls(tuple(map(float, xs)), tuple(points[x] for x in xs))

    def __call__(self, x: float) -> float:
        if len(self.xs) == 1:
            return self.ys[0]
        right = min(max(bisect_left(self.xs, x), 1), len(self.xs) - 1)
        left = right - 1
        fraction = (x - self.xs[left]) / (self.xs[right] - self.xs[left])
        # Extrapolating a noisy segment must not lead below zero, nor below the points themselves.
        return max(self.ys[left] + fraction * (self.ys[right] - self.ys[left]), min(self.ys))


_Curves = tuple[tuple[int, PiecewiseLinear], ...]  # by batch size, ascending


class StepCosts:
    """Measured seconds: `verify[batch_size][drafts of one request]`, `draft[batch_size][k]`."""

    def __init__(
        self, verify: Mapping[int, Mapping[int, float]], draft: Mapping[int, Mapping[int, float]]
    ) -> None:
        self.verify, self.draft = verify, draft
        self._verify, self._draft = _curves(verify), _curves(draft)

    def bare_seconds(self, batch_size: int) -> float:
        """A step of an engine without a drafter."""
        return self.verify_seconds(batch_size, 0)

    def verify_seconds(self, batch_size: int, drafts: float) -> float:
        """The target's pass over `batch_size` requests and `drafts` draft tokens in all."""
        return _interpolate(self._verify, batch_size, drafts / batch_size)

    def draft_seconds(self, batch_size: int, k: float) -> float:
        return _interpolate(self._draft, batch_size, k)

    def step_seconds(self, batch_size: int, k: int) -> float:
        """A step that verifies k drafts of every request and drafts k again."""
        return self.verify_seconds(batch_size, k * batch_size) + self.draft_seconds(batch_size, k)


def _curves(points: Mapping[int, Mapping[int, float]]) -> _Curves:
    if not points:
        raise LeadoutError("Step costs need at least one measured batch size, but have none.")
    return tuple((size, PiecewiseLinear.through(points[size])) for size in sorted(points))


def _interpolate(curves: _Curves, batch_size: int, x: float) -> float:
    """Linear between the two measured batch sizes around `batch_size`."""
    return PiecewiseLinear.through({size: curve(x) for size, curve in curves})(batch_size)


class StepCostTable:
    """Seconds of a step at one batch size, tabulated for the optimisation of every step.

    `verify[i]`: the target's pass with i * `stride` drafts in all; `draft[k]`: drafting k tokens
    for every request; `step[k][i]`: both together; `baseline`: a step that neither verifies nor
    drafts, but keeps the drafter's context up to date.
    """

    def __init__(
        self, batch_size: int, stride: int, verify: Sequence[float], draft: Sequence[float]
    ) -> None:
        self.batch_size, self.stride = batch_size, stride
        self.verify, self.draft = verify, draft
        self.step = [[verifying + drafting for verifying in verify] for drafting in draft]
        self.baseline = self.step[0][0]


Survival = Sequence[float]  # [j]: probability that drafts 1 to j + 1 are all accepted


def throughput_by_k(
    survivals: Sequence[Survival], limits: Sequence[int], costs: StepCostTable
) -> list[float]:
    """The highest tokens per second for each K, if every step drafts K and verifies the best.

    `limits[i]` is the maximum number of drafts of request i.
    """
    found = [costs.batch_size / costs.baseline]
    candidates: list[float] = []
    for k in range(1, len(costs.draft)):
        candidates += [
            survival[k - 1] for survival, limit in zip(survivals, limits, strict=True) if limit >= k
        ]
        candidates.sort(reverse=True)
        tokens = list(accumulate(candidates, initial=float(costs.batch_size)))
        found.append(max(map(truediv, tokens[:: costs.stride], costs.step[k])))
    return found


def min_worthwhile_survival(
    survivals: Sequence[Survival], limits: Sequence[int], costs: StepCostTable, rate: float
) -> float:
    """The survival probability from which on a draft is worth verifying.

    Time is valued at `rate`, the tokens per second of the whole: maximises
    Σ S_i(j) - rate * verify(n) over the number n of verified drafts.
    """
    candidates: list[float] = []
    for survival, limit in zip(survivals, limits, strict=True):
        candidates += survival[:limit]
    candidates.sort(reverse=True)
    tokens = list(accumulate(candidates, initial=0.0))[:: costs.stride]
    # The table is shorter than the candidates only if a request has more drafts than can be made.
    values = [gained - rate * spent for gained, spent in zip(tokens, costs.verify, strict=False)]
    best = values.index(max(values))
    # The marginal cost of one more draft: drafts that are not among these candidates may pay it.
    next_ = min(best, len(costs.verify) - 2)
    marginal = rate * (costs.verify[next_ + 1] - costs.verify[next_]) / costs.stride
    return min(marginal, candidates[best * costs.stride - 1]) if best else marginal


def drafts_to_verify(
    survivals: Sequence[Survival], limits: Sequence[int], min_survival: float
) -> list[int]:
    """For each request, the number of leading drafts with at least `min_survival`."""
    found = []
    for survival, limit in zip(survivals, limits, strict=True):
        count = 0
        while count < limit and survival[count] >= min_survival:
            count += 1
        found.append(count)
    return found


TABLE_POINTS = 8  # at most, between one verified draft per request and the next
TABLE_REFRESH_STEPS = 16  # steps after which a table is computed anew
KNEE_TOKENS = (64, 256)  # tokens of a pass beyond which each may cost more
OBSERVATION_NOISE = 0.1  # standard deviation of a measured step, relative
OUTLIER_SIGMAS = 4.0
OUTLIERS_BEFORE_RESET = 6  # consecutive slow outliers that are a change and no accident
# Initial standard deviations of the state, relative to a bare step with one request.
INITIAL_STD = (0.5, 0.1, 0.1, 0.1, 0.3, 0.5, 0.3, 0.1)
# Steps after which a coefficient that is not observed is as uncertain as at the start.
PROCESS_NOISE_STEPS = 200_000.0
# Prior without measured curves, relative to the first step: per request, per verified draft, for
# drafting at all, per drafted token.
PRIOR_REQUEST, PRIOR_VERIFY, PRIOR_DRAFTING, PRIOR_DRAFT_TOKEN = 0.005, 0.003, 0.15, 0.002


class StepCostFilter:
    """Step costs of one engine, estimated by a Kalman filter over measured steps.

    The prior mean of a step is `prior(b, n, k)`: the measured curves, or without them a rough law
    scaled by the first step. The filter estimates a linear correction to it. With batch size b, n
    verified drafts and k drafted tokens per request:

        observation model   y = prior(b, n, k) + h(b, n, k)·x + v,    v ~ N(0, R)
        features            h = [1, b/8, n > 0, n/8, knee_64(b + n), knee_256(b + n), k > 0, b·k/8]
                            with knee_t(m) = max(0, (m - t) / t)
        observation noise   R = (0.1 · max(prior + h·x, 0.2 · prior))²
        initial state       x = 0,  P = diag((INITIAL_STD · baseline)²)

    For every measured step y:

        innovation          e = y - (prior + h·x)
        its variance        S = h·P·h + R
        gain                g = P·h / S
        update              x ← x + g·e,    P ← P - g·(P·h)ᵀ
        predict             P ← P + Q,  Q = P₀ / 200,000 on the diagonal, while below P₀

    Outlier gating: a step with e² > 4² · S is not used if it was too slow, as a busy machine makes
    single steps slow. Nothing makes a single step too fast, and six slow steps in a row are a
    change of the machine: the covariance is then reset to P₀, so that the filter adapts at once.
    """

    def __init__(self, max_drafts: int, costs: StepCosts | None = None) -> None:
        if max_drafts < 1:
            raise ValueError(f"max_drafts is {max_drafts}, expected 1 or more")
        self._max_drafts = max_drafts
        self._measured = costs
        self._scale: float | None = None if costs is None else costs.bare_seconds(1)
        self._state = [0.0] * len(INITIAL_STD)
        self._covariance: list[list[float]] = []
        self._initial_variance: list[float] = []
        if self._scale is not None:
            self._reset_covariance(self._scale)
        self._outliers = 0
        self._steps = 0
        self._priors: dict[int, tuple[list[float], list[float]]] = {}
        self._tables: dict[int, tuple[int, StepCostTable]] = {}

    @property
    def has_estimate(self) -> bool:
        """False before the first step of an engine without measured costs."""
        return self._scale is not None

    def table(self, batch_size: int) -> StepCostTable:
        """The costs at a batch size, at most a few steps old."""
        cached = self._tables.get(batch_size)
        if cached is not None and self._steps - cached[0] < TABLE_REFRESH_STEPS:
            return cached[1]
        table = self._compute_table(batch_size)
        self._tables[batch_size] = (self._steps, table)
        return table

    def observe(self, batch_size: int, drafts: int, k: int, seconds: float) -> None:
        """A step of `batch_size` requests that verified `drafts` in all and drafted k for each."""
        if seconds <= 0:
            raise ValueError(f"a step took {seconds} s, expected more than 0")
        if self._scale is None:
            relative = 1 + PRIOR_REQUEST * batch_size + PRIOR_VERIFY * drafts
            self._scale = seconds / (relative + _prior_drafting(batch_size, k))
            self._reset_covariance(self._scale)
        self._steps += 1
        features = _features(batch_size, drafts, k)
        prior = self._prior(batch_size, drafts, k)
        expected = prior + _dot(self._state, features)
        innovation = seconds - expected
        noise = OBSERVATION_NOISE * max(expected, 0.2 * prior)
        projected = [_dot(row, features) for row in self._covariance]  # P·h
        variance = _dot(projected, features) + noise * noise
        if innovation * innovation > OUTLIER_SIGMAS * OUTLIER_SIGMAS * variance:
            self._outliers += 1
            if innovation > 0 and self._outliers < OUTLIERS_BEFORE_RESET:
                return
            self._reset_covariance(self._scale)
            projected = [_dot(row, features) for row in self._covariance]
            variance = _dot(projected, features) + noise * noise
            self._tables.clear()
        self._outliers = 0
        gain = [value / variance for value in projected]
        self._state = [value + g * innovation for value, g in zip(self._state, gain, strict=True)]
        self._covariance = [
            [value - g * other for value, other in zip(row, projected, strict=True)]
            for row, g in zip(self._covariance, gain, strict=True)
        ]
        for index, initial in enumerate(self._initial_variance):
            if self._covariance[index][index] < initial:
                self._covariance[index][index] += initial / PROCESS_NOISE_STEPS

    def _reset_covariance(self, scale: float) -> None:
        self._initial_variance = [(std * scale) ** 2 for std in INITIAL_STD]
        self._covariance = [
            [variance if column == row else 0.0 for column in range(len(INITIAL_STD))]
            for row, variance in enumerate(self._initial_variance)
        ]

    def _compute_table(self, batch_size: int) -> StepCostTable:
        """Linear between whole drafts per request, and monotone: more drafts never cost less."""
        verify_prior, draft_prior = self._prior_curves(batch_size)
        verify_knots, floor = [], 0.0
        for drafts, prior in enumerate(verify_prior):
            estimate = prior + _dot(self._state, _features(batch_size, drafts * batch_size, 0))
            floor = max(estimate, floor, 0.05 * prior)
            verify_knots.append(floor)
        baseline = _dot(self._state, _features(batch_size, 0, 0))
        draft, floor = [], 0.0
        for k, prior in enumerate(draft_prior):
            estimate = prior + _dot(self._state, _features(batch_size, 0, k)) - baseline
            floor = max(estimate, floor)
            draft.append(floor)
        stride = max(1, batch_size // TABLE_POINTS)
        # The first draft of a batch has a cost of its own (the feature n > 0), which a line from
        # no drafts to one per request would hide.
        any_drafts = max(0.0, _dot(self._state, _features(batch_size, 1, 0)) - baseline)
        from_first = [min(verify_knots[0] + any_drafts, verify_knots[1]), *verify_knots[1:]]
        verify = verify_knots[:1] + [
            _at(from_first, drafts / batch_size)
            for drafts in range(stride, batch_size * self._max_drafts + 1, stride)
        ]
        return StepCostTable(batch_size, stride, verify, draft)

    def _prior_curves(self, batch_size: int) -> tuple[list[float], list[float]]:
        """Prior means of verifying, by drafts per request, and of drafting, by k."""
        cached = self._priors.get(batch_size)
        if cached is None:
            counts = range(self._max_drafts + 1)
            measured = self._measured
            if measured is not None:
                cached = (
                    [measured.verify_seconds(batch_size, drafts * batch_size) for drafts in counts],
                    [measured.draft_seconds(batch_size, k) for k in counts],
                )
            else:
                assert self._scale is not None
                bare = self._scale * (1 + PRIOR_REQUEST * batch_size)
                cached = (
                    [bare + self._scale * PRIOR_VERIFY * drafts * batch_size for drafts in counts],
                    [self._scale * _prior_drafting(batch_size, k) for k in counts],
                )
            self._priors[batch_size] = cached
        return cached

    def _prior(self, batch_size: int, drafts: int, k: int) -> float:
        verify, draft = self._prior_curves(batch_size)
        return _at(verify, drafts / batch_size) + draft[k]


def _prior_drafting(batch_size: int, k: int) -> float:
    return PRIOR_DRAFTING + PRIOR_DRAFT_TOKEN * batch_size * k if k else 0.0


def _at(knots: list[float], x: float) -> float:
    """Linear interpolation between values at 0, 1, 2, ..."""
    left = min(int(x), len(knots) - 2)
    return knots[left] + (x - left) * (knots[left + 1] - knots[left])


def _features(batch_size: int, drafts: int, k: int) -> list[float]:
    tokens = batch_size + drafts
    return [
        1.0,
        batch_size / 8,
        1.0 if drafts else 0.0,
        drafts / 8,
        *(max(0.0, (tokens - knee) / knee) for knee in KNEE_TOKENS),
        1.0 if k else 0.0,
        batch_size * k / 8,
    ]


def _dot(left: list[float], right: list[float]) -> float:
    # Plain lists: for eight numbers numpy's calls would take longer than the arithmetic.
    return sum([a * b for a, b in zip(left, right, strict=True)])
