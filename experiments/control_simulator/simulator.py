"""Runs the draft-length policy on synthetic traffic and a synthetic machine, next to an oracle.

A run lasts a fixed simulated time. Its throughput counts the expected tokens of the verified
drafts, so that luck with single drafts decides nothing; the policy itself sees sampled outcomes and
noisy step times. The oracle knows the acceptance probabilities of this and the next step and the
true costs, but not the outcomes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from control_simulator.traffic import MAX_DRAFTS, MachineModel, Moment, Probabilities, Traffic
from leadout.control.acceptance_model import AcceptanceCurve, Floats, Ints, Outcomes
from leadout.control.cost_model import StepCosts, StepCostTable, optimise
from leadout.control.policy import Batch, Policy

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
    """True costs of steps."""

    def __init__(self, model: MachineModel) -> None:
        self.model = model
        self.costs = model.costs()
        self._tables: dict[int, StepCostTable] = {}

    def policy(
        self, costs: StepCosts | None = None, prior: AcceptanceCurve | None = None
    ) -> Policy:
        """A policy for this machine, without what `costs` and `prior` do not give it."""
        return Policy(
            MAX_DRAFTS, costs, prior, ladder=self.model.ladder, has_graphs=self.model.has_graphs
        )

    def table(self, batch_size: int) -> StepCostTable:
        if batch_size not in self._tables:
            ladder, costs = self.model.ladder, self.costs
            uniform = np.array([costs.verify_seconds(batch_size, k * batch_size) for k in ladder])
            self._tables[batch_size] = StepCostTable(
                batch_size,
                np.array(ladder),
                uniform,
                uniform + self.model.mixed_penalty * costs.bare_seconds(batch_size),
                np.array([costs.draft_seconds(batch_size, k) for k in ladder]),
            )
        return self._tables[batch_size]

    def seconds(self, k: int, verify: Sequence[int], prefill: int = 0) -> float:
        """A step that verifies these numbers of drafts and drafts k tokens for each request.

        `prefill`: tokens of prompts in the same step.
        """
        table = self.table(len(verify))
        other = float(table.draft[self.model.ladder.index(k)]) + self.model.prefill_seconds(prefill)
        if len(set(verify)) == 1 and verify[0] in self.model.ladder:
            return other + float(table.uniform[self.model.ladder.index(verify[0])])
        return other + float(table.mixed_seconds(sum(verify)))


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
    rng = np.random.default_rng(seed)
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
        decision = policy.decide(Batch(requests, np.full(count, drafted)))
        probabilities = np.array(slots.probabilities(clock, count))
        verify = np.array(decision.verify)
        accepted = _sample_accepted(rng, probabilities, verify)
        prefill = traffic.prefill_for(count + int(accepted.sum()))
        seconds = machine.seconds(decision.draft, decision.verify, prefill)
        seconds *= traffic.slowdown(clock)
        policy.observe(
            Outcomes(requests, verify, accepted),
            decision.draft,
            _measured_seconds(rng, seconds),
            prefill,
        )
        steps.append((clock, count + _expected_accepted(probabilities, verify), seconds))
        slots.record(decision.verify)
        drafted, previous = decision.draft, present
        clock += seconds / unit
    return Run.of(steps)


def run_oracle(traffic: Traffic, machine: Machine, batch_size: int, clock_end: float) -> Run:
    """The highest throughput possible with known acceptance probabilities and costs."""
    if traffic.is_adversary:
        # What is best now depends on what is done later: search over fixed schedules instead.
        return max(
            (
                _run_schedule(each, traffic, machine, batch_size, clock_end)
                for each in _schedules(machine.model.ladder)
            ),
            key=lambda run: run.rate,
        )
    unit = machine.table(batch_size).baseline
    slots = _Slots.of(traffic, batch_size)
    clock, drafted, steps = 0.0, 0, []
    optima: dict[tuple[tuple[Probabilities, ...], int], tuple[int, float, float]] = {}
    while clock < clock_end:
        count = slots.occupied(clock)
        probabilities = slots.probabilities(clock, count)
        key = (tuple(sorted(probabilities)), drafted)
        if key not in optima:
            costs = machine.table(count)
            survival = np.cumprod(np.array(key[0]), axis=1)
            found = optimise(survival, np.ones_like(survival, np.int64), MAX_DRAFTS, costs)
            rung = int(found.rates.argmax())
            best = machine.model.ladder[rung]
            verify = np.full(count, min(drafted, best))
            if found.min_survival[rung]:
                enough = (survival >= found.min_survival[rung]).sum(axis=1)
                verify = np.minimum(enough, drafted)
            expected = _expected_accepted(np.array(key[0]), verify)
            prefill = traffic.prefill_for(count + expected)
            optima[key] = (best, expected, machine.seconds(best, verify.tolist(), prefill))
        best, accepted, seconds = optima[key]
        seconds *= traffic.slowdown(clock)
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


def _schedules(ladder: Sequence[int]) -> list[Schedule]:
    steady = [Schedule(k) for k in ladder]
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
        accepted = _expected_accepted(np.array(probabilities), np.array(verify))
        seconds = machine.seconds(k, verify, traffic.prefill_for(count + accepted))
        seconds *= traffic.slowdown(clock)
        steps.append((clock, count + accepted, seconds))
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
        seconds += machine.model.prefill_seconds(traffic.prefill_for(count))
        seconds *= traffic.slowdown(clock)
        steps.append((clock, float(count), seconds))
        clock += seconds / unit
    return Run.of(steps)


def _sample_accepted(rng: np.random.Generator, probabilities: Floats, verified: Ints) -> Ints:
    is_accepted = rng.random(probabilities.shape) < probabilities
    in_a_row = np.logical_and.accumulate(is_accepted, axis=1).sum(axis=1)
    return np.minimum(in_a_row, verified)


def _expected_accepted(probabilities: Floats, verified: Ints) -> float:
    survival = np.cumprod(probabilities, axis=1)
    return float((survival * (np.arange(survival.shape[1]) < verified[:, None])).sum())


def _measured_seconds(rng: np.random.Generator, seconds: float) -> float:
    factor = SLOW_STEP_FACTOR if rng.random() < SLOW_STEP_SHARE else 1.0
    return seconds * factor * max(0.5, rng.normal(1.0, TIME_NOISE))
