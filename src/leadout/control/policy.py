"""The live draft-length policy: how many drafts to verify and to draft, decided at every step.

`Policy.decide` is called before a step and `Policy.observe` after it. Each decision maximises the
expected tokens per second:

1. `acceptance_model` estimates the survival function of the drafts of each group of requests,
   `cost_model` the seconds of a step.
2. K, the number of tokens drafted for each request, is the rung of the ladder with the highest
   throughput. The ladder holds the lengths for which the engine has captured graphs.
3. Of the drafts at hand, every request verifies the same number, a rung again, so that the step
   runs in such a graph. Requests verify different numbers only where the cost model says that this
   is faster in spite of leaving the graph, or where their own limits ask for it.
   Drafts from prompt lookup replace those of the drafter where more of them should be accepted.
4. If no K beats K = 0, nothing would be learnt about acceptance. A probe then drafts and verifies a
   little every now and then (`ProbeScheduler`), for a fixed share of the time. A successful probe
   is followed by another at once, until the estimate has changed or one fails.
5. Without measured costs, one step at each size of batch and each rung measures it.
6. While drafts are made or verified, a bare step every now and then shows what it costs without
   them (`BaselineProbes`): nothing else does.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from leadout.control.acceptance_model import (
    GROUPS,
    AcceptanceCurve,
    AcceptanceModel,
    DraftOutcome,
    Floats,
    Ints,
    Outcomes,
)
from leadout.control.cost_model import StepCostFilter, StepCosts, StepCostTable, optimise

# Exploration: steps taken to learn acceptance or costs rather than because they are the fastest.
PROBE_TIME_SHARE = 0.01
# Steps with drafts before a bare one: the first of an engine, and at least later on.
FIRST_WAIT, MIN_INTERVAL = 4, 32
# From so many requests on, a step with drafts either plans or learns, in turns: both together would
# keep the scheduler too long, and neither K nor what is known changes much within a step.
LARGE_BATCH = 64


def ladder_up_to(max_drafts: int) -> tuple[int, ...]:
    """0, 1, 3, 7, 15 for 15: few enough to capture a graph for each.

    1 + K divides 1 + `max_drafts`, because only then do graphs of different K not get in each
    other's way (`leadout.engine.cuda_graphs`). Each is at least twice the one below.
    """
    lengths = [1 + max_drafts]
    while lengths[-1] > 1:
        half = lengths[-1] // 2
        lengths.append(max(each for each in range(1, half + 1) if lengths[0] % each == 0))
    return tuple(length - 1 for length in reversed(lengths))


class DecodingRequest(NamedTuple):
    """A request in the next step, with numbers of drafts."""

    request_id: str
    available: int  # made by the drafter in the step before
    limit: int  # maximum for this request
    lookup: int = 0  # from prompt lookup, which may replace the drafter's


class Batch:
    """The requests of the next step, as arrays [requests]."""

    __slots__ = ("available", "limits", "lookup", "request_ids")

    def __init__(
        self,
        request_ids: Sequence[str],
        available: Ints,
        limits: Ints | None = None,
        lookup: Ints | None = None,
    ) -> None:
        """`limits` None: no request has one; `lookup` None: prompt lookup has found nothing."""
        self.request_ids, self.available = request_ids, available
        self.limits, self.lookup = limits, lookup

    @classmethod
    def of(cls, requests: Iterable[DecodingRequest]) -> Batch:
        rows = list(requests)
        if not rows:
            return cls((), np.zeros(0, np.int64))
        request_ids, available, limits, lookup = zip(*rows, strict=True)
        return cls(
            request_ids,
            np.array(available, np.int64),
            np.array(limits, np.int64),
            np.array(lookup, np.int64) if any(lookup) else None,
        )


@dataclass(frozen=True, slots=True)
class Decision:
    """What the next step does.

    It verifies `verify[i]` drafts of request i, those from prompt lookup where `use_lookup[i]`, and
    drafts `draft` tokens for each request. `gain` is the estimated throughput relative to K = 0;
    None as long as no step's cost is known. A step that `explores` is taken to learn its cost.
    """

    verify: tuple[int, ...]
    draft: int
    is_probe: bool
    gain: float | None
    use_lookup: tuple[bool, ...]
    explores: bool = False


class Plan(NamedTuple):
    """What was decided last, for one step or two."""

    rate: float  # tokens per second
    gain: float  # over K = 0
    lengths: Ints | None  # [groups]: the drafts to verify in a mixed step; None: K
    costs: StepCostTable


class Policy:
    """The draft-length policy of one engine."""

    def __init__(
        self,
        max_drafts: int,
        costs: StepCosts | None = None,
        prior: AcceptanceCurve | None = None,
        *,
        ladder: Sequence[int] | None = None,
        has_graphs: bool = False,
        capacity: Sequence[int] | None = None,
    ) -> None:
        """`costs` and `prior` are what `leadout tune` measured, if anything.

        `ladder`: the K to choose from, 0 and `max_drafts` included; default: all. `has_graphs`: the
        engine has captured a graph for each of them, and none for steps of different lengths.
        `capacity`: how many requests a step with each of them holds; default: any number.
        """
        self.ladder = tuple(ladder) if ladder is not None else tuple(range(max_drafts + 1))
        if max(self.ladder) != max_drafts:
            raise ValueError(f"the ladder is {self.ladder}, expected to end at {max_drafts}")
        self._max_drafts = max_drafts
        self._capacity = None if capacity is None else np.array(capacity, np.int64)  # [rungs]
        self.acceptance = AcceptanceModel(max_drafts, prior)
        self._lookup_acceptance = AcceptanceModel(max_drafts)
        self.costs = StepCostFilter(self.ladder, costs, has_graphs=has_graphs)
        self._survey = CostSurvey(() if costs is not None else self.ladder)
        self._probes = ProbeScheduler()
        self._baseline = BaselineProbes()
        self._k = max_drafts
        self._probed_k = 0  # of a probe that was drafted and is not yet verified
        self._is_off = False
        self._plan: Plan | None = None
        self._is_planning = False  # in the step that was decided last, and not learning
        self._no_lookup: tuple[bool, ...] = ()

    def decide(self, requests: Batch | Sequence[DecodingRequest]) -> Decision:
        batch = requests if isinstance(requests, Batch) else Batch.of(requests)
        batch_size = len(batch.request_ids)
        if not batch_size:  # others may be in prefill, and need drafts after it
            return Decision((), self._k, False, None, ())
        if len(self._no_lookup) != batch_size:
            self._no_lookup = (False,) * batch_size
        available, limits = batch.available, batch.limits
        lowest = highest = self._max_drafts
        if limits is not None:
            limits = np.minimum(limits, self._max_drafts)
            lowest, highest = int(limits.min()), int(limits.max())
            available = np.minimum(available, limits)
        surveyed_k = self._survey.requested_k(batch_size)
        if surveyed_k is not None:
            surveyed_k = max(k for k in self.ladder if k <= min(surveyed_k, highest))
        if not self.costs.has_estimate:
            verify = tuple(available.tolist())
            return Decision(verify, surveyed_k or 0, False, None, self._no_lookup)
        groups = self.acceptance.groups(batch.request_ids)
        is_bare = self._baseline.begin() and surveyed_k is None
        takes_turns = (
            batch_size >= LARGE_BATCH and not self._is_off and surveyed_k is None and not is_bare
        )
        is_learning = takes_turns and self._is_planning
        self._is_planning = takes_turns and not is_learning
        if self._plan is None or not is_learning:
            self._plan = self._new_plan(batch_size, groups, limits, lowest, highest)
        plan = self._plan
        if is_bare:
            return Decision((0,) * batch_size, 0, True, plan.gain, self._no_lookup, explores=True)
        use_lookup = self._no_lookup
        if surveyed_k is not None:
            self._baseline.restart()
            verify_counts = available
        elif self._is_off:
            verify_counts = np.minimum(available, self._probed_k)
        else:
            enough = self._k if plan.lengths is None else plan.lengths[groups]
            verify_counts = np.minimum(available, enough)
        is_probed = self._is_off and bool(verify_counts.any())
        if batch.lookup is not None and surveyed_k is None and not is_probed:
            lookup = batch.lookup if limits is None else np.minimum(batch.lookup, limits)
            verify_counts, use_lookup = self._prefer_lookup(
                batch.request_ids, lookup, groups, verify_counts, plan
            )
        draft, is_probe = self._k if surveyed_k is None else surveyed_k, False
        if self._is_off and surveyed_k is None and highest >= self.ladder[1]:
            probed_k = self._probes.due(plan.costs, highest)
            if probed_k:
                self._probed_k, draft, is_probe = probed_k, probed_k, True
        if surveyed_k is None and not is_probe:
            is_drafting = bool(draft or verify_counts.any())
            if self._baseline.is_due(is_drafting, plan.gain):
                draft = 0  # so that the next step has nothing to verify
        verify, explores = tuple(verify_counts.tolist()), surveyed_k is not None
        return Decision(verify, draft, is_probe, plan.gain, use_lookup, explores)

    def observe(
        self,
        outcomes: Outcomes | Sequence[DraftOutcome],
        k: int,
        seconds: float | None,
        prefill: int = 0,
        *,
        explores: bool = False,
    ) -> None:
        """Learn from a step that drafted k tokens for each request.

        `prefill`: tokens of prompts in the same step, which explain a part of its time. Plans do
        not depend on them: prompts take their time whatever is drafted. `seconds` is None if the
        step's time says nothing about its work. `explores` is that of the step's decision: such
        steps are always learnt from, also if the next step is decided already and plans.
        """
        found = outcomes if isinstance(outcomes, Outcomes) else Outcomes.of(outcomes)
        batch_size = len(found.request_ids)
        if not batch_size or (self._is_planning and not explores):
            return
        drafts = int(found.verified.sum())
        is_mixed = bool(found.verified.min() != found.verified.max())
        drafted, lookup = found.split()
        if self._is_off and self._probed_k and drafted.verified.any():
            self._observe_probe(drafted, batch_size)
        self.acceptance.observe(drafted)
        if lookup is not None:
            self._lookup_acceptance.observe(lookup)
        if seconds is not None:
            self._survey.record()
            self.costs.observe(batch_size, drafts, k, seconds, is_mixed=is_mixed, prefill=prefill)

    def forget(self, request_id: str) -> None:
        """Drop what is known about a request that has ended."""
        self.acceptance.forget(request_id)
        self._lookup_acceptance.forget(request_id)

    def _new_plan(
        self, batch_size: int, groups: Ints, limits: Ints | None, lowest: int, highest: int
    ) -> Plan:
        costs = self.costs.table(batch_size)
        survival, counts = self.acceptance.survival, self._counts(groups, limits)
        optimum = optimise(survival, counts, lowest, costs)
        if self._capacity is not None:
            for size in np.unique(self._capacity[self._capacity < batch_size]).tolist():
                # The other requests wait for another step.
                held = counts * (size / batch_size)
                bounded = optimise(survival, held, lowest, self.costs.table(size))
                rungs = self._capacity == size
                optimum.rates[rungs] = bounded.rates[rungs]
                optimum.min_survival[rungs] = bounded.min_survival[rungs]
        rung = self._choose(optimum.rates, highest)
        rate, min_survival = float(optimum.rates[rung]), float(optimum.min_survival[rung])
        lengths: Ints | None = (survival >= min_survival).sum(axis=1) if min_survival else None
        return Plan(rate, rate / float(optimum.rates[0]), lengths, costs)

    def _choose(self, rates: Floats, max_drafts: int) -> int:
        """The rung with the highest throughput; sets K."""
        rung = int(rates[: bisect_right(self.ladder, max_drafts)].argmax())
        self._k = self.ladder[rung]
        if self._k and self._is_off:
            self._probed_k = 0
            self._probes.reset()
        self._is_off = not self._k
        return rung

    def _counts(self, groups: Ints, limits: Ints | None) -> Ints:
        """[groups, drafts]: requests of each group that may verify so many drafts."""
        if limits is None:
            return np.bincount(groups, minlength=GROUPS)[:, None]
        width = self._max_drafts + 1
        found = np.bincount(groups * width + limits, minlength=GROUPS * width)
        counts: Ints = found.reshape(GROUPS, width)[:, :0:-1].cumsum(axis=1)[:, ::-1]
        return counts

    def _prefer_lookup(
        self,
        request_ids: Sequence[str],
        lookup: Ints,
        groups: Ints,
        verify: Ints,
        plan: Plan,
    ) -> tuple[Ints, tuple[bool, ...]]:
        """Replace the drafter's drafts by those from prompt lookup where more should be accepted.

        Time is valued at the tokens per second of the whole.
        """
        rate, costs = plan.rate, plan.costs
        survival, model = self.acceptance.survival[groups], self._lookup_acceptance
        found = model.survival[model.groups(request_ids)]
        per_draft = (costs.mixed[-1] - costs.mixed[0]) / (self._max_drafts * costs.batch_size)
        lookup = np.minimum(lookup, (found >= rate * per_draft).sum(axis=1))
        positions = np.arange(self._max_drafts)
        gained = (found * (positions < lookup[:, None])).sum(axis=1)
        gained -= (survival * (positions < verify[:, None])).sum(axis=1)
        use = gained > 0
        replaced = np.where(use, lookup, verify)
        if not verify.any():
            # Any verification has a cost of its own.
            seconds = float(costs.mixed_seconds(int(replaced.sum()))) - float(costs.uniform[0])
            if float(gained[use].sum()) <= rate * seconds:
                return verify, self._no_lookup
        return replaced, tuple(use.tolist())

    def _observe_probe(self, outcomes: Outcomes, batch_size: int) -> None:
        self._probed_k = 0
        accepted = int(outcomes.accepted.sum())
        rejected = int((outcomes.accepted < outcomes.verified).sum())
        self._probes.observe(accepted, accepted + rejected, self.costs.table(batch_size))


class ProbeScheduler:
    """Decides when to probe while drafting is off, and with how many drafts for each request.

    Every probe takes the next rung: short ones are cheap and therefore frequent, long ones show
    whether the drafts behind the first are better than it.
    """

    def __init__(self) -> None:
        self._rung = 0  # of the last probe
        self._steps_since_probe = 0
        self._repeats = False

    def due(self, costs: StepCostTable, max_drafts: int) -> int:
        """The K of a probe, or 0 for none now; to be called once for each step without drafts.

        `max_drafts` is at least the first rung above 0.
        """
        rung = 1 + self._rung % int((costs.ladder[1:] <= max_drafts).sum())
        self._steps_since_probe += 1
        if not self._repeats and self._steps_since_probe < self.interval(costs, rung):
            return 0
        self.reset()
        self._rung = rung
        return int(costs.ladder[rung])

    def interval(self, costs: StepCostTable, rung: int) -> int:
        cost = (costs.draft[rung] + costs.uniform[rung]) / costs.baseline - 1
        return int(cost / PROBE_TIME_SHARE)

    def observe(self, accepted: int, trials: int, costs: StepCostTable) -> None:
        """If drafting would pay by this probe alone, the next one follows at once."""
        powers = np.cumsum((accepted / trials) ** np.arange(int(costs.ladder[-1]) + 1))  # p⁰ = 1
        self._repeats = bool((powers[costs.ladder] / (costs.uniform + costs.draft)).argmax())

    def reset(self) -> None:
        """A probe is made, or drafting is on again."""
        self._steps_since_probe, self._repeats = 0, False


class BaselineProbes:
    """Decides when a bare step, which neither verifies nor drafts, is taken to learn its cost.

    As long as drafts are made, no other step shows that. If the first bare steps were slow, as on a
    server that has just started, drafts would look worth their cost for ever.
    """

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """What was measured is a single step or none: take the next ones soon, then less often."""
        self._wait = FIRST_WAIT
        self._steps = 0  # since the last bare step
        self._is_next = False

    def begin(self) -> bool:
        """Whether the step that is decided now is bare."""
        is_bare, self._is_next = self._is_next, False
        if is_bare:
            self._steps, self._wait = 0, 2 * self._wait
        return is_bare

    def is_due(self, is_drafting: bool, gain: float) -> bool:
        """Whether the next step is to be bare, for which this one should draft nothing.

        `is_drafting`: this step drafts or verifies; `gain` is the throughput over that of K = 0.
        """
        self._steps = self._steps + 1 if is_drafting else 0
        # Neither a bare step nor the one behind it has drafts to verify.
        interval = max(MIN_INTERVAL, 2 * (gain - 1) / PROBE_TIME_SHARE)
        self._is_next = self._steps >= min(self._wait, interval)
        return self._is_next


class CostSurvey:
    """Asks for one step with each K at each size of batch, so that no rung's cost is a guess."""

    def __init__(self, ladder: Sequence[int]) -> None:
        """An empty ladder: all costs are measured already."""
        self._ladder = ladder
        self._missing: dict[int, list[int]] = {}  # by size class, the next K last
        self._asked: list[int] = []  # of the size that was asked for last

    def requested_k(self, batch_size: int) -> int | None:
        """The K of the step that should be measured now; None: any."""
        self._asked = self._missing_at(batch_size)
        return self._asked[-1] if self._asked else None

    def record(self) -> None:
        """A step has been measured. What it drafted, the next one verifies.

        It may have served fewer requests than were asked for: in a pipeline, every step does.
        """
        if self._asked:
            self._asked.pop()

    def _missing_at(self, batch_size: int) -> list[int]:
        size = batch_size.bit_length()
        if size not in self._missing:
            self._missing[size] = list(reversed(self._ladder))
        return self._missing[size]
