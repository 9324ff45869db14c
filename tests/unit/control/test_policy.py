"""Decisions of the policy in a simulated engine: what is drafted, verified and explored."""

import random
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from control_simulator.simulator import Machine
from control_simulator.traffic import MACHINES, MAX_DRAFTS
from leadout.control.acceptance_model import AcceptanceCurve, DraftOutcome, Outcomes
from leadout.control.cost_model import StepCosts
from leadout.control.policy import (
    LARGE_BATCH,
    MIN_INTERVAL,
    PROBE_TIME_SHARE,
    BaselineProbes,
    Batch,
    CostSurvey,
    Decision,
    DecodingRequest,
    Policy,
    ProbeScheduler,
    ladder_up_to,
)

CPU, GPU = MACHINES["cpu"].costs(), MACHINES["gpu"].costs()
HOPELESS = AcceptanceCurve.from_probabilities([0.02] * MAX_DRAFTS)
GOOD = AcceptanceCurve.from_probabilities([0.9] * MAX_DRAFTS)


class Loop:
    """An engine that accepts draft j of request r with probability `acceptance[r][j]`."""

    def __init__(
        self,
        policy: Policy,
        acceptance: dict[str, list[float]],
        limits: dict[str, int] | None = None,
        machine: str = "cpu",
        prefill: int = 0,
    ) -> None:
        self.policy, self.acceptance, self.limits = policy, acceptance, limits or {}
        self.machine, self.drafted, self.prefill = Machine(MACHINES[machine]), 0, prefill
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
        seconds = self.machine.seconds(decision.draft, decision.verify, self.prefill)
        self.policy.observe(outcomes, decision.draft, seconds, self.prefill)
        self.drafted = decision.draft
        return decision

    def steps(self, count: int) -> list[Decision]:
        return [self.step() for _ in range(count)]


def loop(
    *acceptance: float, prior: AcceptanceCurve | None = None, limits: dict[str, int] | None = None
) -> Loop:
    requests = {f"r{number}": [each] * MAX_DRAFTS for number, each in enumerate(acceptance)}
    return Loop(Policy(MAX_DRAFTS, CPU, prior), requests, limits)


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
    (group,) = policy.acceptance.groups(["b"])
    assert policy.acceptance.survival[group, 0] > 0.9


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
    after = changing.steps(240)
    assert after[-1].draft >= 5
    assert all(decision.draft >= 4 for decision in after[-20:] if decision.draft)
    assert sum(decision.draft > 0 for decision in after[-20:]) >= 19


def test_without_probes_the_change_is_never_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ProbeScheduler, "due", lambda self, costs, max_drafts: 0)
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
        spent = sum(idle.machine.seconds(d.draft, d.verify) for d in decisions)
        baseline = idle.machine.table(batch).baseline
        assert spent / (len(decisions) * baseline) < 1 + PROBE_TIME_SHARE + 0.005
        assert sum(decision.is_probe for decision in decisions) >= 4


# Each machine with and without known costs, and nightly with each batch size.
USELESS = [
    pytest.param(machine, batch, has_costs, marks=() if is_always else pytest.mark.nightly)
    for machine in MACHINES
    for batch in (1, 4, 8, 16)
    for has_costs in (True, False)
    for is_always in [(batch, has_costs) in {(8, True), (1, False)}]
]


@pytest.mark.parametrize(("machine", "batch", "has_costs"), USELESS)
def test_useless_drafts_cost_little(machine: str, batch: int, has_costs: bool) -> None:
    """Compared with steps that only keep the drafter's context, which no policy can avoid."""
    simulated = Machine(MACHINES[machine])
    policy = simulated.policy(simulated.costs if has_costs else None)
    requests = {f"r{number}": [0.0] * MAX_DRAFTS for number in range(batch)}
    decisions = Loop(policy, requests, machine=machine).steps(3000)
    spent = sum(simulated.seconds(each.draft, each.verify) for each in decisions)
    assert len(decisions) * simulated.table(batch).baseline >= 0.985 * spent


