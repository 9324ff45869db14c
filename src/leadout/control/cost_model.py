"""Seconds of an engine step: measured, refined online, and the drafts that make the most of them.

A step verifies the drafts of the step before and drafts for the next one:

    step(batch_size, drafts, k) = verify(batch_size, drafts) + draft(batch_size, k)

`batch_size` is the number of decoding requests, `drafts` the number of draft tokens verified for
all of them together, and `k` the number drafted for each of them. `verify(batch_size, 0)` is a step
without a drafter; `draft(batch_size, 0)` is the cost of keeping the drafter's context up to date
while nothing is drafted. `StepCosts` interpolates measured costs, `StepCostFilter` refines them.

On a GPU the engine replays a captured graph if all requests verify the same number of drafts and
that number is on the *ladder*, the lengths for which graphs were captured. Costs may therefore jump
from one rung to the next, in either direction, and a step with different lengths for different
requests ("mixed") has a cost of its own. Nothing here assumes that more drafts cost more.

With b requests, K drafted tokens for each and v_i verified drafts of request i, a step yields

    tokens / seconds = (b + Σ_i Σ_{j ≤ v_i} S_i(j)) / (verify(b, v) + draft(b, K))

where S_i(j) is the probability that the first j drafts of request i are all accepted (its survival
function). Every verified draft adds its own S_i(j), independently of the others, and S_i falls with
j. So the best n drafts of a mixed step are simply those with the n highest survival probabilities,
and they always are the first drafts of their requests.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from leadout.control.acceptance_model import Floats, Ints
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
    """Seconds of a step at one batch size, for every number of drafts on the ladder.

    `uniform[r]`: the target's pass if every request verifies `ladder[r]` drafts; `mixed[r]`: if
    requests verify different numbers, `ladder[r]` on average; `draft[r]`: drafting `ladder[r]`
    tokens for every request. `baseline`: a step that neither verifies nor drafts, but keeps the
    drafter's context up to date.
    """

    def __init__(
        self, batch_size: int, ladder: Ints, uniform: Floats, mixed: Floats, draft: Floats
    ) -> None:
        self.batch_size, self.ladder = batch_size, ladder
        self.uniform, self.mixed, self.draft = uniform, mixed, draft
        self.baseline = float(uniform[0] + draft[0])

    def mixed_seconds(self, drafts: Floats | Ints | int) -> Floats:
        """The target's pass over numbers of drafts in all, spread unevenly over the requests."""
        return np.interp(np.asarray(drafts) / self.batch_size, self.ladder, self.mixed)


@dataclass(frozen=True, slots=True)
class Optimum:
    """For each rung of the ladder, the highest tokens per second of steps that draft so many.

    `min_survival[r]`: with it, a mixed step verifies the drafts that survive with at least this
    probability; 0: all requests verify all drafts.
    """

    rates: Floats  # [rungs]
    min_survival: Floats  # [rungs]


def optimise(
    survival: Floats, counts: Floats | Ints, lowest_limit: int, costs: StepCostTable
) -> Optimum:
    """The best of uniform and mixed steps, for each rung.

    `survival` [groups, drafts] is that of groups of requests; `counts` [groups, drafts or 1]:
    requests of a group that may verify so many drafts. `lowest_limit` is the lowest of a request.
    """
    batch_size, max_drafts = costs.batch_size, survival.shape[1]
    ladder = costs.ladder
    by_drafts = np.empty(max_drafts + 1)
    by_drafts[0] = 0.0
    (survival * counts).sum(axis=0).cumsum(out=by_drafts[1:])
    tokens = by_drafts[ladder] + batch_size
    rates: Floats = tokens / (costs.uniform + costs.draft)
    if lowest_limit < max_drafts:
        # Longer drafts for some requests only: no step can be uniform there.
        rates[ladder > lowest_limit] = 0.0
    min_survival = np.zeros(len(ladder))
    if batch_size == 1:
        return Optimum(rates, min_survival)
    # A mixed step yields at most the tokens of a uniform one, and costs at least this.
    possible = tokens[1:] / (costs.mixed.min() + costs.draft[1:])
    (rungs,) = np.nonzero(possible > rates.max())
    if not len(rungs):
        return Optimum(rates, min_survival)
    rungs += 1
    # Mixed steps: all drafts by falling survival; of these, those that a rung has. [rungs, drafts]
    (present,) = np.nonzero(np.any(counts, axis=1))
    flat = survival[present].ravel()
    order = np.argsort(-flat, kind="stable")
    each = np.broadcast_to(counts[present], (len(present), max_drafts)).ravel()[order]
    flat = flat[order]
    included = order % max_drafts < ladder[rungs, None]
    verified = (included * each).cumsum(axis=1)
    gained = (included * (each * flat)).cumsum(axis=1)
    seconds = np.where(verified, costs.mixed_seconds(verified), costs.uniform[0])
    mixed = (batch_size + gained) / (seconds + costs.draft[rungs, None])
    highest = mixed.max(axis=1)
    is_mixed = highest > rates[rungs]
    rates[rungs] = np.where(is_mixed, highest, rates[rungs])
    min_survival[rungs] = np.where(is_mixed, flat[mixed.argmax(axis=1)], 0.0)
    return Optimum(rates, min_survival)


