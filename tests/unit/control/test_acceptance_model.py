"""Acceptance probabilities from what was accepted, and nothing from what was not verified."""

import random

import pytest

from leadout.control.acceptance_model import (
    AcceptanceCurve,
    AcceptanceModel,
    DraftOutcome,
    Outcomes,
)


def observe(model: AcceptanceModel, steps: int, *outcomes: DraftOutcome) -> None:
    for _ in range(steps):
        model.groups([outcome.request_id for outcome in outcomes])
        model.observe(Outcomes.of(outcomes))


def survival(model: AcceptanceModel, request_id: str) -> list[float]:
    found: list[float] = model.survival[model.groups([request_id])[0]].tolist()
    return found


def test_expected_tokens_follow_from_probabilities_and_from_survival() -> None:
    assert AcceptanceCurve.from_probabilities([0.5, 0.5]).tokens == (1.0, 1.5, 1.75)
    assert AcceptanceCurve.from_survival([0.5, 0.25]).tokens == (1.0, 1.5, 1.75)
    with pytest.raises(ValueError, match="begins with exactly 1 token"):
        AcceptanceCurve((1.2, 1.5))


def test_drafts_that_were_not_verified_do_not_count_as_rejected() -> None:
    """Only the first of seven is verified, and accepted: the others stay worth trying."""
    model = AcceptanceModel(7)
    observe(model, 50, DraftOutcome("a", verified=1, accepted=1))
    assert survival(model, "a")[1] > 0.8
    rejected = AcceptanceModel(7)
    observe(rejected, 50, DraftOutcome("a", verified=2, accepted=1))
    assert survival(rejected, "a")[1] < 0.2


def test_positions_behind_a_rejection_are_no_trials() -> None:
    def third(accepted: int) -> float:
        """The probability of the third draft, given that the second was accepted."""
        model = AcceptanceModel(3, AcceptanceCurve.from_probabilities([0.9, 0.9, 0.9]))
        observe(model, 10, DraftOutcome("a", verified=3, accepted=accepted))
        found = survival(model, "a")
        return found[2] / found[1]

    assert third(accepted=2) < 0.3
    assert third(accepted=0) > 0.6  # never reached


def test_estimates_converge_to_the_true_probabilities() -> None:
    rng, probabilities = random.Random(1), (0.9, 0.6, 0.3)
    model = AcceptanceModel(3)
    for _ in range(400):
        outcomes = []
        for request in range(8):
            accepted = 0
            while accepted < 3 and rng.random() < probabilities[accepted]:
                accepted += 1
            outcomes.append(DraftOutcome(str(request), 3, accepted))
        observe(model, 1, *outcomes)
    found = model.survival[model.groups([str(request) for request in range(8)])].mean(axis=0)
    assert found == pytest.approx((0.9, 0.54, 0.162), abs=0.06)


def test_requests_are_told_apart_and_new_ones_get_the_global_estimate() -> None:
    model = AcceptanceModel(2)
    observe(model, 30, DraftOutcome("good", 2, 2), DraftOutcome("bad", 2, 0))
    assert survival(model, "good")[0] > 0.9
    assert survival(model, "bad")[0] < 0.1
    assert 0.4 < survival(model, "new")[0] < 0.6


def test_request_without_verified_drafts_slowly_returns_to_the_global_estimate() -> None:
    model = AcceptanceModel(2)
    observe(model, 30, DraftOutcome("good", 2, 2), DraftOutcome("bad", 2, 0))
    observe(model, 600, DraftOutcome("good", 2, 2), DraftOutcome("bad", 0, 0))
    assert survival(model, "bad")[0] > 0.3


def test_change_of_all_traffic_is_learnt_within_a_few_steps() -> None:
    model = AcceptanceModel(4)
    requests = range(8)
    observe(model, 300, *(DraftOutcome(str(request), 4, 4) for request in requests))
    assert survival(model, "0")[0] > 0.9
    observe(model, 8, *(DraftOutcome(str(request), 4, 0) for request in requests))
    assert survival(model, "0")[0] < 0.35
    assert survival(model, "new")[0] < 0.35


def test_change_of_a_single_request_is_learnt_within_a_few_steps() -> None:
    model = AcceptanceModel(5)

    def step(accepted: int) -> tuple[float, float]:
        others = [DraftOutcome(name, 5, 5) for name in ("good", "as good")]
        observe(model, 1, DraftOutcome("changes", 5, accepted), *others)
        return survival(model, "changes")[0], survival(model, "good")[0]

    for _ in range(100):
        step(accepted=5)
    for _ in range(20):
        changed, other = step(accepted=0)
    assert changed < 0.4
    assert other > 0.8


def test_forgotten_request_is_a_new_one() -> None:
    model = AcceptanceModel(2)
    observe(model, 30, DraftOutcome("good", 2, 2), DraftOutcome("bad", 2, 0))
    model.forget("bad")
    assert survival(model, "bad") == survival(model, "new")


def test_what_arrives_for_an_ended_request_is_not_kept() -> None:
    model = AcceptanceModel(2)
    model.groups(["a", "good"])
    model.forget("a")
    for _ in range(20):  # outputs of steps that were in flight
        model.observe(Outcomes.of([DraftOutcome("a", 2, 0), DraftOutcome("good", 2, 2)]))
    ended, new, good = model.groups(["a", "new", "good"])
    assert ended == new < good


def test_many_requests_have_estimates_of_their_own() -> None:
    model = AcceptanceModel(3)
    names = [f"r{number}" for number in range(300)]
    for _ in range(30):
        model.groups(names)
        model.observe(
            Outcomes.of(DraftOutcome(name, 3, 3 * (n % 3 == 0)) for n, name in enumerate(names))
        )
    found = model.survival[model.groups(names), 0]
    assert found[::3].min() > 0.8
    assert found[1::3].max() < 0.2


def test_measured_curve_is_the_prior() -> None:
    curve = AcceptanceCurve.from_probabilities([0.2, 0.9])
    found = survival(AcceptanceModel(4, curve), "new")
    assert found[0] == pytest.approx(0.2, abs=0.1)
    assert found[3] / found[2] > 0.7  # like the last position of the curve


def test_lucky_requests_do_not_make_drafts_seem_good() -> None:
    """One draft in five is accepted, by chance: those who were lucky are not better."""
    rng, model = random.Random(2), AcceptanceModel(1)
    names = [str(number) for number in range(16)]
    for _ in range(200):
        observe(model, 1, *(DraftOutcome(name, 1, int(rng.random() < 0.2)) for name in names))
    groups = model.groups(names)
    assert groups.max() > groups.min()  # scores differ
    assert model.survival[groups.max(), 0] < 0.35


@pytest.mark.parametrize(("verified", "accepted"), [(1, 2), (2, -1)])
def test_impossible_outcomes_are_rejected(verified: int, accepted: int) -> None:
    with pytest.raises(ValueError, match="expected 0 <= accepted <= verified"):
        Outcomes.of([DraftOutcome("a", verified, accepted)])


def test_model_without_positions_is_rejected() -> None:
    with pytest.raises(ValueError, match="max_drafts is 0, expected 1 or more"):
        AcceptanceModel(0)
