"""Odds of drafts from what was accepted, and nothing from what was not verified."""

import random

import pytest

from leadout.control.acceptance_model import Acceptance, AcceptanceCurve, Outcome


def tell(acceptance: Acceptance, steps: int, *outcomes: Outcome) -> None:
    for _ in range(steps):
        acceptance.observe(outcomes)


def test_drafts_that_were_not_verified_are_not_taken_for_refused() -> None:
    """Only the first of seven is verified and stands: the others stay worth trying."""
    acceptance = Acceptance(7)
    tell(acceptance, 50, Outcome("a", verified=1, accepted=1))
    assert acceptance.survival("a")[1] > 0.8
    refused = Acceptance(7)
    tell(refused, 50, Outcome("a", verified=2, accepted=1))
    assert refused.survival("a")[1] < 0.2


def test_positions_behind_a_refusal_teach_nothing() -> None:
    acceptance = Acceptance(3, AcceptanceCurve.of_odds([0.9, 0.9, 0.9]))
    before = acceptance.traffic_odds[2]
    tell(acceptance, 3, Outcome("a", verified=3, accepted=0))
    assert acceptance.traffic_odds[0] < 0.8
    # The third was never reached: it only leans on the second, which was not either.
    assert acceptance.traffic_odds[2] == pytest.approx(before, abs=0.05)


def test_estimates_find_the_odds_they_were_drawn_from() -> None:
    draws, odds = random.Random(1), (0.9, 0.6, 0.3)
    acceptance = Acceptance(3)
    for _ in range(400):
        outcomes = []
        for request in range(8):
            accepted = 0
            while accepted < 3 and draws.random() < odds[accepted]:
                accepted += 1
            outcomes.append(Outcome(str(request), 3, accepted))
        acceptance.observe(outcomes)
    assert acceptance.traffic_odds == pytest.approx(odds, abs=0.06)


def test_two_kinds_of_requests_are_told_apart_and_newcomers_lean_on_all() -> None:
    acceptance = Acceptance(2)
    tell(acceptance, 30, Outcome("good", 2, 2), Outcome("bad", 2, 0))
    assert acceptance.survival("good")[0] > 0.9
    assert acceptance.survival("bad")[0] < 0.1
    assert 0.4 < acceptance.survival("new")[0] < 0.6


def test_a_request_without_verified_drafts_slowly_becomes_like_the_others_again() -> None:
    acceptance = Acceptance(2)
    tell(acceptance, 30, Outcome("good", 2, 2), Outcome("bad", 2, 0))
    tell(acceptance, 600, Outcome("good", 2, 2), Outcome("bad", 0, 0))
    assert acceptance.survival("bad")[0] > 0.3


def test_a_change_of_all_traffic_is_believed_within_a_few_steps() -> None:
    acceptance = Acceptance(4)
    everyone = range(8)
    tell(acceptance, 300, *(Outcome(str(request), 4, 4) for request in everyone))
    assert acceptance.survival("0")[0] > 0.9
    tell(acceptance, 8, *(Outcome(str(request), 4, 0) for request in everyone))
    assert acceptance.survival("0")[0] < 0.35
    assert acceptance.survival("new")[0] < 0.35


def test_a_single_request_that_changes_is_believed_within_a_few_steps() -> None:
    acceptance = Acceptance(5)

    def step(accepted: int) -> tuple[float, float]:
        others = [Outcome(name, 5, 5) for name in ("good", "as good")]
        acceptance.observe([Outcome("changes", 5, accepted), *others])
        return acceptance.survival("changes")[0], acceptance.survival("good")[0]

    for _ in range(100):
        step(accepted=5)
    for _ in range(12):  # by fading alone it would take 19
        changed, other = step(accepted=0)
    assert changed < 0.3
    assert other > 0.8


def test_a_forgotten_request_is_a_newcomer() -> None:
    acceptance = Acceptance(2)
    tell(acceptance, 30, Outcome("good", 2, 2), Outcome("bad", 2, 0))
    acceptance.forget("bad")
    assert acceptance.survival("bad") == acceptance.survival("new")
    assert acceptance.looks("bad") == 0


def test_a_measured_curve_is_the_first_belief() -> None:
    curve = AcceptanceCurve.of_odds([0.2, 0.9])
    survival = Acceptance(4, curve).survival("new")
    assert survival[0] == pytest.approx(0.2, abs=0.1)
    assert survival[3] / survival[2] > 0.7  # like the last that the curve knows


@pytest.mark.parametrize(("verified", "accepted"), [(1, 2), (2, -1)])
def test_impossible_outcomes_are_refused(verified: int, accepted: int) -> None:
    with pytest.raises(ValueError, match="wanted 0 <= accepted <= verified"):
        Outcome("a", verified, accepted)


def test_no_position_is_refused() -> None:
    with pytest.raises(ValueError, match="found 0 draft positions"):
        Acceptance(0)