def share_drafting_after_a_slow_start(machine: str, batch: int) -> float:
    """Of steps long after the first bare one, which took twice as long as it should."""
    requests = {f"r{number}": [0.0] * MAX_DRAFTS for number in range(batch)}
    cold = Loop(Machine(MACHINES[machine]).policy(), requests, machine=machine)
    seconds, noise = cold.machine.seconds, random.Random(0)
    factors = iter([2.0])

    def slow_at_first(k: int, verify: Sequence[int], prefill: int = 0) -> float:
        factor = next(factors, 1.0) * max(0.5, noise.gauss(1, 0.08))
        return factor * seconds(k, verify, prefill)

    cold.machine.seconds = slow_at_first  # type: ignore[method-assign]
    cold.steps(400)
    return sum(decision.draft > 0 for decision in cold.steps(200)) / 200


@pytest.mark.parametrize("batch", [1, 4, 16])
@pytest.mark.parametrize("machine", MACHINES)
def test_a_slow_start_does_not_make_useless_drafts_look_worth_their_cost(
    machine: str, batch: int
) -> None:
    assert share_drafting_after_a_slow_start(machine, batch) < 0.15


def test_without_bare_steps_a_slow_start_is_never_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(BaselineProbes, "is_due", lambda self, is_drafting, gain: False)
    assert share_drafting_after_a_slow_start("cpu", 1) == 1.0


def test_bare_steps_stay_within_their_share_of_the_time() -> None:
    fast = loop(0.9)
    fast.steps(400)
    decisions = fast.steps(2000)
    tokens = sum(1 + sum(0.9**place for place in range(1, d.verify[0] + 1)) for d in decisions)
    spent = sum(fast.machine.seconds(d.draft, d.verify) for d in decisions)
    best = 1 + sum(0.9**place for place in range(1, MAX_DRAFTS + 1))
    fastest = best / fast.machine.seconds(MAX_DRAFTS, (MAX_DRAFTS,))
    assert tokens / spent > (1 - 1.5 * PROBE_TIME_SHARE) * fastest
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


def test_without_measured_costs_the_policy_measures_each_rung_first() -> None:
    blind = Loop(Policy(MAX_DRAFTS), {"a": [0.95] * MAX_DRAFTS})
    first = blind.steps(MAX_DRAFTS + 1)
    assert first[0].gain is None
    assert [decision.draft for decision in first] == list(range(MAX_DRAFTS + 1))
    assert sum(decision.draft == MAX_DRAFTS for decision in blind.steps(30)[10:]) >= 14
    useless = Loop(Policy(MAX_DRAFTS), {"a": [0.02] * MAX_DRAFTS})
    useless.steps(100)
    assert sum(decision.draft > 0 for decision in useless.steps(100)) < 20


LADDER = MACHINES["graphs"].ladder


def on_graphs(*acceptance: float, prefill: int = 0) -> Loop:
    """An engine with a captured graph for each K of the ladder, whose costs are not known."""
    requests = {f"r{number}": [each] * MAX_DRAFTS for number, each in enumerate(acceptance)}
    policy = Policy(MAX_DRAFTS, ladder=LADDER, has_graphs=True)
    return Loop(policy, requests, machine="graphs", prefill=prefill)


@pytest.mark.parametrize("acceptance", [(0.9,) * 8, (0.5,) * 8, (0.9, 0.1, 0.5, 0.7), (0.02,) * 3])
def test_with_graphs_all_requests_verify_the_same_rung(acceptance: tuple[float, ...]) -> None:
    for decision in on_graphs(*acceptance).steps(400):
        assert decision.draft in LADDER
        assert len(set(decision.verify)) == 1
        assert decision.verify[0] in LADDER


def test_without_graphs_requests_of_the_same_batch_verify_different_numbers() -> None:
    free = Loop(Policy(MAX_DRAFTS), {"good": [0.9] * MAX_DRAFTS, "bad": [0.05] * MAX_DRAFTS})
    assert len(set(free.steps(100)[-1].verify)) == 2


def test_graphs_are_left_once_steps_outside_them_turn_out_cheap() -> None:
    """A request with a limit of its own makes steps mixed, which shows what they cost."""
    acceptance = {"good": [0.97] * MAX_DRAFTS, "too": [0.97] * MAX_DRAFTS}
    acceptance |= {"bad": [0.02] * MAX_DRAFTS, "bad too": [0.02] * MAX_DRAFTS}
    policy = Policy(MAX_DRAFTS, CPU, ladder=LADDER, has_graphs=True)
    before = Loop(policy, acceptance)  # a CPU: leaving the graphs costs nothing
    assert len(set(before.steps(100)[-1].verify)) == 1
    before.limits = {"too": 2}
    before.steps(100)
    before.limits = {}
    after = before.steps(50)[-1]
    assert min(after.verify[:2]) == MAX_DRAFTS
    assert max(after.verify[2:]) <= 1


