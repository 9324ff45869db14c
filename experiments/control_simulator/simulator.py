"""Runs the draft-length policy on synthetic traffic and a synthetic machine, next to an oracle.

A run lasts a fixed simulated time. Its throughput counts the expected tokens of the verified
drafts, so that luck with single drafts decides nothing; the policy itself sees sampled outcomes and
noisy step times. The oracle knows the acceptance probabilities of this and the next step and the
true costs, but not the outcomes.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

from control_simulator.traffic import MAX_DRAFTS, Moment, Probabilities, Traffic
from leadout.control.acceptance_model import DraftOutcome
from leadout.control.cost_model import (
    StepCosts,
    StepCostTable,
    drafts_to_verify,
    min_worthwhile_survival,
    throughput_by_k,
)
from leadout.control.policy import DecodingRequest, Policy

TIME_NOISE = 0.08  # relative standard deviation of a step time
SLOW_STEP_SHARE, SLOW_STEP_FACTOR = 0.01, 4.0


@dataclass(frozen=True, slots=True)
class Run:
    """Expected tokens and seconds of one run."""

    tokens: float
    seconds: float
    steps: tuple[tuple[float, float, float], ...]  # clock, tokens and seconds of each

    @classmethod
    def of(cls, steps: Sequence[tuple[float, float, float]]) -> Run:
        return cls(
            tokens=sum(tokens for _, tokens, _ in steps),
            seconds=sum(seconds for _, _, seconds in steps),
            steps=tuple(steps),
        )

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    def rate_between(self, start: int, end: int) -> float:
        part = self.steps[start:end]
        return sum(tokens for _, tokens, _ in part) / sum(seconds for _, _, seconds in part)


class Machine:
    """True costs by batch size."""

    def __init__(self, costs: StepCosts) -> None:
        self.costs = costs
        self._tables: dict[int, StepCostTable] = {}

    def table(self, batch_size: int) -> StepCostTable:
        if batch_size not in self._tables:
            max_verified = batch_size * MAX_DRAFTS
            self._tables[batch_size] = StepCostTable(
                batch_size,
                1,
                [self.costs.verify_seconds(batch_size, n) for n in range(max_verified + 1)],
                [self.costs.draft_seconds(batch_size, k) for k in range(MAX_DRAFTS + 1)],
            )
        return self._tables[batch_size]


@dataclass(slots=True)
class _Slots:
    """The batch's slots, with what acceptance processes may know about their past."""

    traffic: Traffic
    idle: list[int]
    streak: list[int]

    @classmethod
    def of(cls, traffic: Traffic, batch_size: int) -> _Slots:
        return cls(traffic, [0] * batch_size, [0] * batch_size)

    def occupied(self, clock: float) -> int:
        return max(1, round(self.traffic.load(clock) * len(self.idle)))

    def probabilities(self, clock: float, count: int) -> list[Probabilities]:
        acceptance = self.traffic.acceptance
        return [
            acceptance(Moment(clock, slot, self.idle[slot], self.streak[slot]))
            for slot in range(count)
        ]

    def record(self, verified: Sequence[int]) -> None:
        for slot, count in enumerate(verified):
            self.idle[slot] = 0 if count else self.idle[slot] + 1
            self.streak[slot] = self.streak[slot] + 1 if count else 0


def run_policy(
    policy: Policy,
    traffic: Traffic,
    machine: Machine,
    batch_size: int,
    clock_end: float,
    seed: int = 0,
) -> Run:
    """The policy for `clock_end` bare steps of the full batch."""
    rng = random.Random(seed)
    unit = machine.table(batch_size).baseline
    slots = _Slots.of(traffic, batch_size)
    clock, drafted, steps = 0.0, 0, []
    previous: set[str] = set()
    while clock < clock_end:
        count = slots.occupied(clock)
        requests = [traffic.request(clock, slot) for slot in range(count)]
        present = set(requests)
        for ended in previous - present:
            policy.forget(ended)
        # A new request has just finished its prefill, after which the engine drafts for it too.
        decision = policy.decide(
            [DecodingRequest(request, drafted, MAX_DRAFTS) for request in requests]
        )
        probabilities = slots.probabilities(clock, count)
        accepted = [
            _sample_accepted(rng, each, verified)
            for each, verified in zip(probabilities, decision.verify, strict=True)
        ]
        seconds = machine.table(count).step[decision.draft][sum(decision.verify)]
        policy.observe(
            [
                DraftOutcome(*outcome)
                for outcome in zip(requests, decision.verify, accepted, strict=True)
            ],
            decision.draft,
            _measured_seconds(rng, seconds),
        )
        steps.append((clock, count + _expected_accepted(probabilities, decision.verify), seconds))
        slots.record(decision.verify)
        drafted, previous = decision.draft, present
        clock += seconds / unit
    return Run.of(steps)


