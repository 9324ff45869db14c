"""Decisions of the policy in a simulated engine: what is drafted, verified and explored."""

import random
import time
from itertools import pairwise

import pytest

from control_simulator.simulator import Machine
from control_simulator.traffic import MACHINES, MAX_DRAFTS
from leadout.control.acceptance_model import AcceptanceCurve, DraftOutcome
from leadout.control.policy import (
    MAX_PROBE_INTERVAL,
    PROBE_TIME_SHARE,
    CostExploration,
    Decision,
    DecodingRequest,
    Policy,
    Probe,
    ProbeScheduler,
    allocate_probe,
)

CPU, GPU = MACHINES["cpu"](), MACHINES["gpu"]()
HOPELESS = AcceptanceCurve.from_probabilities([0.02] * MAX_DRAFTS)
GOOD = AcceptanceCurve.from_probabilities([0.9] * MAX_DRAFTS)


class Loop:
    """An engine that accepts draft j of request r with probability `acceptance[r][j]`."""

    def __init__(
        self, policy: Policy, acceptance: dict[str, list[float]], limits: dict[str, int]
    ) -> None:
        self.policy, self.acceptance, self.limits = policy, acceptance, limits
        self.machine, self.drafted = Machine(CPU), 0
        self.rng = random.Random(5)

    def step(self) -> Decision:
        requests = [
            DecodingRequest(name, self.drafted, self.limits.get(name, MAX_DRAFTS))
            for name in self.acceptance
        ]
        decision = self.policy.decide(requests)
        outcomes = []
        for request, verified in zip(requests, decision.verify, strict=True):
            accepted = 0
            while (
                accepted < verified
                and self.rng.random() < self.acceptance[request.request_id][accepted]
            ):
                accepted += 1
            outcomes.append(DraftOutcome(request.request_id, verified, accepted))
        seconds = self.machine.table(len(requests)).step[decision.draft][sum(decision.verify)]
        self.policy.observe(outcomes, decision.draft, seconds)
        self.drafted = decision.draft
        return decision

    def steps(self, count: int) -> list[Decision]:
        return [self.step() for _ in range(count)]


def loop(
    *acceptance: float, prior: AcceptanceCurve | None = None, limits: dict[str, int] | None = None
) -> Loop:
    requests = {f"r{number}": [each] * MAX_DRAFTS for number, each in enumerate(acceptance)}
    return Loop(Policy(MAX_DRAFTS, CPU, prior), requests, limits or {})


def test_good_drafts_are_made_and_verified_and_hopeless_ones_are_not() -> None:
    good = loop(0.95).steps(50)
    assert good[-1].draft == MAX_DRAFTS
    assert good[-1].verify == (MAX_DRAFTS,)
    assert good[-1].gain is not None
    assert good[-1].gain > 2
    hopeless = loop(0.02).steps(200)
    assert sum(decision.draft > 0 for decision in hopeless[50:]) < 20
    assert hopeless[-1].gain == 1.0


def test_of_two_requests_the_better_one_gets_the_drafts() -> None:
    both = loop(0.95, 0.05).steps(120)[-1]
    assert both.draft >= 5
    assert both.verify[0] >= 5
    assert both.verify[1] <= 2


def test_counting_unverified_drafts_as_rejected_would_change_the_choice() -> None:
    """The first draft of each request is verified, never more, and always accepted."""
    right, wrong = Policy(MAX_DRAFTS, CPU), Policy(MAX_DRAFTS, CPU)
    for _ in range(60):
        for policy, verified in ((right, 1), (wrong, MAX_DRAFTS)):
            policy.decide([DecodingRequest("a", 1, MAX_DRAFTS)])
            policy.observe([DraftOutcome("a", verified, 1)], 1, None)
    assert right.decide([DecodingRequest("a", MAX_DRAFTS, MAX_DRAFTS)]).verify == (MAX_DRAFTS,)
    assert wrong.decide([DecodingRequest("a", MAX_DRAFTS, MAX_DRAFTS)]).verify[0] <= 2


def test_lookup_drafts_replace_worse_ones_and_have_an_estimate_of_their_own() -> None:
    policy = Policy(MAX_DRAFTS, CPU, GOOD)

    def step(lookup_accepted: bool) -> Decision:
        requests = [
            DecodingRequest("a", MAX_DRAFTS, MAX_DRAFTS, lookup=5),
            DecodingRequest("b", MAX_DRAFTS, MAX_DRAFTS),
        ]
        decision = policy.decide(requests)
        outcomes = []
        for request, verified, is_lookup in zip(
            requests, decision.verify, decision.use_lookup, strict=True
        ):
            is_good = lookup_accepted if is_lookup else request.request_id == "b"
            outcomes.append(
                DraftOutcome(
                    request.request_id, verified, verified if is_good else 0, from_lookup=is_lookup
                )
            )
        policy.observe(outcomes, decision.draft, None)
        return decision

    good = [step(lookup_accepted=True) for _ in range(60)][-1]
    assert good.use_lookup == (True, False)  # a's drafts by the drafter are never accepted
    assert good.verify[0] == 5
    bad = [step(lookup_accepted=False) for _ in range(200)]
    assert sum(decision.verify[0] > 1 and decision.use_lookup[0] for decision in bad[-50:]) <= 15
    assert policy.acceptance.survival("b")[0] > 0.9