def test_longer_drafts_are_chosen_where_they_cost_less_than_shorter_ones() -> None:
    """On this machine, 2 and 5 drafts take longer than 3 and 7."""
    chosen = [decision.draft for decision in on_graphs(*[0.6] * 4).steps(300)[50:]]
    assert chosen.count(3) + chosen.count(7) > 0.9 * len(chosen)


@pytest.mark.parametrize("machine", MACHINES)
def test_with_prefill_in_every_step_good_drafts_are_made(machine: str) -> None:
    model = MACHINES[machine]
    policy = Policy(MAX_DRAFTS, ladder=model.ladder, has_graphs=model.has_graphs)
    requests = {f"r{number}": [1.0] * MAX_DRAFTS for number in range(4)}
    permanent = Loop(policy, requests, machine=machine, prefill=512)
    decisions = permanent.steps(1000)
    assert sum(decision.draft > 0 for decision in decisions) >= 0.9 * len(decisions)


def test_prefill_does_not_make_drafts_worth_their_cost() -> None:
    """The time of a prompt is the same whatever is drafted, so it is no reason to draft."""
    requests = {f"r{number}": [0.3] * MAX_DRAFTS for number in range(16)}
    drafting = []
    for prefill in (0, 512):
        decisions = Loop(Policy(MAX_DRAFTS, CPU), requests, prefill=prefill).steps(600)[100:]
        drafting.append(sum(decision.draft > 0 for decision in decisions) / len(decisions))
    assert max(drafting) < 0.1


def test_without_the_time_of_steps_with_prefill_nothing_is_drafted() -> None:
    policy = Policy(MAX_DRAFTS)
    requests = [DecodingRequest("a", 0, MAX_DRAFTS)]
    for _ in range(100):
        assert policy.decide(requests).draft == 0
        policy.observe([DraftOutcome("a", 0, 0)], 0, None, prefill=512)


@pytest.mark.parametrize(
    ("max_drafts", "ladder"),
    [
        (1, (0, 1)),
        (2, (0, 2)),
        (4, (0, 4)),
        (7, (0, 1, 3, 7)),
        (9, (0, 1, 4, 9)),
        (11, (0, 2, 5, 11)),
        (15, (0, 1, 3, 7, 15)),
    ],
)
def test_ladder_has_few_rungs(max_drafts: int, ladder: tuple[int, ...]) -> None:
    assert ladder_up_to(max_drafts) == ladder
    assert all((1 + max_drafts) % (1 + k) == 0 for k in ladder)


def test_bare_steps_are_learnt_from_where_the_next_step_is_decided_before() -> None:
    """With async scheduling, and so many requests that steps plan and learn in turns."""
    policy = Policy(7, costs=CPU, ladder=ladder_up_to(7), prior=GOOD)
    learnt: list[tuple[int, int]] = []  # drafts verified and drafted
    observe = policy.costs.observe

    def note(batch: int, drafts: int, k: int, seconds: float, **rest: Any) -> None:
        learnt.append((drafts, k))
        observe(batch, drafts, k, seconds, **rest)

    policy.costs.observe = note  # type: ignore[method-assign]
    names, drafted = [str(number) for number in range(LARGE_BATCH)], 0
    in_flight: Decision | None = None
    for _ in range(4 * MIN_INTERVAL):
        decided = policy.decide(Batch(names, np.full(LARGE_BATCH, drafted)))
        drafted = decided.draft
        if in_flight is not None:
            verified = np.array(in_flight.verify)
            outcomes = Outcomes(names, verified, verified)
            policy.observe(outcomes, in_flight.draft, 0.01, explores=in_flight.explores)
        in_flight = decided
    assert (0, 0) in learnt
    assert any(drafts for drafts, _ in learnt)


@pytest.mark.parametrize(("capacity", "chosen"), [(None, 15), ((128, 120, 107, 89, 66), 3)])
def test_k_is_that_of_the_steps_that_fit(capacity: tuple[int, ...] | None, chosen: int) -> None:
    """A step of 2,048 tokens holds fewer requests with larger K; what it costs is the same here."""
    batch, ladder = 256, ladder_up_to(15)
    acceptance = AcceptanceCurve.from_probabilities([0.6] * 15)
    flat = dict.fromkeys(range(16), 0.01)
    costs = StepCosts({1: flat, batch: flat}, {1: dict.fromkeys(range(16), 0.0)})
    policy = Policy(15, costs, acceptance, ladder=ladder, has_graphs=True, capacity=capacity)
    names = [str(number) for number in range(batch)]
    assert policy.decide(Batch(names, np.full(batch, 15))).draft == chosen