def run_oracle(traffic: Traffic, machine: Machine, batch_size: int, clock_end: float) -> Run:
    """The highest throughput possible with known acceptance probabilities and costs."""
    if traffic.is_adversary:
        # What is best now depends on what is done later: search over fixed schedules instead.
        return max(
            (_run_schedule(each, traffic, machine, batch_size, clock_end) for each in _schedules()),
            key=lambda run: run.rate,
        )
    unit = machine.table(batch_size).baseline
    slots = _Slots.of(traffic, batch_size)
    clock, drafted, steps = 0.0, 0, []
    optima: dict[tuple[tuple[Probabilities, ...], int], tuple[list[int], int, float]] = {}
    while clock < clock_end:
        count = slots.occupied(clock)
        probabilities = slots.probabilities(clock, count)
        key = (tuple(sorted(probabilities)), drafted)
        costs = machine.table(count)
        if key not in optima:
            survivals = [tuple(accumulate(each, mul)) for each in key[0]]
            by_k = throughput_by_k(survivals, [MAX_DRAFTS] * count, costs)
            best = max(range(MAX_DRAFTS + 1), key=by_k.__getitem__)
            available = [drafted] * count
            min_survival = min_worthwhile_survival(survivals, available, costs, by_k[best])
            verify = drafts_to_verify(survivals, available, min_survival)
            optima[key] = (verify, best, _expected_accepted(key[0], verify))
        verify, best, accepted = optima[key]
        seconds = costs.step[best][sum(verify)]
        steps.append((clock, count + accepted, seconds))
        drafted = best
        clock += seconds / unit
    return Run.of(steps)


@dataclass(frozen=True, slots=True)
class Schedule:
    """K for the first `on` of every `period` steps, else 0; all drafts are verified."""

    k: int
    on: int = 1
    period: int = 1

    def draft(self, step: int) -> int:
        return self.k if step % self.period < self.on else 0


def _schedules() -> list[Schedule]:
    steady = [Schedule(k) for k in range(MAX_DRAFTS + 1)]
    bursts = [
        Schedule(MAX_DRAFTS, on, period) for on in (1, 2, 3) for period in (4, 8, 11, 12, 13, 16)
    ]
    return steady + bursts


def _run_schedule(
    schedule: Schedule, traffic: Traffic, machine: Machine, batch_size: int, clock_end: float
) -> Run:
    unit = machine.table(batch_size).baseline
    slots = _Slots.of(traffic, batch_size)
    clock, drafted, steps = 0.0, 0, []
    while clock < clock_end:
        count = slots.occupied(clock)
        verify = [drafted] * count
        probabilities = slots.probabilities(clock, count)
        k = schedule.draft(len(steps))
        seconds = machine.table(count).step[k][sum(verify)]
        steps.append((clock, count + _expected_accepted(probabilities, verify), seconds))
        slots.record(verify)
        drafted = k
        clock += seconds / unit
    return Run.of(steps)


def run_bare(traffic: Traffic, machine: Machine, batch_size: int, clock_end: float) -> Run:
    """An engine without a drafter, and so without the cost of updating its context."""
    unit = machine.table(batch_size).baseline
    slots = _Slots.of(traffic, batch_size)
    clock, steps = 0.0, []
    while clock < clock_end:
        count = slots.occupied(clock)
        seconds = machine.costs.bare_seconds(count)
        steps.append((clock, float(count), seconds))
        clock += seconds / unit
    return Run.of(steps)


def _sample_accepted(rng: random.Random, probabilities: Probabilities, verified: int) -> int:
    for position in range(verified):
        if rng.random() >= probabilities[position]:
            return position
    return verified


def _expected_accepted(probabilities: Sequence[Probabilities], verified: Sequence[int]) -> float:
    total = 0.0
    for each, count in zip(probabilities, verified, strict=True):
        survival = 1.0
        for position in range(count):
            survival *= each[position]
            total += survival
    return total


def _measured_seconds(rng: random.Random, seconds: float) -> float:
    factor = SLOW_STEP_FACTOR if rng.random() < SLOW_STEP_SHARE else 1.0
    return seconds * factor * max(0.5, rng.gauss(1.0, TIME_NOISE))
