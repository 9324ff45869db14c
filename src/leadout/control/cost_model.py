"""Which drafts are worth verifying: the likeliest first, as long as tokens per second rise.

One more verified draft of a request brings its survival in tokens, whatever the others do, and
survival only falls with the position. So the best n drafts of a batch are the n with the highest
survival, and the first j of each request among them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import truediv

from leadout.errors import LeadoutError


@dataclass(frozen=True, slots=True)
class Prices:
    """Seconds of a step at one batch size.

    `verify[i]`: the target's pass with i x `stride` drafts in all; `draft[k]`: drafting k tokens
    for every request; `step[k][i]`: both together.
    """

    batch: int
    stride: int
    verify: tuple[float, ...]
    draft: tuple[float, ...]
    step: tuple[tuple[float, ...], ...]

    @classmethod
    def of(cls, batch: int, stride: int, verify: Sequence[float], draft: Sequence[float]) -> Prices:
        step = tuple(tuple(pass_ + drafting for pass_ in verify) for drafting in draft)
        return cls(batch, stride, tuple(verify), tuple(draft), step)

    @property
    def bare(self) -> float:
        """A step that neither verifies nor drafts, but keeps the drafter's context."""
        return self.step[0][0]


Survival = Sequence[float]


def rates(survivals: Sequence[Survival], caps: Sequence[int], prices: Prices) -> list[float]:
    """Tokens per second by k, where k are drafted every step and the best of them verified."""
    found = [prices.batch / prices.bare]
    pool: list[float] = []
    for k in range(1, len(prices.draft)):
        pool += [survival[k - 1] for survival, cap in zip(survivals, caps, strict=True) if cap >= k]
        pool.sort(reverse=True)
        tokens = list(accumulate(pool, initial=float(prices.batch)))
        found.append(max(map(truediv, tokens[:: prices.stride], prices.step[k])))
    return found


def least_worth(
    survivals: Sequence[Survival], limits: Sequence[int], prices: Prices, rate: float
) -> float:
    """The survival from which on drafts are worth verifying.

    A draft is worth the time in which `rate`, the tokens per second of the whole, brings as much.
    """
    pool: list[float] = []
    for survival, limit in zip(survivals, limits, strict=True):
        pool += survival[:limit]
    pool.sort(reverse=True)
    tokens = list(accumulate(pool, initial=0.0))[:: prices.stride]
    # Fewer prices than drafts only where someone has more drafts than can be made.
    worth = [gained - rate * spent for gained, spent in zip(tokens, prices.verify, strict=False)]
    best = worth.index(max(worth))
    # What one more would have to bring; others than those looked at may do so.
    next_ = min(best, len(prices.verify) - 2)
    price = rate * (prices.verify[next_ + 1] - prices.verify[next_]) / prices.stride
    return min(price, pool[best * prices.stride - 1]) if best else price


def verified(survivals: Sequence[Survival], limits: Sequence[int], least: float) -> list[int]:
    """How many drafts each request verifies: those that survive well enough, up to its limit."""
    found = []
    for survival, limit in zip(survivals, limits, strict=True):
        reach = 0
        while reach < limit and survival[reach] >= least:
            reach += 1
        found.append(reach)
    return found


# What a step of the engine costs, in seconds, from measured points.
#
# A step verifies the drafts of the step before and drafts for the next one:
#
#     step(batch, drafts, k) = verify(batch, drafts) + draft(batch, k)
#
# `batch` is the number of requests that decode, `drafts` how many drafted tokens are verified
# for all
# of them together, `k` how many are drafted for each. `verify(batch, 0)` is a step of a bare
# engine;
# `draft(batch, 0)` is what keeping the drafter's context up costs while nothing is drafted.


class NoCostsError(LeadoutError):
    """A cost curve without a point."""


