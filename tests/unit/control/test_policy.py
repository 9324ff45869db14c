"""Decisions: what is drafted and verified, when not, and how it finds out that it was wrong."""

import random
import time
from itertools import pairwise

import pytest

from control_simulator.simulator import Machine
from control_simulator.traffic import MACHINES
from leadout.control.acceptance_model import AcceptanceCurve, Outcome
from leadout.control.policy import (
    NOTICE_STEPS,
    PROBE_SHARE,
    Decision,
    Policy,
    Probe,
    Prober,
    Seat,
    Survey,
    spread_over,
)

MOST = 7
CPU, GPU = MACHINES["cpu"](), MACHINES["gpu"]()
HOPELESS = AcceptanceCurve.of_odds([0.02] * MOST)
GOOD = AcceptanceCurve.of_odds([0.9] * MOST)


class Loop:
    """An engine in which draft j of request r stands with `odds[r][j]`."""

    def __init__(self, policy: Policy, odds: dict[str, list[float]], caps: dict[str, int]) -> None:
        self.policy, self.odds, self.caps = policy, odds, caps
        self.machine, self.drafted = Machine(CPU), 0
        self.draws = random.Random(5)

    def step(self) -> Decision:
        seats = [Seat(name, self.drafted, self.caps.get(name, MOST)) for name in self.odds]
        decision = self.policy.decide(seats)
        outcomes = []
        for seat, tried in zip(seats, decision.verify, strict=True):
            accepted = 0
            while accepted < tried and self.draws.random() < self.odds[seat.request][accepted]:
                accepted += 1
            outcomes.append(Outcome(seat.request, tried, accepted))
        seconds = self.machine.prices(len(seats)).step[decision.draft][sum(decision.verify)]
        self.policy.observe(outcomes, decision.draft, seconds)
        self.drafted = decision.draft
        return decision

    def steps(self, count: int) -> list[Decision]:
        return [self.step() for _ in range(count)]


def loop(
    *odds: float,
    prior: AcceptanceCurve | None = None,
    caps: dict[str, int] | None = None,
) -> Loop:
    laws = {f"r{number}": [level] * MOST for number, level in enumerate(odds)}
    return Loop(Policy(MOST, CPU, prior), laws, caps or {})


def test_good_drafts_are_made_and_verified_and_hopeless_ones_are_not() -> None:
    good = loop(0.95).steps(50)
    assert good[-1].draft == MOST
    assert good[-1].verify == (MOST,)
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


def test_unverified_drafts_taken_for_refused_would_lead_to_another_choice() -> None:
    """The first draft of each request is verified, never more, and always stands."""
    told, mistaken = Policy(MOST, CPU), Policy(MOST, CPU)
    for _ in range(60):
        for policy, verified in ((told, 1), (mistaken, MOST)):
            policy.decide([Seat("a", 1, MOST)])
            policy.observe([Outcome("a", verified, 1)], 1, None)
    assert told.decide([Seat("a", MOST, MOST)]).verify == (MOST,)
    assert mistaken.decide([Seat("a", MOST, MOST)]).verify[0] <= 2


def test_copied_drafts_take_the_place_of_worse_ones_and_are_judged_apart() -> None:
    policy = Policy(MOST, CPU, GOOD)

    def step(copies_stand: bool) -> Decision:
        seats = [Seat("a", MOST, MOST, copied=5), Seat("b", MOST, MOST)]
        decision = policy.decide(seats)
        outcomes = []
        for seat, tried, is_copy in zip(seats, decision.verify, decision.copies, strict=True):
            stands = copies_stand if is_copy else seat.request == "b"
            outcomes.append(Outcome(seat.request, tried, tried if stands else 0, copied=is_copy))
        policy.observe(outcomes, decision.draft, None)
        return decision

    good = [step(copies_stand=True) for _ in range(60)][-1]
    assert good.copies == (True, False)  # a's drafts by the drafter never stand
    assert good.verify[0] == 5
    bad = [step(copies_stand=False) for _ in range(200)]
    assert sum(decision.verify[0] > 1 and decision.copies[0] for decision in bad[-50:]) <= 15
    assert policy.acceptance.survival("b")[0] > 0.9


