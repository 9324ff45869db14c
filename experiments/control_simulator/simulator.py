"""The policy on made-up traffic and a made-up machine, against an oracle that knows both.

A run lasts a fixed time. What counts are the tokens that the law expects of the drafts verified, so
that luck with single drafts decides nothing; the policy sees drawn outcomes and noisy step times.
The oracle knows the odds of this and the next step and the true costs, but no coin flip.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

from control_simulator.traffic import MOST, Moment, Odds, Process
from leadout.control.acceptance_model import Outcome
from leadout.control.cost_model import Prices, StepCosts, least_worth, rates, verified
from leadout.control.policy import Policy, Seat

NOISE = 0.08  # of a step time
STUMBLES, STUMBLE = 0.01, 4.0  # share of the steps, and how many times longer they take


@dataclass(frozen=True, slots=True)
class Run:
    """Tokens and seconds of one run."""

    tokens: float
    seconds: float
    course: tuple[tuple[float, float, float], ...]  # clock, tokens and seconds of each step

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    def rate_of_steps(self, start: int, end: int) -> float:
        part = self.course[start:end]
        return sum(tokens for _, tokens, _ in part) / sum(seconds for _, _, seconds in part)


class Machine:
    """True prices by batch size."""

    def __init__(self, costs: StepCosts) -> None:
        self.costs = costs
        self._prices: dict[int, Prices] = {}

    def prices(self, batch: int) -> Prices:
        if batch not in self._prices:
            self._prices[batch] = Prices.of(
                batch,
                1,
                [self.costs.verify_seconds(batch, n) for n in range(batch * MOST + 1)],
                [self.costs.draft_seconds(batch, k) for k in range(MOST + 1)],
            )
        return self._prices[batch]


@dataclass(slots=True)
class _Seats:
    """What the laws may know of each seat's past."""

    process: Process
    idle: list[int]
    streak: list[int]

    @classmethod
    def of(cls, process: Process, batch: int) -> _Seats:
        return cls(process, [0] * batch, [0] * batch)

    def taken(self, clock: float) -> int:
        return max(1, round(self.process.load(clock) * len(self.idle)))

    def odds(self, clock: float, count: int) -> list[Odds]:
        law = self.process.law
        return [
            law(Moment(clock, seat, self.idle[seat], self.streak[seat])) for seat in range(count)
        ]

    def verified(self, counts: Sequence[int]) -> None:
        for seat, count in enumerate(counts):
            self.idle[seat] = 0 if count else self.idle[seat] + 1
            self.streak[seat] = self.streak[seat] + 1 if count else 0


def run_policy(
    policy: Policy, process: Process, machine: Machine, batch: int, clock_end: float, seed: int = 0
) -> Run:
    """The policy for `clock_end` bare steps of the full batch."""
    draws = random.Random(seed)
    unit = machine.prices(batch).bare
    seats = _Seats.of(process, batch)
    clock, drafted, course = 0.0, 0, []
    had: set[str] = set()
    while clock < clock_end:
        count = seats.taken(clock)
        requests = [process.request(clock, seat) for seat in range(count)]
        here = set(requests)
        for gone in had - here:
            policy.forget(gone)
        # A new request has just read its prompt, after which the engine drafts as for the others.
        decision = policy.decide([Seat(request, drafted, MOST) for request in requests])
        odds = seats.odds(clock, count)
        accepted = [
            _draw(draws, law, tried) for law, tried in zip(odds, decision.verify, strict=True)
        ]
        prices = machine.prices(count)
        seconds = prices.step[decision.draft][sum(decision.verify)]
        policy.observe(
            [
                Outcome(*outcome)
                for outcome in zip(requests, decision.verify, accepted, strict=True)
            ],
            decision.draft,
            _measured(draws, seconds),
        )
        course.append((clock, count + _expected(odds, decision.verify), seconds))
        seats.verified(decision.verify)
        drafted, had = decision.draft, here
        clock += seconds / unit
    return _run(course)


