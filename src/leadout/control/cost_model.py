"""Cost curves that learn from measured steps.

They start from measured curves, or from a rough law scaled by the first step, and add to it what a
Kalman filter finds in the differences: a constant, a price per request, for verifying any drafts,
per verified draft (dearer past some points, where a machine leaves its memory-bound range), for
drafting at all and per drafted token. A step far slower than expected is ignored, unless the steps
after it agree.
"""

from __future__ import annotations

from leadout.control.costs import StepCosts
from leadout.control.split import Prices

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