def test_copied_drafts_are_verified_where_the_drafter_is_off() -> None:
    policy = Policy(MOST, CPU, HOPELESS)
    decision = policy.decide([Seat("a", 0, MOST, copied=4)])
    assert decision.draft == 0
    assert decision.verify == (4,)
    assert decision.copies == (True,)
    assert policy.decide([Seat("a", 0, 2, copied=4)]).verify == (2,)


def test_a_lone_copy_is_not_verified_where_any_verification_is_dear() -> None:
    policy = Policy(MOST, CPU, HOPELESS)
    batch = [f"r{number}" for number in range(16)]

    def decide(copying: int) -> Decision:
        seats = [Seat(name, 0, MOST, 4 * (place < copying)) for place, name in enumerate(batch)]
        return policy.decide(seats)

    assert sum(decide(copying=1).verify) == 4
    bare = CPU.bare_seconds(16)
    for drafts in [0, 4, 0, 7] * 40:  # any drafts make a step a third longer
        seconds = bare * (1.33 if drafts else 1.0)
        tried = [drafts, *[0] * 15]
        outcomes = [Outcome(name, n, n, copied=n > 0) for name, n in zip(batch, tried, strict=True)]
        policy.observe(outcomes, 0, seconds)
    assert sum(decide(copying=1).verify) == 0
    assert sum(decide(copying=16).verify) > 16  # together they are worth it


def test_caps_are_kept_by_every_decision() -> None:
    capped = loop(0.95, 0.95, 0.95, caps={"r0": 0, "r1": 2})
    for decision in capped.steps(300):
        assert decision.verify[0] == 0
        assert decision.verify[1] <= 2
    off = loop(0.95, 0.95, caps={"r0": 0, "r1": 0})
    assert all(decision.draft == 0 for decision in off.steps(300))
    short = loop(0.95, caps={"r0": 3})
    assert all(decision.draft <= 3 for decision in short.steps(300))


def test_never_more_is_verified_than_there_is() -> None:
    policy = Policy(MOST, GPU, GOOD)
    assert policy.decide([Seat("a", 0, MOST), Seat("b", 3, MOST)]).verify == (0, 3)


def test_a_short_list_of_probes_notices_that_traffic_became_good() -> None:
    changing = loop(0.02, 0.02)
    changing.steps(400)
    for law in changing.odds.values():
        law[:] = [0.9] * MOST
    after = changing.steps(NOTICE_STEPS + 40)
    assert after[-1].draft >= 5
    assert all(decision.draft >= 4 for decision in after[-20:] if decision.draft)
    assert sum(decision.draft > 0 for decision in after[-20:]) >= 19


def test_without_probes_the_change_would_never_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Prober, "due", lambda self, probe: False)
    changing = loop(0.02, 0.02)
    changing.steps(400)
    for law in changing.odds.values():
        law[:] = [0.9] * MOST
    assert all(decision.draft == 0 for decision in changing.steps(400))


def test_probes_take_their_share_of_the_time() -> None:
    for batch in (1, 4, 16):
        silent = loop(*[0.02] * batch)
        silent.steps(100)
        decisions = silent.steps(800)
        prices = silent.machine.prices(batch)
        spent = sum(prices.step[d.draft][sum(d.verify)] for d in decisions)
        assert spent / (len(decisions) * prices.bare) < 1 + PROBE_SHARE + 0.005
        assert sum(decision.is_probe for decision in decisions) >= 4


