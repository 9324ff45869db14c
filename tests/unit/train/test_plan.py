"""Expected acceptance: interpolated from a committed run, with a warning if it is too low."""

from __future__ import annotations

import json

import pytest

from leadout.train.plan import (
    MEASURED,
    MIN_USEFUL_ACCEPTANCE,
    Plan,
    blocks_for,
    expected_acceptance,
)
from support.models import ROOT


def test_expected_acceptance_is_interpolated_and_never_beyond_the_measured() -> None:
    (first, lowest), (last, highest) = MEASURED[0], MEASURED[-1]
    assert expected_acceptance(0) == 1
    assert expected_acceptance(first / 2) == pytest.approx((1 + lowest) / 2)
    between = expected_acceptance((first * MEASURED[1][0]) ** 0.5)
    assert between == pytest.approx((lowest + MEASURED[1][1]) / 2)
    assert expected_acceptance(10 * last) == highest


def test_the_measured_points_are_those_of_the_committed_run() -> None:
    found = json.loads((ROOT / "results" / "train" / "smollm2.json").read_text())
    curve, before = {}, 0
    for run in found["runs"]:
        per_step = run["settings"]["batch_sequences"] * run["settings"]["anchors"]
        steps = {p["step"]: p["acceptance_length"] for p in run["held_out_curve"]}
        curve |= {before + step * per_step: length for step, length in steps.items()}
        before += max(steps) * per_step
    for blocks, length in MEASURED:
        assert curve[int(blocks)] == pytest.approx(length, abs=0.006)
    assert MEASURED[-1][0] == before


def test_blocks_for_an_acceptance_length() -> None:
    assert expected_acceptance(blocks_for(2.0)) == pytest.approx(2.0, abs=1e-4)
    assert blocks_for(99.0) == MEASURED[-1][0]


@pytest.mark.parametrize(("expected", "warns"), [(1.1, True), (2.2, False)])
def test_a_plan_warns_of_an_acceptance_too_low_to_be_useful(expected: float, warns: bool) -> None:
    plan = Plan(
        samples=1,
        response_tokens=1,
        steps=1,
        blocks=1000,
        trained_parameters=1,
        seconds_per_step=1.0,
        seconds_for_states=1.0,
        seconds_per_validation=1.0,
        minutes=1.0,
        peak_memory_gib=1.0,
        states_on_disk_gib=0.0,
        checkpoint_gib=0.1,
        expected_acceptance_length=expected,
        expectation_from="a test",
    )
    assert (f"below about {MIN_USEFUL_ACCEPTANCE}" in plan.text()) == warns
    assert ("163 times the training: about 162,540 blocks" in plan.text()) == warns
