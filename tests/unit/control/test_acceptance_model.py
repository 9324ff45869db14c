"""Acceptance probabilities from what was accepted, and nothing from what was not verified."""

import random

import pytest

from leadout.control.acceptance_model import AcceptanceCurve, AcceptanceModel, DraftOutcome


def observe(model: AcceptanceModel, steps: int, *outcomes: DraftOutcome) -> None:
    for _ in range(steps):
        model.observe(outcomes)


def test_expected_tokens_follow_from_probabilities_and_from_survival() -> None:
    assert AcceptanceCurve.from_probabilities([0.5, 0.5]).tokens == (1.0, 1.5, 1.75)
    assert AcceptanceCurve.from_survival([0.5, 0.25]).tokens == (1.0, 1.5, 1.75)
    with pytest.raises(ValueError, match="begins with exactly 1 token"):
        AcceptanceCurve((1.2, 1.5))


def test_drafts_that_were_not_verified_do_not_count_as_rejected() -> None:
    """Only the first of seven is verified, and accepted: the others stay worth trying."""
    model = AcceptanceModel(7)
    observe(model, 50, DraftOutcome("a", verified=1, accepted=1))
    assert model.survival("a")[1] > 0.8
    rejected = AcceptanceModel(7)
    observe(rejected, 50, DraftOutcome("a", verified=2, accepted=1))
    assert rejected.survival("a")[1] < 0.2


def test_positions_behind_a_rejection_are_no_trials() -> None:
    model = AcceptanceModel(3, AcceptanceCurve.from_probabilities([0.9, 0.9, 0.9]))
    before = model.global_probabilities[2]
    observe(model, 3, DraftOutcome("a", verified=3, accepted=0))
    assert model.global_probabilities[0] < 0.8
    # The third was never reached: it is only shrunk towards the second, which was not either.
    assert model.global_probabilities[2] == pytest.approx(before, abs=0.05)


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
        model.observe(outcomes)
    assert model.global_probabilities == pytest.approx(probabilities, abs=0.06)


def test_requests_are_told_apart_and_new_ones_get_the_global_estimate() -> None:
    model = AcceptanceModel(2)
    observe(model, 30, DraftOutcome("good", 2, 2), DraftOutcome("bad", 2, 0))
    assert model.survival("good")[0] > 0.9
    assert model.survival("bad")[0] < 0.1
    assert 0.4 < model.survival("new")[0] < 0.6


def test_request_without_verified_drafts_slowly_returns_to_the_global_estimate() -> None:
    model = AcceptanceModel(2)
    observe(model, 30, DraftOutcome("good", 2, 2), DraftOutcome("bad", 2, 0))
    observe(model, 600, DraftOutcome("good", 2, 2), DraftOutcome("bad", 0, 0))
    assert model.survival("bad")[0] > 0.3


def test_change_of_all_traffic_is_detected_within_a_few_steps() -> None:
    model = AcceptanceModel(4)
    requests = range(8)
    observe(model, 300, *(DraftOutcome(str(request), 4, 4) for request in requests))
    assert model.survival("0")[0] > 0.9
    observe(model, 8, *(DraftOutcome(str(request), 4, 0) for request in requests))
    assert model.survival("0")[0] < 0.35
    assert model.survival("new")[0] < 0.35


def test_change_of_a_single_request_is_detected_within_a_few_steps() -> None:
    model = AcceptanceModel(5)

    def step(accepted: int) -> tuple[float, float]:
        others = [DraftOutcome(name, 5, 5) for name in ("good", "as good")]
        model.observe([DraftOutcome("changes", 5, accepted), *others])
        return model.survival("changes")[0], model.survival("good")[0]

    for _ in range(100):
        step(accepted=5)
    for _ in range(12):  # by decay alone it would take 19
        changed, other = step(accepted=0)
    assert changed < 0.3
    assert other > 0.8


def test_forgotten_request_is_a_new_one() -> None:
    model = AcceptanceModel(2)
    observe(model, 30, DraftOutcome("good", 2, 2), DraftOutcome("bad", 2, 0))
    model.forget("bad")
    assert model.survival("bad") == model.survival("new")
    assert model.trials("bad") == 0


def test_measured_curve_is_the_prior() -> None:
    curve = AcceptanceCurve.from_probabilities([0.2, 0.9])
    survival = AcceptanceModel(4, curve).survival("new")
    assert survival[0] == pytest.approx(0.2, abs=0.1)
    assert survival[3] / survival[2] > 0.7  # like the last position of the curve


@pytest.mark.parametrize(("verified", "accepted"), [(1, 2), (2, -1)])
def test_impossible_outcomes_are_rejected(verified: int, accepted: int) -> None:
    with pytest.raises(ValueError, match="expected 0 <= accepted <= verified"):
        DraftOutcome("a", verified, accepted)


def test_model_without_positions_is_rejected() -> None:
    with pytest.raises(ValueError, match="max_drafts is 0, expected 1 or more"):
        AcceptanceModel(0)