@dataclass(frozen=True, slots=True)
class Line:
    """Points joined by straight lines; beyond them, the nearest piece goes on."""

    at: tuple[float, ...]  # ascending
    values: tuple[float, ...]

    @classmethod
    def through(cls, points: Mapping[int, float]) -> Line:
        if not points:
            raise NoCostsError("cost curve: found no point, wanted at least one")
        places = sorted(points)
        return cls(tuple(map(float, places)), tuple(points[place] for place in places))

    def __call__(self, place: float) -> float:
        if len(self.at) == 1:
            return self.values[0]
        right = min(max(bisect_left(self.at, place), 1), len(self.at) - 1)
        left = right - 1
        share = (place - self.at[left]) / (self.at[right] - self.at[left])
        # A noisy last piece must not lead below zero, nor below the points themselves.
        return max(
            self.values[left] + share * (self.values[right] - self.values[left]),
            min(self.values),
        )


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Measured points: `verify[batch][drafts of one request]`, `draft[batch][k]`."""

    verify: Mapping[int, Mapping[int, float]]
    draft: Mapping[int, Mapping[int, float]]
    _verify: tuple[tuple[int, Line], ...] = field(init=False, repr=False, compare=False)
    _draft: tuple[tuple[int, Line], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_verify", _lines(self.verify))
        object.__setattr__(self, "_draft", _lines(self.draft))

    def bare_seconds(self, batch: int) -> float:
        return self.verify_seconds(batch, 0)

    def verify_seconds(self, batch: int, drafts: float) -> float:
        """The target's pass over `batch` requests and `drafts` drafted tokens in all."""
        return _between_points(self._verify, batch, drafts / batch)

    def draft_seconds(self, batch: int, k: float) -> float:
        return _between_points(self._draft, batch, k)

    def step_seconds(self, batch: int, k: int) -> float:
        """A step that verifies k drafts of every request and drafts k again."""
        return self.verify_seconds(batch, k * batch) + self.draft_seconds(batch, k)


def _lines(curves: Mapping[int, Mapping[int, float]]) -> tuple[tuple[int, Line], ...]:
    if not curves:
        raise NoCostsError("step costs: found no batch size, wanted at least one")
    return tuple((batch, Line.through(curves[batch])) for batch in sorted(curves))


def _between_points(lines: Sequence[tuple[int, Line]], batch: int, place: float) -> float:
    """Straight between the two measured batch sizes around `batch`."""
    return Line.through({size: line(place) for size, line in lines})(batch)


# Cost curves that learn from measured steps.
#
# They start from measured curves, or from a rough law scaled by the first step, and add to it
# what a
# Kalman filter finds in the differences: a constant, a price per request, for verifying any drafts,
# per verified draft (dearer past some points, where a machine leaves its memory-bound range), for
# drafting at all and per drafted token. A step far slower than expected is ignored, unless the
# steps
# after it agree.

GRID = 8  # points between one verified draft per request and the next, at most
KNEES = (64, 256)  # tokens of a pass past which each may cost more
NOISE = 0.1  # of a measured step, relative
FAR = 4.0  # deviations
STUBBORN = 6  # far steps in a row that are no accident
REFRESH = 16  # steps between two derivations of the price list
# How wrong the start may be, relative to a bare step: constant, per 8 requests, any drafts, per 8
# drafts, past each knee, drafting at all, per 8 drafted tokens.
DOUBT = (0.5, 0.1, 0.1, 0.1, 0.3, 0.5, 0.3, 0.1)
DRIFT_STEPS = 200_000.0  # in which what is not measured becomes as doubtful as at the start
# The rough law, relative to the first step.
ROUGH_REQUEST, ROUGH_VERIFY, ROUGH_DRAFTING, ROUGH_SLOT = 0.005, 0.003, 0.15, 0.002


