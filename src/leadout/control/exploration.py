"""Exploration: steps taken to learn acceptance or costs rather than because they are the fastest.

- While drafting is off, nothing is learnt about acceptance. A probe drafts and verifies a little
  every now and then (`ProbeScheduler`). Probes may take a fixed share of the time, half of it after
  many failures in a row, and are never more than `MAX_PROBE_INTERVAL` steps apart. A successful
  probe is followed by another at once, until the estimate has changed or a probe fails.
- Without measured costs, the first steps at each batch size are spent on measuring them; and while
  drafting is on, a rare step without drafts keeps the cost of such steps known (`CostExploration`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from leadout.control.cost_model import StepCostTable, throughput_by_k

PROBE_TIME_SHARE = 0.02
# Limits for probes larger than the smallest: cost of drafting and verifying, in baseline steps.
MAX_PROBE_DRAFTING, MAX_PROBE_VERIFYING = 0.2, 0.08
MIN_PROBE_DRAFTS = 2  # for a request
MIN_PROBE_INTERVAL, MAX_PROBE_INTERVAL = 8, 200  # steps
FAILURES_BEFORE_BACKOFF, BACKOFF_FACTOR = 20, 2  # after 20 in a row, probes are half as frequent
PRIOR_REJECTIONS = 2  # added to what a series of probes has shown
MAX_STEPS_WITHOUT_BASELINE = 256  # with drafts, between two steps that show what drafting costs
MEASUREMENTS = 2  # of each kind of step, without measured costs


@dataclass(frozen=True, slots=True)
class Probe:
    """An exploratory draft: k tokens for each request, of which `drafts` in all are verified."""

    k: int
    drafts: int
    cost: float  # in baseline steps

    @classmethod
    def affordable(cls, costs: StepCostTable, max_drafts: int) -> Probe:
        """The largest probe that stays cheap."""
        baseline = costs.baseline
        k = min(MIN_PROBE_DRAFTS, max_drafts)
        while (
            k < max_drafts and costs.draft[k + 1] - costs.draft[0] <= MAX_PROBE_DRAFTING * baseline
        ):
            k += 1
        index = max(1, k // costs.stride)
        while (
            index + 1 < len(costs.verify)
            and (index + 1) * costs.stride <= k * costs.batch_size
            and costs.verify[index + 1] - costs.verify[0] <= MAX_PROBE_VERIFYING * baseline
        ):
            index += 1
        extra = costs.draft[k] - costs.draft[0] + costs.verify[index] - costs.verify[0]
        return cls(k, max(k, index * costs.stride), extra / baseline)


class ProbeScheduler:
    """Decides when to probe while drafting is off."""

    def __init__(self) -> None:
        self._steps_since_probe = 0
        self._failures = 0
        self._accepted = self._trials = 0  # of the present series of probes
        self._repeats = False

    def is_due(self, probe: Probe) -> bool:
        """Whether to probe now; to be called once for each step without drafts."""
        self._steps_since_probe += 1
        if not self._repeats and self._steps_since_probe < self.interval(probe):
            return False
        self._steps_since_probe, self._repeats = 0, False
        return True

    def interval(self, probe: Probe) -> int:
        steps = probe.cost / PROBE_TIME_SHARE
        if self._failures >= FAILURES_BEFORE_BACKOFF:
            steps *= BACKOFF_FACTOR
        return int(min(max(steps, MIN_PROBE_INTERVAL), MAX_PROBE_INTERVAL))

    def probe_succeeded(self, accepted: int, trials: int, costs: StepCostTable) -> bool:
        """Record a probe's outcome; whether drafting would pay by this series of probes alone."""
        self._accepted += accepted
        self._trials += trials
        probability = self._accepted / (self._trials + PRIOR_REJECTIONS)
        survival = [probability ** (k + 1) for k in range(len(costs.draft) - 1)]
        batch_size = costs.batch_size
        best = max(throughput_by_k([survival] * batch_size, [len(survival)] * batch_size, costs))
        self._repeats = best > batch_size / costs.baseline
        if self._repeats:
            self._failures = 0
        else:
            self._failures += 1
            self._accepted = self._trials = 0
        return self._repeats

    def reset(self) -> None:
        """Drafting is on again."""
        self._steps_since_probe = self._failures = self._accepted = self._trials = 0
        self._repeats = False


class CostExploration:
    """Asks for steps whose cost should be measured."""

    def __init__(self, has_measured_costs: bool) -> None:
        self._has_measured_costs = has_measured_costs
        self._measured: dict[tuple[int, bool], int] = {}  # by size class and whether with drafts
        self._steps_with_drafts = 0

    def requested_k(self, batch_size: int, max_drafts: int) -> int | None:
        """The K of the step that should be measured now; None: any."""
        if not self._has_measured_costs:
            for with_drafts in (False, True):
                if self._measured.get((batch_size.bit_length(), with_drafts), 0) < MEASUREMENTS:
                    return max_drafts if with_drafts else 0
        return 0 if self._steps_with_drafts >= MAX_STEPS_WITHOUT_BASELINE else None

    def record(self, batch_size: int, drafts: int, k: int) -> None:
        # A step without drafting or without drafts shows what the other part of a step costs.
        self._steps_with_drafts = self._steps_with_drafts + 1 if drafts and k else 0
        if bool(drafts) == bool(k):
            key = (batch_size.bit_length(), bool(k))
            self._measured[key] = self._measured.get(key, 0) + 1


def allocate_probe(drafts: int, limits: Sequence[int], trials: Sequence[float]) -> list[int]:
    """Share out `drafts` in all, as large as possible, to the requests with the fewest trials."""
    allocated = [0] * len(limits)
    for index in sorted(range(len(limits)), key=trials.__getitem__):
        allocated[index] = min(limits[index], drafts)
        drafts -= allocated[index]
    return allocated
