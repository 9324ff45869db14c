"""What a step of the engine costs, in seconds, from measured points.

A step verifies the drafts of the step before and drafts for the next one:

    step(batch, drafts, k) = verify(batch, drafts) + draft(batch, k)

`batch` is the number of requests that decode, `drafts` how many drafted tokens are verified for all
of them together, `k` how many are drafted for each. `verify(batch, 0)` is a step of a bare engine;
`draft(batch, 0)` is what keeping the drafter's context up costs while nothing is drafted.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


class NoCostsError(ValueError):
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
        return _between(self._verify, batch, drafts / batch)

    def draft_seconds(self, batch: int, k: float) -> float:
        return _between(self._draft, batch, k)

    def step_seconds(self, batch: int, k: int) -> float:
        """A step that verifies k drafts of every request and drafts k again."""
        return self.verify_seconds(batch, k * batch) + self.draft_seconds(batch, k)


def _lines(curves: Mapping[int, Mapping[int, float]]) -> tuple[tuple[int, Line], ...]:
    if not curves:
        raise NoCostsError("step costs: found no batch size, wanted at least one")
    return tuple((batch, Line.through(curves[batch])) for batch in sorted(curves))


def _between(lines: Sequence[tuple[int, Line]], batch: int, place: float) -> float:
    """Straight between the two measured batch sizes around `batch`."""
    return Line.through({size: line(place) for size, line in lines})(batch)