class LearnedCosts:
    """What steps cost as far as measured, for one engine and K."""

    def __init__(self, most: int, costs: StepCosts | None = None) -> None:
        if most < 1:
            raise ValueError(f"learned costs: found a largest K of {most}, wanted 1 or more")
        self._most = most
        self._start = costs
        self._scale: float | None = None if costs is None else costs.bare_seconds(1)
        self._weights = [0.0] * len(DOUBT)
        self._doubt: list[list[float]] = []
        self._cap: list[float] = []
        if self._scale is not None:
            self._doubt_all(self._scale)
        self._far = 0
        self._steps = 0
        self._starts: dict[int, tuple[list[float], list[float]]] = {}
        self._prices: dict[int, tuple[int, Prices]] = {}

    @property
    def known(self) -> bool:
        """Whether there is anything to go by."""
        return self._scale is not None

    def prices(self, batch: int) -> Prices:
        """The price list of a batch size, at most a few steps old."""
        kept = self._prices.get(batch)
        if kept is not None and self._steps - kept[0] < REFRESH:
            return kept[1]
        made = self._derive(batch)
        self._prices[batch] = (self._steps, made)
        return made

    def observe(self, batch: int, drafts: int, k: int, seconds: float) -> None:
        """A step of `batch` requests that verified `drafts` in all and drafted k for each."""
        if seconds <= 0:
            raise ValueError(f"step time: found {seconds} s, wanted more than 0")
        if self._scale is None:
            rough = 1 + ROUGH_REQUEST * batch + ROUGH_VERIFY * drafts + _rough_drafting(batch, k)
            self._scale = seconds / rough
            self._doubt_all(self._scale)
        self._steps += 1
        place = _features(batch, drafts, k)
        base = self._base(batch, drafts, k)
        expected = base + _dot(self._weights, place)
        error = seconds - expected
        spread = NOISE * max(expected, 0.2 * base)
        known_to = [_dot(row, place) for row in self._doubt]
        variance = _dot(known_to, place) + spread * spread
        if error * error > FAR * FAR * variance:
            self._far += 1
            # Nothing makes a single step faster than it can be; many slow ones are no accident.
            if error > 0 and self._far < STUBBORN:
                return
            self._doubt_all(self._scale)
            known_to = [_dot(row, place) for row in self._doubt]
            variance = _dot(known_to, place) + spread * spread
            self._prices.clear()
        self._far = 0
        step = [value / variance for value in known_to]
        self._weights = [
            weight + gain * error for weight, gain in zip(self._weights, step, strict=True)
        ]
        self._doubt = [
            [value - gain * other for value, other in zip(row, known_to, strict=True)]
            for row, gain in zip(self._doubt, step, strict=True)
        ]
        for index, cap in enumerate(self._cap):
            if self._doubt[index][index] < cap:
                self._doubt[index][index] += cap / DRIFT_STEPS

    def _doubt_all(self, scale: float) -> None:
        self._cap = [(share * scale) ** 2 for share in DOUBT]
        self._doubt = [
            [cap if column == row else 0.0 for column in range(len(DOUBT))]
            for row, cap in enumerate(self._cap)
        ]

    def _derive(self, batch: int) -> Prices:
        """Straight lines between whole drafts per request; more drafts never cost less."""
        verify_start, draft_start = self._start_of(batch)
        knots, floor = [], 0.0
        for drafts, start in enumerate(verify_start):
            there = start + _dot(self._weights, _features(batch, drafts * batch, 0))
            floor = max(there, floor, 0.05 * start)
            knots.append(floor)
        bare = _dot(self._weights, _features(batch, 0, 0))
        draft, floor = [], 0.0
        for k, start in enumerate(draft_start):
            there = start + _dot(self._weights, _features(batch, 0, k)) - bare
            floor = max(there, floor)
            draft.append(floor)
        stride = max(1, batch // GRID)
        # The first draft of a batch has a price of its own, which no straight line from none shows.
        any_ = max(0.0, _dot(self._weights, _features(batch, 1, 0)) - bare)
        from_first = [min(knots[0] + any_, knots[1]), *knots[1:]]
        verify = knots[:1] + [
            _between(from_first, drafts / batch)
            for drafts in range(stride, batch * self._most + 1, stride)
        ]
        return Prices.of(batch, stride, verify, draft)

    def _start_of(self, batch: int) -> tuple[list[float], list[float]]:
        """The curves or the law that was there first, by drafts per request and by k."""
        kept = self._starts.get(batch)
        if kept is None:
            whole = range(self._most + 1)
            start = self._start
            if start is not None:
                kept = (
                    [start.verify_seconds(batch, drafts * batch) for drafts in whole],
                    [start.draft_seconds(batch, k) for k in whole],
                )
            else:
                assert self._scale is not None
                bare = self._scale * (1 + ROUGH_REQUEST * batch)
                kept = (
                    [bare + self._scale * ROUGH_VERIFY * drafts * batch for drafts in whole],
                    [self._scale * _rough_drafting(batch, k) for k in whole],
                )
            self._starts[batch] = kept
        return kept

    def _base(self, batch: int, drafts: int, k: int) -> float:
        verify, draft = self._start_of(batch)
        return _between(verify, drafts / batch) + draft[k]


def _rough_drafting(batch: int, k: int) -> float:
    return ROUGH_DRAFTING + ROUGH_SLOT * batch * k if k else 0.0


def _between(knots: list[float], place: float) -> float:
    """Straight between the values at whole places."""
    left = min(int(place), len(knots) - 2)
    return knots[left] + (place - left) * (knots[left + 1] - knots[left])


def _features(batch: int, drafts: int, k: int) -> list[float]:
    tokens = batch + drafts
    return [
        1.0,
        batch / 8,
        1.0 if drafts else 0.0,
        drafts / 8,
        *(max(0.0, (tokens - knee) / knee) for knee in KNEES),
        1.0 if k else 0.0,
        batch * k / 8,
    ]


def _dot(left: list[float], right: list[float]) -> float:
    return sum([a * b for a, b in zip(left, right, strict=True)])