def test_lookup_drafts_are_verified_while_drafting_is_off() -> None:
    policy = Policy(MAX_DRAFTS, CPU, HOPELESS)
    decision = policy.decide([DecodingRequest("a", 0, MAX_DRAFTS, lookup=4)])
    assert decision.draft == 0
    assert decision.verify == (4,)
    assert decision.use_lookup == (True,)
    assert policy.decide([DecodingRequest("a", 0, 2, lookup=4)]).verify == (2,)


def test_single_lookup_draft_is_not_verified_where_any_verification_is_expensive() -> None:
    policy = Policy(MAX_DRAFTS, CPU, HOPELESS)
    batch = [f"r{number}" for number in range(16)]

    def decide(with_lookup: int) -> Decision:
        requests = [
            DecodingRequest(name, 0, MAX_DRAFTS, 4 * (index < with_lookup))
            for index, name in enumerate(batch)
        ]
        return policy.decide(requests)

    assert sum(decide(with_lookup=1).verify) == 4
    bare = CPU.bare_seconds(16)
    for drafts in [0, 4, 0, 7] * 40:  # any drafts make a step a third longer
        seconds = bare * (1.33 if drafts else 1.0)
        verified = [drafts, *[0] * 15]
        outcomes = [
            DraftOutcome(name, n, n, from_lookup=n > 0)
            for name, n in zip(batch, verified, strict=True)
        ]
        policy.observe(outcomes, 0, seconds)
    assert sum(decide(with_lookup=1).verify) == 0
    assert sum(decide(with_lookup=16).verify) > 16  # together they are worth it


def test_limits_of_requests_are_kept_by_every_decision() -> None:
    limited = loop(0.95, 0.95, 0.95, limits={"r0": 0, "r1": 2})
    for decision in limited.steps(300):
        assert decision.verify[0] == 0
        assert decision.verify[1] <= 2
    off = loop(0.95, 0.95, limits={"r0": 0, "r1": 0})
    assert all(decision.draft == 0 for decision in off.steps(300))
    short = loop(0.95, limits={"r0": 3})
    assert all(decision.draft <= 3 for decision in short.steps(300))


def test_no_more_drafts_are_verified_than_available() -> None:
    policy = Policy(MAX_DRAFTS, GPU, GOOD)
    assert policy.decide(
        [DecodingRequest("a", 0, MAX_DRAFTS), DecodingRequest("b", 3, MAX_DRAFTS)]
    ).verify == (0, 3)


def test_probes_notice_that_traffic_became_good() -> None:
    changing = loop(0.02, 0.02)
    changing.steps(400)
    for probabilities in changing.acceptance.values():
        probabilities[:] = [0.9] * MAX_DRAFTS
    after = changing.steps(MAX_PROBE_INTERVAL + 40)
    assert after[-1].draft >= 5
    assert all(decision.draft >= 4 for decision in after[-20:] if decision.draft)
    assert sum(decision.draft > 0 for decision in after[-20:]) >= 19


def test_without_probes_the_change_is_never_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ProbeScheduler, "is_due", lambda self, probe: False)
    changing = loop(0.02, 0.02)
    changing.steps(400)
    for probabilities in changing.acceptance.values():
        probabilities[:] = [0.9] * MAX_DRAFTS
    assert all(decision.draft == 0 for decision in changing.steps(400))


def test_probes_stay_within_their_share_of_the_time() -> None:
    for batch in (1, 4, 16):
        idle = loop(*[0.02] * batch)
        idle.steps(100)
        decisions = idle.steps(800)
        costs = idle.machine.table(batch)
        spent = sum(costs.step[d.draft][sum(d.verify)] for d in decisions)
        assert spent / (len(decisions) * costs.baseline) < 1 + PROBE_TIME_SHARE + 0.005
        assert sum(decision.is_probe for decision in decisions) >= 4


