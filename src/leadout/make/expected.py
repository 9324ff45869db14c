"""Whether a drafter is expected to pay, before it is trained.

What it costs is measured, with a drafter of the planned shape and random weights: the time of a
step does not depend on them. What it gains is not known before training. `LEARNING_CURVE` is how
the acceptance length of the drafter in drafters/ grew with the blocks that it was trained on, for
the worst and the best of its five held-out sets (results/train/smollm2.json). That is one small
target; another one learns faster or slower, so this is an expectation and not a measurement. It
is meant to be low: the points were measured before the learning rate had decayed, and beyond the
last of them nothing more is expected.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict

from leadout.check.payoff import payoff_of
from leadout.check.result import LoadPayoff, Outcome
from leadout.control.acceptance_model import AcceptanceCurve
from leadout.control.tuned_file import Tuned
from leadout.stats import Interval


class CurvePoint(NamedTuple):
    blocks: int
    low: float  # acceptance length, of the worst set
    high: float  # of the best


LEARNING_CURVE = (
    CurvePoint(204_800, 1.42, 1.94),
    CurvePoint(409_600, 1.58, 2.23),
    CurvePoint(614_400, 1.68, 2.57),
    CurvePoint(819_200, 1.78, 2.97),
    CurvePoint(1_024_000, 1.87, 3.06),
    CurvePoint(1_228_800, 1.89, 3.17),
    CurvePoint(1_323_008, 1.89, 3.18),
)
CURVE_DRAFTS = 7  # K of the curve


class Expectation(BaseModel):
    """The acceptance length that a budget is expected to reach, against measured break-even."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    blocks: int  # to be trained on, estimated
    low: float  # expected acceptance length with K = CURVE_DRAFTS
    high: float
    outcome: Outcome
    loads: list[LoadPayoff]  # in ascending concurrency; lengths from `low` to `high`

    @property
    def stops(self) -> bool:
        return self.outcome == "does not pay"

    def sentence(self) -> str:
        """The comparison, in words that call the expectation what it is."""
        expected = (
            f"about {self.blocks:,} blocks of training are expected to give an acceptance length "
            f"of {self.low:.2f} to {self.high:.2f} (a guess from the training of another, small "
            "model; not a measurement)"
        )
        best = _best(self.loads)
        where = f"with {_requests(best.concurrency)} and K = {best.draft_tokens}"
        compared = (
            f"{where}, break-even was measured as {best.break_even:.2f}, and "
            f"{best.length.low:.2f} to {best.length.high:.2f} is expected"
        )
        verdict = {
            "pays": "A drafter of this budget is expected to pay",
            "does not pay": "A drafter of this budget is not expected to pay at any measured load",
            "undecided": "A drafter of this budget may or may not pay",
        }[self.outcome]
        return f"{verdict}: {compared}. {expected[0].upper()}{expected[1:]}."


def expected_lengths(blocks: float) -> tuple[float, float]:
    """The low and the high acceptance length after training on so many blocks.

    Linear in the logarithm of the blocks; before the first point as between the first two, but at
    least 1, and after the last one constant.
    """
    if blocks <= 0:
        return 1.0, 1.0
    curve = LEARNING_CURVE
    if blocks >= curve[-1].blocks:
        return curve[-1].low, curve[-1].high
    right = next(place for place, point in enumerate(curve) if point.blocks > blocks)
    before, after = curve[max(right, 1) - 1], curve[max(right, 1)]
    place = math.log(blocks / before.blocks) / math.log(after.blocks / before.blocks)
    low = before.low + place * (after.low - before.low)
    high = before.high + place * (after.high - before.high)
    return max(low, 1.0), max(high, 1.0)


def curve_with_length(length: float, drafts: int) -> AcceptanceCurve:
    """Every draft is accepted equally often: as often as gives this length with the curve's K."""
    low, high = 0.0, 1.0
    for _ in range(60):
        odds = (low + high) / 2
        if 1 + sum(odds**place for place in range(1, CURVE_DRAFTS + 1)) < length:
            low = odds
        else:
            high = odds
    return AcceptanceCurve.from_probabilities([low] * drafts)


def expectation(blocks: float, costs: Tuned) -> Expectation:
    """What `blocks` are expected to reach, against the costs of a drafter of the same shape.

    It is expected to pay, or not to pay, where both ends of the range say so.
    """
    drafts = costs.block_size - 1
    low, high = expected_lengths(blocks)
    ends = [curve_with_length(each, drafts).tokens for each in (low, high)]
    ranges = {
        k: Interval(value=(ends[0][k] + ends[1][k]) / 2, low=ends[0][k], high=ends[1][k])
        for k in range(1, drafts + 1)
    }
    at_best = {k: _exactly(ends[1][k]) for k in ranges}
    found = payoff_of(ranges, costs)
    outcome = found.outcome
    if outcome != "pays":  # another K may suit the best case
        hopeless = payoff_of(at_best, costs).outcome == "does not pay"
        outcome = "does not pay" if hopeless else "undecided"
    return Expectation(
        blocks=round(blocks),
        low=low,
        high=high,
        outcome=outcome,
        loads=found.loads,
    )


def _exactly(value: float) -> Interval:
    return Interval(value=value, low=value, high=value)


def _best(loads: list[LoadPayoff]) -> LoadPayoff:
    return max(loads, key=lambda load: load.length.high / load.break_even)


def _requests(count: int) -> str:
    return "1 request at a time" if count == 1 else f"{count} requests at a time"