def test_failing_probes_become_rarer_up_to_a_bound_and_a_promise_is_followed() -> None:
    prices = Machine(CPU).prices(1)
    probe = Probe.affordable(prices, MOST)
    prober = Prober()
    first = prober.interval(probe)
    for _ in range(40):
        assert not prober.came_back(0, 1, prices)
    assert first < prober.interval(probe) <= NOTICE_STEPS
    assert not prober.due(probe)
    assert prober.came_back(MOST, MOST, prices)
    assert prober.due(probe)


def test_a_probe_goes_to_those_who_were_looked_at_least() -> None:
    assert spread_over(4, [3, 3, 3], [5.0, 0.0, 1.0]) == [0, 3, 1]
    assert spread_over(9, [2, 0], [0.0, 0.0]) == [2, 0]


@pytest.mark.parametrize("prior", [HOPELESS, GOOD], ids=["hopeless", "good"])
@pytest.mark.parametrize("odds", [0.02, 0.9])
@pytest.mark.parametrize("batch", [1, 8])
def test_a_wrong_prior_is_overcome_within_200_steps(
    prior: AcceptanceCurve, odds: float, batch: int
) -> None:
    learning = loop(*[odds] * batch, prior=prior)
    learning.steps(200)
    drafting = [decision.draft > 0 for decision in learning.steps(50)]
    assert sum(drafting) >= 45 if odds > 0.5 else sum(drafting) <= 14


def test_k_does_not_flap_between_choices_of_equal_worth() -> None:
    steady = loop(0.6, 0.6)
    steady.steps(200)
    chosen = [decision.draft for decision in steady.steps(300)]
    changes = sum(before != after for before, after in pairwise(chosen))
    assert changes <= 30  # a rare pause makes two


def test_near_break_even_it_does_not_switch_on_and_off_all_the_time() -> None:
    edge = loop(0.16)
    edge.steps(200)
    chosen = [decision.draft > 0 for decision in edge.steps(600) if not decision.is_probe]
    changes = sum(before != after for before, after in pairwise(chosen))
    assert changes <= 24


def test_without_costs_it_measures_first_and_then_decides() -> None:
    blind = Loop(Policy(MOST), {"a": [0.95] * MOST}, {})
    first = blind.steps(8)
    assert first[0].gain is None
    assert {decision.draft for decision in first} == {0, MOST}
    assert blind.steps(30)[-1].draft == MOST
    useless = Loop(Policy(MOST), {"a": [0.02] * MOST}, {})
    useless.steps(100)
    assert sum(decision.draft > 0 for decision in useless.steps(100)) < 20


def test_a_pause_now_and_then_shows_what_a_bare_step_costs() -> None:
    survey = Survey(is_needed=False)
    for _ in range(300):
        survey.saw(4, 20, MOST)
    assert survey.wanted(4, MOST) == 0
    survey.saw(4, 20, 0)  # the drafts of the step before, or copied ones
    assert survey.wanted(4, MOST) is None
    drafts = [decision.draft for decision in loop(0.95).steps(600)]
    assert 1 <= drafts[20:].count(0) <= 4


def test_while_all_read_their_prompts_drafts_are_made_as_before() -> None:
    policy = Policy(MOST)
    assert policy.decide([]) == Decision((), MOST, False, None, ())
    off = loop(0.02)
    off.steps(60)
    assert off.policy.decide([]).draft == 0
    policy.observe([], 0, 0.01)
    assert not policy.costs.known


def test_a_decision_takes_little_time() -> None:
    """The bound is for a busy machine; the figure of a quiet one is in results/control."""
    policy = Policy(MOST, CPU)
    names, drafted, spent = [str(number) for number in range(64)], 0, []
    for _ in range(60):
        start = time.process_time()
        decision = policy.decide([Seat(name, drafted, MOST) for name in names])
        spent.append(time.process_time() - start)
        outcomes = [
            Outcome(name, tried, min(tried, 4))
            for name, tried in zip(names, decision.verify, strict=True)
        ]
        policy.observe(outcomes, decision.draft, 0.1)
        drafted = decision.draft
    assert sorted(spent)[30] < 0.002