@pytest.mark.parametrize("prior", [HOPELESS, GOOD], ids=["hopeless", "good"])
@pytest.mark.parametrize("acceptance", [0.02, 0.9])
@pytest.mark.parametrize("batch", [1, 8])
def test_wrong_prior_is_overcome_within_200_steps(
    prior: AcceptanceCurve, acceptance: float, batch: int
) -> None:
    learning = loop(*[acceptance] * batch, prior=prior)
    learning.steps(200)
    drafting = [decision.draft > 0 for decision in learning.steps(50)]
    assert sum(drafting) >= 45 if acceptance > 0.5 else sum(drafting) <= 14


def test_k_does_not_flap_between_equally_good_choices() -> None:
    steady = loop(0.6, 0.6)
    steady.steps(200)
    chosen = [decision.draft for decision in steady.steps(300)]
    changes = sum(before != after for before, after in pairwise(chosen))
    assert changes <= 30  # a rare step without drafts makes two


def test_drafting_does_not_flap_near_break_even() -> None:
    edge = loop(0.16)
    edge.steps(200)
    chosen = [decision.draft > 0 for decision in edge.steps(600) if not decision.is_probe]
    changes = sum(before != after for before, after in pairwise(chosen))
    assert changes <= 24


def test_without_measured_costs_the_policy_measures_first() -> None:
    blind = Loop(Policy(MAX_DRAFTS), {"a": [0.95] * MAX_DRAFTS}, {})
    first = blind.steps(8)
    assert first[0].gain is None
    assert {decision.draft for decision in first} == {0, MAX_DRAFTS}
    assert blind.steps(30)[-1].draft == MAX_DRAFTS
    useless = Loop(Policy(MAX_DRAFTS), {"a": [0.02] * MAX_DRAFTS}, {})
    useless.steps(100)
    assert sum(decision.draft > 0 for decision in useless.steps(100)) < 20


def test_rare_step_without_drafts_measures_the_baseline() -> None:
    drafts = [decision.draft for decision in loop(0.95).steps(600)]
    assert 1 <= drafts[20:].count(0) <= 4


def test_k_is_kept_while_all_requests_are_in_prefill() -> None:
    policy = Policy(MAX_DRAFTS)
    assert policy.decide([]) == Decision((), MAX_DRAFTS, False, None, ())
    off = loop(0.02)
    off.steps(60)
    assert off.policy.decide([]).draft == 0
    policy.observe([], 0, 0.01)
    assert not policy.costs.has_estimate


def test_decision_takes_little_time() -> None:
    """The bound is for a busy machine; the figure of a quiet one is in results/control."""
    policy = Policy(MAX_DRAFTS, CPU)
    names, drafted, spent = [str(number) for number in range(64)], 0, []
    for _ in range(60):
        start = time.process_time()
        decision = policy.decide([DecodingRequest(name, drafted, MAX_DRAFTS) for name in names])
        spent.append(time.process_time() - start)
        outcomes = [
            DraftOutcome(name, verified, min(verified, 4))
            for name, verified in zip(names, decision.verify, strict=True)
        ]
        policy.observe(outcomes, decision.draft, 0.1)
        drafted = decision.draft
    assert sorted(spent)[30] < 0.002


COSTS = Machine(CPU).table(1)


def test_failing_probes_become_rarer_up_to_a_bound_and_a_success_is_repeated() -> None:
    probe = Probe.affordable(COSTS, MAX_DRAFTS)
    probes = ProbeScheduler()
    first = probes.interval(probe)
    for _ in range(40):
        assert not probes.probe_succeeded(0, 1, COSTS)
    assert first < probes.interval(probe) <= MAX_PROBE_INTERVAL
    assert not probes.is_due(probe)
    assert probes.probe_succeeded(MAX_DRAFTS, MAX_DRAFTS, COSTS)
    assert probes.is_due(probe)


def test_probe_goes_to_the_requests_with_the_fewest_trials() -> None:
    assert allocate_probe(4, [3, 3, 3], [5.0, 0.0, 1.0]) == [0, 3, 1]
    assert allocate_probe(9, [2, 0], [0.0, 0.0]) == [2, 0]


def test_step_without_drafts_is_requested_now_and_then() -> None:
    exploration = CostExploration(has_measured_costs=True)
    for _ in range(300):
        exploration.record(4, 20, MAX_DRAFTS)
    assert exploration.requested_k(4, MAX_DRAFTS) == 0
    exploration.record(4, 20, 0)  # the drafts of the step before, or those of prompt lookup
    assert exploration.requested_k(4, MAX_DRAFTS) is None


def test_without_measured_costs_both_kinds_of_steps_are_requested_first() -> None:
    exploration = CostExploration(has_measured_costs=False)
    requested = []
    for _ in range(4):
        k = exploration.requested_k(4, MAX_DRAFTS)
        assert k is not None
        requested.append(k)
        exploration.record(4, k, k)
    assert requested == [0, 0, MAX_DRAFTS, MAX_DRAFTS]
    assert exploration.requested_k(4, MAX_DRAFTS) is None