def test_ladder_must_end_at_the_largest_k() -> None:
    with pytest.raises(ValueError, match=r"the ladder is \(0, 3\), expected to end at 7"):
        Policy(MAX_DRAFTS, ladder=(0, 3))


def test_k_is_kept_while_all_requests_are_in_prefill() -> None:
    policy = Policy(MAX_DRAFTS)
    assert policy.decide([]) == Decision((), MAX_DRAFTS, False, None, ())
    off = loop(0.02)
    off.steps(60)
    assert off.policy.decide([]).draft == 0
    policy.observe([], 0, 0.01)
    assert not policy.costs.has_estimate


# Where counting takes 0.6 ms, the limit is somewhat above the 1.5 ms that a step had before.
MAX_COUNTS = 3


def test_step_of_256_requests_takes_little_time() -> None:
    """Compared with counting in Python, which any machine that is slow at the time does slowly.

    What was measured is in results/live/budget.json.
    """
    policy = Policy(15, ladder=ladder_up_to(15), has_graphs=True)
    names, drafted, spent, counted = [str(number) for number in range(256)], 0, [], []
    available = np.zeros(256, np.int64)
    for _ in range(60):
        start = time.process_time()
        sum(number % 7 for number in range(10_000))
        counted.append(time.process_time() - start)
        start = time.process_time()
        decision = policy.decide(Batch(names, available + drafted))
        verified = np.array(decision.verify)
        policy.observe(Outcomes(names, verified, np.minimum(verified, 4)), decision.draft, 0.02)
        spent.append(time.process_time() - start)
        drafted = decision.draft
    assert min(spent[10:]) < MAX_COUNTS * min(counted)


COSTS = Machine(MACHINES["cpu"]).table(1)


def test_failing_probes_are_rare_and_a_success_is_repeated() -> None:
    probes = ProbeScheduler()
    interval = probes.interval(COSTS, 1)
    assert 1 < interval < probes.interval(COSTS, MAX_DRAFTS)
    assert [probes.due(COSTS, MAX_DRAFTS) for _ in range(interval)] == [0] * (interval - 1) + [1]
    probes.observe(0, 1, COSTS)
    assert not probes.due(COSTS, MAX_DRAFTS)
    probes.observe(1, 1, COSTS)
    assert probes.due(COSTS, MAX_DRAFTS) == 2
    assert not probes.due(COSTS, MAX_DRAFTS)


def test_probes_take_every_rung_up_to_the_limit() -> None:
    probes, asked = ProbeScheduler(), []
    for _ in range(5):
        probes.observe(1, 1, COSTS)
        asked.append(probes.due(COSTS, 3))
    assert asked == [1, 2, 3, 1, 2]


def test_bare_steps_come_less_often_with_time() -> None:
    probes, bare = BaselineProbes(), []
    for step in range(1000):
        if probes.begin():
            bare.append(step)
        else:
            probes.is_due(True, 1.5)
    gaps = [after - before for before, after in pairwise(bare)]
    assert gaps[:4] == [9, 17, 33, 65]
    assert set(gaps[5:]) == {1 + 2 * 0.5 / PROBE_TIME_SHARE}
    probes.restart()  # what follows is a size of batch that is new
    assert [probes.begin() or probes.is_due(True, 1.5) for _ in range(4)] == [False] * 3 + [True]


def test_a_step_without_drafts_counts_as_a_bare_one() -> None:
    probes = BaselineProbes()
    for _ in range(100):
        assert not probes.is_due(True, 1.5)
        assert not probes.is_due(False, 1.5)


def test_survey_asks_for_each_rung_once_at_each_size() -> None:
    survey = CostSurvey((0, 1, 7))
    asked = []
    for _ in range(3):
        asked.append(survey.requested_k(4))
        survey.record()
    assert asked == [0, 1, 7]
    assert survey.requested_k(4) is None
    assert survey.requested_k(9) == 0
    assert CostSurvey(()).requested_k(4) is None
