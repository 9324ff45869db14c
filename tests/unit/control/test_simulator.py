"""The policy compared with an oracle, on a part of the grid in results/control."""

import pytest

from control_simulator.simulator import Machine, run_bare, run_oracle, run_policy
from control_simulator.traffic import (
    HELD_OUT_TRAFFIC,
    MACHINES,
    MAX_DRAFTS,
    TUNING_TRAFFIC,
    Moment,
    Traffic,
    level,
    recorded,
)
from leadout.control.acceptance_model import AcceptanceCurve
from leadout.control.cost_model import StepCosts

CLOCK = 1500.0
BY_NAME = {traffic.name: traffic for traffic in TUNING_TRAFFIC}
ADVERSARIES = [traffic for traffic in TUNING_TRAFFIC if traffic.is_adversary]
FAIR = [traffic for traffic in TUNING_TRAFFIC if not traffic.is_adversary]
# In single cells; on average it is nearer (results/control/simulator.json).
BOUND = 0.945
# Every second kind of traffic with one batch size; nightly all of them with two.
CELLS = [
    pytest.param(
        traffic,
        size,
        id=f"{traffic.name}, {size}",
        marks=() if number % 2 == 0 and size == sizes[0] else pytest.mark.nightly,
    )
    for number, traffic in enumerate(FAIR)
    for sizes in [((1, 8), (16, 2), (4, 1))[number % 3]]
    for size in sizes
]


def test_there_are_at_least_twenty_kinds_of_traffic_with_unique_names() -> None:
    assert len(FAIR) >= 20
    assert len(BY_NAME) == len(TUNING_TRAFFIC)
    assert not set(BY_NAME) & {traffic.name for traffic in HELD_OUT_TRAFFIC}


@pytest.mark.parametrize(("traffic", "batch_size"), CELLS)
def test_policy_comes_near_the_oracle(traffic: Traffic, batch_size: int) -> None:
    machine = Machine(MACHINES["cpu"])
    found = run_policy(machine.policy(machine.costs), traffic, machine, batch_size, CLOCK)
    share = found.rate / run_oracle(traffic, machine, batch_size, CLOCK).rate
    assert share >= BOUND


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("traffic", ADVERSARIES, ids=lambda traffic: traffic.name)
def test_loss_to_an_adversary_is_bounded(traffic: Traffic, batch_size: int) -> None:
    machine = Machine(MACHINES["cpu"])
    found = run_policy(machine.policy(machine.costs), traffic, machine, batch_size, 1000.0)
    assert found.rate >= 0.94 * run_bare(traffic, machine, batch_size, 1000.0).rate


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("factor", [None, 0.6, 1.7])
def test_unknown_or_wrong_costs_are_learnt_on_the_way(name: str, factor: float | None) -> None:
    machine = Machine(MACHINES[name])
    truth = machine.costs
    start = None
    if factor is not None:
        # Drafting seems more or less expensive than it is, next to right costs of verifying.
        start = StepCosts(
            verify=truth.verify,
            draft={b: {k: factor * s for k, s in row.items()} for b, row in truth.draft.items()},
        )
    traffic = BY_NAME["three kinds"]
    found = run_policy(machine.policy(start), traffic, machine, 4, 1000.0)
    assert found.rate >= 0.96 * run_oracle(traffic, machine, 4, 1000.0).rate


def test_policy_that_does_not_adapt_misses_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "leadout.control.acceptance_model.AcceptanceModel.observe", lambda self, outcomes: None
    )
    machine, traffic = Machine(MACHINES["cpu"]), BY_NAME["steady, hopeless"]
    good = AcceptanceCurve.from_probabilities([0.9] * MAX_DRAFTS)
    fixed = machine.policy(machine.costs, good)
    found = run_policy(fixed, traffic, machine, 8, CLOCK)
    assert found.rate < 0.9 * run_oracle(traffic, machine, 8, CLOCK).rate


def test_oracle_is_no_worse_than_any_fixed_k() -> None:
    machine = Machine(MACHINES["cpu"])
    traffic = BY_NAME["steady 0.6"]
    best = run_oracle(traffic, machine, 4, CLOCK).rate
    survival, fixed = 1.0, [4 / machine.table(4).baseline]
    tokens = 1.0
    for k, probability in enumerate(level(0.6), start=1):
        survival *= probability
        tokens += survival
        fixed.append(4 * tokens / machine.seconds(k, [k] * 4))
    assert best >= 0.998 * max(fixed)  # its first step has no drafts to verify


def test_recorded_traffic_follows_the_record() -> None:
    record = recorded("two requests", [[7] * 40, [0] * 40])
    is_good = {
        record.acceptance(Moment(clock, slot))[0] > 0.5
        for clock in range(0, 2000, 50)
        for slot in (0, 1)
    }
    assert is_good == {True, False}
    machine = Machine(MACHINES["cpu"])
    found = run_policy(machine.policy(machine.costs), record, machine, 2, CLOCK)
    assert found.rate >= 0.95 * run_oracle(record, machine, 2, CLOCK).rate
    with pytest.raises(ValueError, match="every request needs at least one step"):
        recorded("empty", [[1], []])
