"""When to try drafts although they do not pay, and when to pause although they do.

While drafts are off nothing is learnt of them, so a probe drafts and verifies a little every now
and then. Probes may take a fixed share of the time, and half of it once many in a row have failed;
they never come later than `NOTICE_STEPS` after the last. A promising one is followed by another at
once, until what is believed has changed or the promise is gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from leadout.control.acceptance_model import Acceptance, AcceptanceCurve, Outcome
from leadout.control.cost_model import (
    LearnedCosts,
    Prices,
    StepCosts,
    Survival,
    least_worth,
    rates,
    verified,
)

PROBE_SHARE = 0.02  # of the time
PROBE_DRAFTING, PROBE_VERIFYING = 0.2, 0.08  # of a bare step, at most, beyond the least probe
LEAST_PROBE = 2  # drafts of a request
LEAST_INTERVAL = 8
NOTICE_STEPS = 200
PATIENCE_AFTER, PATIENCE = 20, 2  # failures in a row, and how many times rarer probes are then
CAUTION = 2  # refusals added to what a row of probes has shown
PAUSE_STEPS = 256  # between two steps that show what drafting costs


@dataclass(frozen=True, slots=True)
class Probe:
    """How much is drafted for each request and verified in all, and what that costs."""

    k: int
    drafts: int
    bare_steps: float

    @classmethod
    def affordable(cls, prices: Prices, most: int) -> Probe:
        bare = prices.bare
        k = min(LEAST_PROBE, most)
        while k < most and prices.draft[k + 1] - prices.draft[0] <= PROBE_DRAFTING * bare:
            k += 1
        place = max(1, k // prices.stride)
        while (
            place + 1 < len(prices.verify)
            and (place + 1) * prices.stride <= k * prices.batch
            and prices.verify[place + 1] - prices.verify[0] <= PROBE_VERIFYING * bare
        ):
            place += 1
        extra = prices.draft[k] - prices.draft[0] + prices.verify[place] - prices.verify[0]
        return cls(k, max(k, place * prices.stride), extra / bare)


class Prober:
    """Places probes while drafts are off."""

    def __init__(self) -> None:
        self._since = 0
        self._failures = 0
        self._stood = self._looked = 0
        self._at_once = False

    def due(self, probe: Probe) -> bool:
        """Called once for each step without drafts."""
        self._since += 1
        return self._at_once or self._since >= self.interval(probe)

    def interval(self, probe: Probe) -> int:
        wanted = probe.bare_steps / PROBE_SHARE
        if self._failures >= PATIENCE_AFTER:
            wanted *= PATIENCE
        return int(min(max(wanted, LEAST_INTERVAL), NOTICE_STEPS))

    def sent(self) -> None:
        self._since = 0
        self._at_once = False

    def came_back(self, stood: int, looked: int, prices: Prices) -> bool:
        """Whether a probe promises a gain: by what this row of probes alone has shown."""
        self._stood += stood
        self._looked += looked
        odds = self._stood / (self._looked + CAUTION)
        survival = [odds ** (k + 1) for k in range(len(prices.draft) - 1)]
        batch = prices.batch
        best = max(rates([survival] * batch, [len(survival)] * batch, prices))
        self._at_once = best > batch / prices.bare
        if self._at_once:
            self._failures = 0
        else:
            self._failures += 1
            self._stood = self._looked = 0
        return self._at_once

    def drafts_are_on(self) -> None:
        self._since = self._stood = self._looked = 0
        self._failures = 0
        self._at_once = False


class Survey:
    """Steps taken only to learn their price: without a price list, and a rare pause with one."""

    def __init__(self, is_needed: bool) -> None:
        self._is_needed = is_needed
        self._seen: dict[tuple[int, bool], int] = {}
        self._since_bare = 0

    def wanted(self, batch: int, most: int) -> int | None:
        """The k of a step that should be measured now; None: no wish."""
        if self._is_needed:
            for full in (False, True):
                if self._seen.get((batch.bit_length(), full), 0) < 2:
                    return most if full else 0
        return 0 if self._since_bare >= PAUSE_STEPS else None

    def saw(self, batch: int, drafts: int, k: int) -> None:
        # Without drafting or without drafts: either tells what the other part of a step costs.
        self._since_bare = self._since_bare + 1 if drafts and k else 0
        if not k and not drafts:
            self._count(batch, False)
        elif k and drafts:
            self._count(batch, True)

    def _count(self, batch: int, full: bool) -> None:
        place = (batch.bit_length(), full)
        self._seen[place] = self._seen.get(place, 0) + 1


def spread_over(drafts: int, limits: Sequence[int], looks: Sequence[float]) -> list[int]:
    """`drafts` in all, as whole as possible, to the requests that were looked at least."""
    given = [0] * len(limits)
    for place in sorted(range(len(limits)), key=looks.__getitem__):
        given[place] = min(limits[place], drafts)
        drafts -= given[place]
    return given


# How many drafts each request verifies, and how many are drafted for the next step.
#
# Asked before every step, told after it. By the odds of drafts (`estimate`) and the prices of steps
# (`cost_model`) it takes the K at which the whole batch would get the most tokens per second,
# and of
# the drafts that are there those that are worth their time (`split`). Where no K beats a bare
# engine,
# nothing is drafted but a rare probe (`probing`).

TURN_ON = 1.02  # gain over bare that ends a time without drafts
CHANGE_K = 1.01  # gain over the present K that another must bring
REPLAN_REQUESTS = 16  # more requests than this: a plan lasts a step for each so many


@dataclass(frozen=True, slots=True)
class Seat:
    """A request in the next step: the drafts it has, and the most that it may have.

    `copied`: drafts copied from its own text, which may take the place of the drafter's.
    """

    request: str
    available: int
    cap: int
    copied: int = 0


@dataclass(frozen=True, slots=True)
class Decision:
    """`verify[i]` drafts of seat i now, copied ones where `copies[i]`; `draft` for the next step.

    `gain`: tokens per second over a bare engine, by the estimate; None as long as no step's cost is
    known.
    """

    verify: tuple[int, ...]
    draft: int
    is_probe: bool
    gain: float | None
    copies: tuple[bool, ...]


@dataclass(slots=True)
class _Plan:
    """What was found best for a batch; good for some steps, as odds change slowly."""

    batch: int
    allowed: int
    rate: float  # tokens per second
    least: float  # survival of a draft that is worth verifying
    gain: float
    steps_left: int

    def lasts(self, batch: int, allowed: int) -> bool:
        self.steps_left -= 1
        return self.steps_left >= 0 and (batch, allowed) == (self.batch, self.allowed)


class Policy:
    """The live draft-length policy of one engine."""

    def __init__(
        self, most: int, costs: StepCosts | None = None, prior: AcceptanceCurve | None = None
    ) -> None:
        self._most = most
        self._acceptance = Acceptance(most, prior)
        self._copying = Acceptance(most)
        self._costs = LearnedCosts(most, costs)
        self._survey = Survey(is_needed=costs is None)
        self._prober = Prober()
        self._k = most
        self._probing: Probe | None = None  # drafts of a probe are on their way
        self._off = False
        self._plan: _Plan | None = None

    @property
    def acceptance(self) -> Acceptance:
        return self._acceptance

    @property
    def costs(self) -> LearnedCosts:
        return self._costs

    def decide(self, seats: Sequence[Seat]) -> Decision:
        if not seats:  # others may be reading their prompts, and want drafts after it
            return Decision((), self._k, False, None, ())
        batch = len(seats)
        caps = [min(seat.cap, self._most) for seat in seats]
        limits = [min(seat.available, cap) for seat, cap in zip(seats, caps, strict=True)]
        allowed = max(caps)
        wish = self._survey.wanted(batch, self._most)
        if not self._costs.known:
            draft = min(wish or 0, allowed)
            return Decision(tuple(limits), draft, False, None, (False,) * batch)
        survivals: list[Survival] = [self._acceptance.survival(seat.request) for seat in seats]
        prices = self._costs.prices(batch)
        if self._plan is None or not self._plan.lasts(batch, allowed):
            self._plan = self._new_plan(survivals, caps, limits, prices)
        plan = self._plan
        copies = [False] * batch
        if self._probing is not None and self._off and any(limits):
            looks = [self._acceptance.looks(seat.request) for seat in seats]
            verify = spread_over(self._probing.drafts, limits, looks)
        elif wish:
            verify = limits
        else:
            copies = self._prefer_copies(seats, survivals, limits)
            least = plan.least
            if any(copies):  # the plan was made without them
                least = least_worth(survivals, limits, prices, plan.rate)
            verify = verified(survivals, limits, least)
        draft, is_probe = (self._k if wish is None else min(wish, allowed)), False
        if self._off and wish is None and allowed:
            draft, is_probe = self._probe(prices, allowed)
        return Decision(tuple(verify), draft, is_probe, plan.gain, tuple(copies))

    def observe(self, outcomes: Sequence[Outcome], k: int, seconds: float | None) -> None:
        """A step: what came of its drafts, how many it drafted, how long it took if that is known.

        The time of a step that did other work, such as reading prompts, is not to be told.
        """
        batch = len(outcomes)
        if not batch:
            return
        drafts = sum([outcome.verified for outcome in outcomes])
        self._survey.saw(batch, drafts, k)
        copied = [outcome for outcome in outcomes if outcome.copied]
        drafted = [outcome for outcome in outcomes if not outcome.copied] if copied else outcomes
        if self._off and self._probing is not None and any(each.verified for each in drafted):
            self._hear_probe(drafted, batch)
        self._acceptance.observe(drafted)
        if copied:
            self._copying.observe(copied)
        if seconds is not None:
            self._costs.observe(batch, drafts, k, seconds)

    def forget(self, request: str) -> None:
        self._acceptance.forget(request)
        self._copying.forget(request)

    def _prefer_copies(
        self, seats: Sequence[Seat], survivals: list[Survival], limits: list[int]
    ) -> list[bool]:
        """Put copied drafts in the place of the drafter's where more of them should stand."""
        copies = [False] * len(seats)
        for place, seat in enumerate(seats):
            limit = min(seat.copied, seat.cap, self._most)
            if not limit:
                continue
            survival = self._copying.survival(seat.request)
            if sum(survival[:limit]) > sum(survivals[place][: limits[place]]):
                survivals[place], limits[place], copies[place] = survival, limit, True
        return copies

    def _new_plan(
        self,
        survivals: Sequence[Survival],
        caps: Sequence[int],
        limits: Sequence[int],
        prices: Prices,
    ) -> _Plan:
        by_k = rates(survivals, caps, prices)
        self._choose(by_k, max(caps))
        rate = max(by_k[self._k], by_k[0])
        most = self._k or max(limits)
        usual = [min(cap, most) for cap in caps]
        return _Plan(
            batch=len(caps),
            allowed=max(caps),
            rate=rate,
            least=least_worth(survivals, usual, prices, rate),
            gain=rate / by_k[0],
            steps_left=len(caps) // REPLAN_REQUESTS,
        )

    def _choose(self, by_k: Sequence[float], allowed: int) -> None:
        """The K of the coming steps, changed only for a gain worth it."""
        best = max(range(allowed + 1), key=by_k.__getitem__)
        if by_k[best] <= by_k[0] or (self._off and by_k[best] < TURN_ON * by_k[0]):
            self._off, self._k = True, 0
            return
        if self._off:
            self._off, self._probing = False, None
            self._prober.drafts_are_on()
        stays = 0 < self._k <= allowed and by_k[best] < CHANGE_K * by_k[self._k]
        if not (stays and by_k[self._k] > by_k[0]):
            self._k = best

    def _probe(self, prices: Prices, allowed: int) -> tuple[int, bool]:
        probe = Probe.affordable(prices, allowed)
        if self._prober.due(probe):
            self._prober.sent()
            self._probing = probe
            return probe.k, True
        return 0, False

    def _hear_probe(self, outcomes: Sequence[Outcome], batch: int) -> None:
        stood = sum([outcome.accepted for outcome in outcomes])
        refused = sum([outcome.accepted < outcome.verified for outcome in outcomes])
        self._probing = None
        if self._prober.came_back(stood, stood + refused, self._costs.prices(batch)):
            self._acceptance.doubt()
