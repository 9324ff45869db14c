"""The live draft-length policy: how many drafts to verify and to draft, decided at every step.

`Policy.decide` is called before a step and `Policy.observe` after it. Each decision maximises the
expected tokens per second:

1. `acceptance_model` estimates the survival function of each request's drafts, `cost_model` the
   seconds of a step.
2. K, the number of tokens drafted for each request, is the one with the highest throughput.
   With hysteresis: another K must be at least 1% better, and drafting that is off
   (K = 0) must be 2% better than no drafting before it is switched on.
3. Of the drafts at hand, those are verified whose survival probability pays for their time.
   Drafts from prompt lookup replace those of the drafter where more of them should be accepted.
4. If no K beats K = 0, nothing would be learnt about acceptance. A probe then drafts and verifies a
   little every now and then (`ProbeScheduler`). Probes may take a fixed share of the time, half of
   it after many failures in a row, and are never more than `MAX_PROBE_INTERVAL` steps apart. A
   successful probe is followed by another at once, until the estimate has changed or one fails.
5. Without measured costs, the first steps at each batch size are spent on measuring them; and while
   drafting is on, a rare step without drafts keeps the cost of such steps known
   (`CostExploration`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from leadout.control.acceptance_model import AcceptanceCurve, AcceptanceModel, DraftOutcome
from leadout.control.cost_model import (
    StepCostFilter,
    StepCosts,
    StepCostTable,
    Survival,
    drafts_to_verify,
    min_worthwhile_survival,
    throughput_by_k,
)

MIN_GAIN_TO_SWITCH_ON = 1.02  # over K = 0
MIN_GAIN_TO_CHANGE_K = 1.01  # over the present K
REQUESTS_PER_PLAN_STEP = 16  # a plan for n requests is used for 1 + n // 16 steps
# Exploration: steps taken to learn acceptance or costs rather than because they are the fastest.
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
class DecodingRequest:
    """A request in the next step, with numbers of drafts."""

    request_id: str
    available: int  # made by the drafter in the step before
    limit: int  # maximum for this request
    lookup: int = 0  # from prompt lookup, which may replace the drafter's


@dataclass(frozen=True, slots=True)
class Decision:
    """What the next step does.

    It verifies `verify[i]` drafts of request i, those from prompt lookup where `use_lookup[i]`, and
    drafts `draft` tokens for each request. `gain` is the estimated throughput relative to K = 0;
    None as long as no step's cost is known.
    """

    verify: tuple[int, ...]
    draft: int
    is_probe: bool
    gain: float | None
    use_lookup: tuple[bool, ...]


@dataclass(slots=True)
class _Plan:
    """The optimum for a batch, used for some steps as acceptance changes slowly."""

    batch_size: int
    max_drafts: int
    rate: float  # tokens per second
    min_survival: float  # of drafts worth verifying
    gain: float
    steps_left: int

    def use(self, batch_size: int, max_drafts: int) -> bool:
        """Whether the plan holds for one more step."""
        self.steps_left -= 1
        is_same = (batch_size, max_drafts) == (self.batch_size, self.max_drafts)
        return self.steps_left >= 0 and is_same


class Policy:
    """The draft-length policy of one engine."""

    def __init__(
        self, max_drafts: int, costs: StepCosts | None = None, prior: AcceptanceCurve | None = None
    ) -> None:
        """`costs` and `prior` are what `leadout tune` measured, if anything."""
        self._max_drafts = max_drafts
        self.acceptance = AcceptanceModel(max_drafts, prior)
        self._lookup_acceptance = AcceptanceModel(max_drafts)
        self.costs = StepCostFilter(max_drafts, costs)
        self._cost_exploration = CostExploration(has_measured_costs=costs is not None)
        self._probes = ProbeScheduler()
        self._k = max_drafts
        self._pending_probe: Probe | None = None  # drafted, not yet verified
        self._is_off = False
        self._plan: _Plan | None = None

    def decide(self, requests: Sequence[DecodingRequest]) -> Decision:
        if not requests:  # others may be in prefill, and need drafts after it
            return Decision((), self._k, False, None, ())
        batch_size = len(requests)
        limits = [min(request.limit, self._max_drafts) for request in requests]
        available = [
            min(request.available, limit) for request, limit in zip(requests, limits, strict=True)
        ]
        max_drafts = max(limits)
        requested_k = self._cost_exploration.requested_k(batch_size, self._max_drafts)
        if not self.costs.has_estimate:
            draft = min(requested_k or 0, max_drafts)
            return Decision(tuple(available), draft, False, None, (False,) * batch_size)
        survivals: list[Survival] = [self.acceptance.survival(each.request_id) for each in requests]
        costs = self.costs.table(batch_size)
        if self._plan is None or not self._plan.use(batch_size, max_drafts):
            self._plan = self._optimise(survivals, limits, available, costs)
        plan = self._plan
        use_lookup = [False] * batch_size
        if self._pending_probe is not None and self._is_off and any(available):
            trials = [self.acceptance.trials(request.request_id) for request in requests]
            verify = allocate_probe(self._pending_probe.drafts, available, trials)
        elif requested_k:
            verify = available
        else:
            use_lookup = self._prefer_lookup(requests, survivals, available)
            min_survival = plan.min_survival
            if any(use_lookup):  # the plan was made without them
                min_survival = min_worthwhile_survival(survivals, available, costs, plan.rate)
            verify = drafts_to_verify(survivals, available, min_survival)
        draft, is_probe = (self._k if requested_k is None else min(requested_k, max_drafts)), False
        if self._is_off and requested_k is None and max_drafts:
            probe = Probe.affordable(costs, max_drafts)
            if self._probes.is_due(probe):
                self._pending_probe, draft, is_probe = probe, probe.k, True
        return Decision(tuple(verify), draft, is_probe, plan.gain, tuple(use_lookup))

    def observe(self, outcomes: Sequence[DraftOutcome], k: int, seconds: float | None) -> None:
        """Learn from a step that drafted k tokens for each request.

        `seconds` is None if the step did other work, such as prefill: its time says nothing about
        decoding.
        """
        batch_size = len(outcomes)
        if not batch_size:
            return
        drafts = sum([outcome.verified for outcome in outcomes])
        self._cost_exploration.record(batch_size, drafts, k)
        lookup = [outcome for outcome in outcomes if outcome.from_lookup]
        drafted = [each for each in outcomes if not each.from_lookup] if lookup else outcomes
        has_probed = self._is_off and self._pending_probe is not None
        if has_probed and any(outcome.verified for outcome in drafted):
            self._observe_probe(drafted, batch_size)
        self.acceptance.observe(drafted)
        if lookup:
            self._lookup_acceptance.observe(lookup)
        if seconds is not None:
            self.costs.observe(batch_size, drafts, k, seconds)

    def forget(self, request_id: str) -> None:
        """Drop what is known about a request that has ended."""
        self.acceptance.forget(request_id)
        self._lookup_acceptance.forget(request_id)

    def _optimise(
        self,
        survivals: Sequence[Survival],
        limits: Sequence[int],
        available: Sequence[int],
        costs: StepCostTable,
    ) -> _Plan:
        by_k = throughput_by_k(survivals, limits, costs)
        self._choose_k(by_k, max(limits))
        rate = max(by_k[self._k], by_k[0])
        max_verified = self._k or max(available)
        usual = [min(limit, max_verified) for limit in limits]
        return _Plan(
            batch_size=len(limits),
            max_drafts=max(limits),
            rate=rate,
            min_survival=min_worthwhile_survival(survivals, usual, costs, rate),
            gain=rate / by_k[0],
            steps_left=len(limits) // REQUESTS_PER_PLAN_STEP,
        )

    def _choose_k(self, by_k: Sequence[float], max_drafts: int) -> None:
        """Take the K with the highest throughput, with hysteresis."""
        best = max(range(max_drafts + 1), key=by_k.__getitem__)
        if by_k[best] <= by_k[0] or (self._is_off and by_k[best] < MIN_GAIN_TO_SWITCH_ON * by_k[0]):
            self._is_off, self._k = True, 0
            return
        if self._is_off:
            self._is_off, self._pending_probe = False, None
            self._probes.reset()
        is_near_best = (
            0 < self._k <= max_drafts and by_k[best] < MIN_GAIN_TO_CHANGE_K * by_k[self._k]
        )
        if not (is_near_best and by_k[self._k] > by_k[0]):
            self._k = best

    def _prefer_lookup(
        self, requests: Sequence[DecodingRequest], survivals: list[Survival], available: list[int]
    ) -> list[bool]:
        """Replace the drafter's drafts by those from prompt lookup where more should be accepted.

        Changes `survivals` and `available` in place.
        """
        use_lookup = [False] * len(requests)
        for index, request in enumerate(requests):
            count = min(request.lookup, request.limit, self._max_drafts)
            if not count:
                continue
            survival = self._lookup_acceptance.survival(request.request_id)
            if sum(survival[:count]) > sum(survivals[index][: available[index]]):
                survivals[index], available[index], use_lookup[index] = survival, count, True
        return use_lookup

    def _observe_probe(self, outcomes: Sequence[DraftOutcome], batch_size: int) -> None:
        accepted = sum([outcome.accepted for outcome in outcomes])
        rejected = sum([outcome.accepted < outcome.verified for outcome in outcomes])
        self._pending_probe = None
        table = self.costs.table(batch_size)
        if self._probes.probe_succeeded(accepted, accepted + rejected, table):
            self.acceptance.discount_history()


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