KNEE_TOKENS = (64, 256)  # tokens of a pass beyond which each may cost more
OBSERVATION_NOISE = 0.1  # standard deviation of a measured step, relative
OUTLIER_SIGMAS = 4.0
OUTLIERS_BEFORE_RESET = 6  # consecutive slow outliers that are a change and no accident
# Initial standard deviations of the state, relative to a bare step with one request: of what a kind
# of step costs in itself, of what eight more requests or drafts cost, and of the jump at one rung.
LEVEL_STD, SLOPE_STD, JUMP_STD = 0.5, 0.1, 0.1
# Steps after which a coefficient that is not observed is as uncertain as at the start.
PROCESS_NOISE_STEPS = 200_000.0
# Prior of drafting at all without measured curves, relative to the first step.
PRIOR_DRAFTING = 0.15
# Prior of leaving the captured graphs, where there are any.
PRIOR_MIXED = 0.25
MIN_SHARE_OF_PRIOR = 0.05  # an estimate must stay positive


class StepCostFilter:
    """Step costs of one engine, estimated by a Kalman filter over measured steps.

    The prior mean of a step is `prior(b, n, k)`: the measured curves, or without them a rough law
    scaled by the first step. The filter estimates a linear correction to it. With batch size b, n
    verified drafts, k drafted tokens per request and t tokens of prefill:

        observation model   y = prior(b, n, k) + h·x + v,    v ~ N(0, R)
        features            h = [1, b/8, n/8, knee_64(b + n), knee_256(b + n), k > 0, b·k/8,
                                 t/64, mixed, rung_1, ..., rung_R]
                            with knee_t(m) = max(0, (m - t) / t); mixed and rungs are 0 or 1
        observation noise   R = (0.1 · max(prior + h·x, 0.2 · prior))²
        initial state       x = 0,  P = diag((std · baseline)²)

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

    def __init__(
        self, ladder: Sequence[int], costs: StepCosts | None = None, *, has_graphs: bool = False
    ) -> None:
        """`ladder`: 0 and the other K in ascending order; `has_graphs`: captured for each K."""
        if len(ladder) < 2 or ladder[0] != 0 or sorted(set(ladder)) != list(ladder):
            raise ValueError(
                f"the ladder is {tuple(ladder)}, expected 0 and at least one larger K, ascending"
            )
        self.ladder: Ints = np.array(ladder, np.int64)
        self._rung = {k: rung for rung, k in enumerate(ladder)}
        self._measured = costs
        self._prior_mixed = PRIOR_MIXED if has_graphs else 0.0
        level, slope = LEVEL_STD, SLOPE_STD
        self._std = np.array(
            [level, slope, slope, level, level, level, slope, level, level]
            + [JUMP_STD] * (len(ladder) - 1)
        )
        self._state = np.zeros(len(self._std))
        self._covariance: Floats = np.zeros((len(self._std), len(self._std)))
        self._diagonal = np.diag_indices(len(self._std))
        self._scale = 0.0
        self._outliers = 0
        # By batch size: prior means and features of all kinds of steps; measured curves.
        self._laws: dict[int, tuple[Floats, Floats]] = {}
        self._curves: dict[int, tuple[list[float], list[float]]] = {}
        if costs is not None:
            self._set_scale(costs.bare_seconds(1))

    @property
    def has_estimate(self) -> bool:
        """False before the first step of an engine without measured costs."""
        return self._scale > 0

    def table(self, batch_size: int) -> StepCostTable:
        """The costs at a batch size, of steps without prefill."""
        law = self._laws.get(batch_size)
        if law is None:
            law = self._laws[batch_size] = self._law(batch_size)
        prior, features = law
        seconds = np.maximum(prior + features @ self._state, MIN_SHARE_OF_PRIOR * prior)
        uniform, mixed, draft = seconds.reshape(3, -1)
        # The rows of `draft` are steps that verify nothing.
        draft = np.maximum(draft - uniform[0], 0.0)
        return StepCostTable(batch_size, self.ladder, uniform, mixed, draft)

    def observe(
        self,
        batch_size: int,
        drafts: int,
        k: int,
        seconds: float,
        *,
        is_mixed: bool = False,
        prefill: int = 0,
    ) -> None:
        """A step of `batch_size` requests that verified `drafts` in all and drafted k for each.

        `is_mixed`: not the same number for each; `prefill`: tokens of prompts in the same step.
        """
        if seconds <= 0:
            raise ValueError(f"a step took {seconds} s, expected more than 0")
        if not self._scale:
            self._set_scale(seconds / (1 + PRIOR_DRAFTING if k else 1.0))
        features = self._features(batch_size, drafts, k, is_mixed, prefill)
        prior = self._prior(batch_size, drafts, k)
        if is_mixed and drafts:
            prior += self._prior_mixed * self._scale
        expected = prior + float(features @ self._state)
        innovation = seconds - expected
        noise = (OBSERVATION_NOISE * max(expected, 0.2 * prior)) ** 2
        projected = self._covariance @ features  # P·h
        variance = float(projected @ features) + noise
        if innovation * innovation > OUTLIER_SIGMAS * OUTLIER_SIGMAS * variance:
            self._outliers += 1
            if innovation > 0 and self._outliers < OUTLIERS_BEFORE_RESET:
                return
            self._covariance = np.diag(self._initial_variance)
            projected = self._covariance @ features
            variance = float(projected @ features) + noise
        self._outliers = 0
        gain = projected / variance
        self._state = self._state + gain * innovation
        self._covariance -= np.outer(gain, projected)
        diagonal = self._covariance.diagonal()
        self._covariance[self._diagonal] += np.where(
            diagonal < self._initial_variance, self._initial_variance / PROCESS_NOISE_STEPS, 0.0
        )

    def _set_scale(self, scale: float) -> None:
        self._scale = scale
        self._initial_variance = (self._std * scale) ** 2
        self._covariance = np.diag(self._initial_variance)

    def _features(
        self, batch_size: int, drafts: int, k: int, is_mixed: bool, prefill: int
    ) -> Floats:
        tokens = batch_size + drafts
        found = np.zeros(len(self._std))
        knees = [max(0.0, (tokens - knee) / knee) for knee in KNEE_TOKENS]
        found[:8] = (
            1.0,
            batch_size / 8,
            drafts / 8,
            *knees,
            1.0 if k else 0.0,
            batch_size * k / 8,
            prefill / 64,
        )
        if drafts:
            # Lengths off the ladder have no graph either.
            rung = 0 if is_mixed else self._rung.get(drafts // batch_size, 0)
            found[8 + rung] = 1.0
        return found

    def _law(self, batch_size: int) -> tuple[Floats, Floats]:
        """Prior means and features of steps: uniform, mixed, and those that only draft."""
        kinds = [(k * batch_size, 0, False) for k in self.ladder.tolist()]
        # A mixed step of almost no drafts still costs what mixed steps cost.
        kinds += [(max(1, k * batch_size), 0, True) for k in self.ladder.tolist()]
        kinds += [(0, k, False) for k in self.ladder.tolist()]
        prior = [
            self._prior(batch_size, drafts, k) + is_mixed * self._prior_mixed * self._scale
            for drafts, k, is_mixed in kinds
        ]
        features = [
            self._features(batch_size, drafts, k, is_mixed, 0) for drafts, k, is_mixed in kinds
        ]
        return np.array(prior), np.array(features)

    def _prior(self, batch_size: int, drafts: int, k: int) -> float:
        measured = self._measured
        if measured is None:
            return self._scale * (1 + PRIOR_DRAFTING if k else 1.0)
        curves = self._curves.get(batch_size)
        if curves is None:
            counts = range(int(self.ladder[-1]) + 1)
            curves = self._curves[batch_size] = (
                [measured.verify_seconds(batch_size, each * batch_size) for each in counts],
                [measured.draft_seconds(batch_size, each) for each in counts],
            )
        verify, draft = curves
        left = min(drafts // batch_size, len(verify) - 2)
        rise = (drafts / batch_size - left) * (verify[left + 1] - verify[left])
        return verify[left] + rise + draft[k]
