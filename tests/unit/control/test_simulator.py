"""The policy against an oracle, on a part of the grid that results/control holds whole."""

import pytest

from control_simulator.simulator import Machine, run_bare, run_oracle, run_policy
from control_simulator.traffic import (
    HELD_OUT,
    MACHINES,
    MOST,
    PROCESSES,
    Moment,
    Process,
    level,
    recorded,
)
from leadout.control.acceptance_model import AcceptanceCurve
from leadout.control.cost_model import StepCosts
from leadout.control.policy import Policy

CLOCK = 1500.0
BY_NAME = {process.name: process for process in PROCESSES}
FAIR = [process for process in PROCESSES if not process.watches]
# Which batch sizes a process is tried with: each process with two, each size with many.
# Where single cells stay below 0.97 (results/control/simulator.json): one changes as fast as it can
# be learnt, the other tells by the first draft alone.
HARD = {"fast drift": 0.955, "all or nothing 0.3": 0.955}
CELLS = [
    (process, batch)
    for number, process in enumerate(FAIR)
    for batch in ((1, 8), (2, 16), (4, 1))[number % 3]
]


def test_there_are_twenty_kinds_of_traffic_with_names_of_their_own() -> None:
    assert len(FAIR) >= 20
    assert len(BY_NAME) == len(PROCESSES)
    assert not set(BY_NAME) & {process.name for process in HELD_OUT}


@pytest.mark.parametrize(
    ("process", "batch"), CELLS, ids=[f"{process.name}, {batch}" for process, batch in CELLS]
)
def test_the_policy_comes_near_the_oracle(process: Process, batch: int) -> None:
    costs = MACHINES["cpu"]()
    machine = Machine(costs)
    found = run_policy(Policy(MOST, costs), process, machine, batch, CLOCK)
    bound = HARD.get(process.name, 0.97)
    assert found.rate >= bound * run_oracle(process, machine, batch, CLOCK).rate


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("process", [p for p in PROCESSES if p.watches], ids=lambda p: p.name)
def test_an_adversary_may_win_but_not_below_bare(process: Process, batch: int) -> None:
    costs = MACHINES["cpu"]()
    machine = Machine(costs)
    found = run_policy(Policy(MOST, costs), process, machine, batch, 1000.0)
    assert found.rate >= 0.94 * run_bare(process, machine, batch, 1000.0).rate


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("factor", [None, 0.6, 1.7])
def test_costs_unknown_or_wrong_are_learnt_on_the_way(name: str, factor: float | None) -> None:
    truth = MACHINES[name]()
    start = None
    if factor is not None:
        # Drafting is thought to be dearer or cheaper than it is, against a right bare step.
        start = StepCosts(
            verify=truth.verify,
            draft={b: {k: factor * s for k, s in row.items()} for b, row in truth.draft.items()},
        )
    machine, process = Machine(truth), BY_NAME["three kinds"]
    found = run_policy(Policy(MOST, start), process, machine, 4, 1000.0)
    assert found.rate >= 0.96 * run_oracle(process, machine, 4, 1000.0).rate


def test_the_bound_fails_for_a_policy_that_does_not_adapt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "leadout.control.acceptance_model.Acceptance.observe", lambda self, outcomes: None
    )
    costs = MACHINES["cpu"]()
    machine, process = Machine(costs), BY_NAME["steady, hopeless"]
    stubborn = Policy(MOST, costs, AcceptanceCurve.of_odds([0.9] * MOST))
    found = run_policy(stubborn, process, machine, 8, CLOCK)
    assert found.rate < 0.9 * run_oracle(process, machine, 8, CLOCK).rate


def test_the_oracle_is_no_worse_than_any_fixed_k() -> None:
    machine = Machine(MACHINES["cpu"]())
    process = BY_NAME["steady 0.6"]
    best = run_oracle(process, machine, 4, CLOCK).rate
    survival, fixed = 1.0, [4 / machine.prices(4).bare]
    tokens = 1.0
    for k, odds in enumerate(level(0.6), start=1):
        survival *= odds
        tokens += survival
        fixed.append(4 * tokens / machine.prices(4).step[k][4 * k])
    assert best >= 0.998 * max(fixed)  # its first step has no drafts to verify


def test_recorded_traffic_follows_the_record() -> None:
    record = recorded("two requests", [[7] * 40, [0] * 40])
    laws = {
        record.law(Moment(clock, seat))[0] > 0.5 for clock in range(0, 2000, 50) for seat in (0, 1)
    }
    assert laws == {True, False}
    costs = MACHINES["cpu"]()
    machine = Machine(costs)
    found = run_policy(Policy(MOST, costs), record, machine, 2, CLOCK)
    assert found.rate >= 0.95 * run_oracle(record, machine, 2, CLOCK).rate
    with pytest.raises(ValueError, match="request without steps"):
        recorded("empty", [[1], []])
