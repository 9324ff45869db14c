"""When to probe, whom to probe, and which costs to measure."""

from control_simulator.simulator import Machine
from control_simulator.traffic import MACHINES, MAX_DRAFTS
from leadout.control.exploration import (
    MAX_PROBE_INTERVAL,
    CostExploration,
    Probe,
    ProbeScheduler,
    allocate_probe,
)

COSTS = Machine(MACHINES["cpu"]()).table(1)


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
