"""The expected acceptance length, and what it says about paying at measured costs."""

from __future__ import annotations

import json

import pytest

from leadout.make.expected import (
    CURVE_DRAFTS,
    LEARNING_CURVE,
    curve_with_length,
    expectation,
    expected_lengths,
)
from support.models import ROOT
from support.tuned_files import a_tuning

COSTS = a_tuning([0.0] * 7)  # a step with K drafts takes 1.1 + 0.05 K at one request


def test_the_curve_is_the_committed_one() -> None:
    (run,) = json.loads((ROOT / "results" / "train" / "smollm2.json").read_text())["runs"]
    settings = run["settings"]
    assert settings["block_size"] - 1 == CURVE_DRAFTS
    per_step = settings["batch_sequences"] * settings["anchors"]
    committed = []
    for point in run["held_out_curve"]:
        lengths = point["by_source"].values()
        committed.append((point["step"] * per_step, round(min(lengths), 2), round(max(lengths), 2)))
    assert [tuple(point) for point in LEARNING_CURVE] == committed


def test_lengths_between_before_and_after_the_points() -> None:
    first, second, *_, last = LEARNING_CURVE
    assert expected_lengths(first.blocks) == (first.low, first.high)
    low, high = expected_lengths((first.blocks * second.blocks) ** 0.5)
    assert low == pytest.approx((first.low + second.low) / 2)
    assert high == pytest.approx((first.high + second.high) / 2)
    # A halving of the blocks costs what their doubling gained.
    half_low, half_high = expected_lengths(first.blocks / 2)
    assert half_low == pytest.approx(2 * first.low - second.low)
    assert half_high == pytest.approx(2 * first.high - second.high)
    assert expected_lengths(100 * last.blocks) == (last.low, last.high)
    assert expected_lengths(10) == expected_lengths(0) == (1.0, 1.0)


@pytest.mark.parametrize("length", [1.0, 1.5, 2.3, 5.0])
def test_a_curve_has_the_length_that_was_asked_for(length: float) -> None:
    curve = curve_with_length(length, CURVE_DRAFTS)
    assert curve.tokens[CURVE_DRAFTS] == pytest.approx(length, abs=1e-6)
    shorter = curve_with_length(length, 3)
    assert shorter.tokens == pytest.approx(curve.tokens[:4])


def test_enough_blocks_are_expected_to_pay() -> None:
    found = expectation(2_000_000, COSTS)
    assert (found.outcome, found.stops) == ("pays", False)
    assert (found.low, found.high) == (1.89, 3.18)
    first = found.loads[0]
    assert first.concurrency == 1
    assert first.break_even == pytest.approx(1.1 + 0.05 * first.draft_tokens)
    assert "is expected to pay" in found.sentence()
    assert "not a measurement" in found.sentence()


def test_expensive_drafts_are_not_expected_to_pay() -> None:
    found = expectation(2_000_000, a_tuning([0.0] * 7, per_draft=1.0))
    assert (found.outcome, found.stops) == ("does not pay", True)
    assert "not expected to pay at any measured load" in found.sentence()


def test_no_training_is_not_expected_to_pay() -> None:
    assert expectation(0, COSTS).stops


def test_between_both_ends_nothing_is_decided() -> None:
    # The best case accepts 0.70 of the first drafts, the worst 0.47; break-even is 1.6 with K = 1.
    found = expectation(2_000_000, a_tuning([0.0] * 7, per_draft=0.5))
    assert (found.outcome, found.stops) == ("undecided", False)
    assert "may or may not pay" in found.sentence()