def run_oracle(process: Process, machine: Machine, batch: int, clock_end: float) -> Run:
    """The most that knowing the law and the costs can bring."""
    if process.watches:
        return max(
            (_run_plan(plan, process, machine, batch, clock_end) for plan in _plans()),
            key=lambda run: run.rate,
        )
    unit = machine.prices(batch).bare
    seats = _Seats.of(process, batch)
    clock, drafted, course = 0.0, 0, []
    remembered: dict[tuple[tuple[Odds, ...], int], tuple[list[int], int, float]] = {}
    while clock < clock_end:
        count = seats.taken(clock)
        odds = seats.odds(clock, count)
        key = (tuple(sorted(odds)), drafted)
        prices = machine.prices(count)
        if key not in remembered:
            survivals = [tuple(accumulate(law, mul)) for law in key[0]]
            by_k = rates(survivals, [MOST] * count, prices)
            best = max(range(MOST + 1), key=by_k.__getitem__)
            least = least_worth(survivals, [drafted] * count, prices, by_k[best])
            tried = verified(survivals, [drafted] * count, least)
            remembered[key] = (tried, best, _expected(key[0], tried))
        tried, best, gained = remembered[key]
        seconds = prices.step[best][sum(tried)]
        course.append((clock, count + gained, seconds))
        drafted = best
        clock += seconds / unit
    return _run(course)


@dataclass(frozen=True, slots=True)
class Plan:
    """k for the first `on` of every `every` steps, else 0; all drafts are verified."""

    k: int
    on: int = 1
    every: int = 1

    def draft(self, step: int) -> int:
        return self.k if step % self.every < self.on else 0


def _plans() -> list[Plan]:
    steady = [Plan(k) for k in range(MOST + 1)]
    bursts = [Plan(MOST, on, every) for on in (1, 2, 3) for every in (4, 8, 11, 12, 13, 16)]
    return steady + bursts


def _run_plan(plan: Plan, process: Process, machine: Machine, batch: int, clock_end: float) -> Run:
    unit = machine.prices(batch).bare
    seats = _Seats.of(process, batch)
    clock, drafted, course, step = 0.0, 0, [], 0
    while clock < clock_end:
        count = seats.taken(clock)
        tried = [drafted] * count
        odds = seats.odds(clock, count)
        k = plan.draft(step)
        seconds = machine.prices(count).step[k][sum(tried)]
        course.append((clock, count + _expected(odds, tried), seconds))
        seats.verified(tried)
        drafted, step = k, step + 1
        clock += seconds / unit
    return _run(course)


def run_bare(process: Process, machine: Machine, batch: int, clock_end: float) -> Run:
    """An engine that has no drafter at all, not even its context to keep."""
    unit = machine.prices(batch).bare
    seats = _Seats.of(process, batch)
    clock, course = 0.0, []
    while clock < clock_end:
        count = seats.taken(clock)
        seconds = machine.costs.bare_seconds(count)
        course.append((clock, float(count), seconds))
        clock += seconds / unit
    return _run(course)


def _run(course: Sequence[tuple[float, float, float]]) -> Run:
    return Run(
        tokens=sum(tokens for _, tokens, _ in course),
        seconds=sum(seconds for _, _, seconds in course),
        course=tuple(course),
    )


def _draw(draws: random.Random, odds: Odds, tried: int) -> int:
    for position in range(tried):
        if draws.random() >= odds[position]:
            return position
    return tried


def _expected(odds: Sequence[Odds], tried: Sequence[int]) -> float:
    total = 0.0
    for law, count in zip(odds, tried, strict=True):
        left = 1.0
        for position in range(count):
            left *= law[position]
            total += left
    return total


def _measured(draws: random.Random, seconds: float) -> float:
    stumble = STUMBLE if draws.random() < STUMBLES else 1.0
    return seconds * stumble * max(0.5, draws.gauss(1.0, NOISE))
