"""Acceptance in vLLM must agree with the prediction."""

from __future__ import annotations

from pathlib import Path

import pytest

from leadout.train import export


def served_acceptance(served_length: float, predicted: float) -> export.ServedAcceptance:
    return export.ServedAcceptance(
        prompts=1,
        max_tokens=1,
        draft_tokens=1,
        served=served_length,
        served_by_position=[],
        served_steps=10,
        predicted=predicted,
        predicted_steps=10,
    )


@pytest.mark.parametrize("predicted", [1.89, 2.11])
def test_served_and_predicted_acceptance_may_differ_by_five_percent(predicted: float) -> None:
    with pytest.raises(export.ServedDiffersError, match=r"differ by 5\.5%, expected at most 5%"):
        export.require_agreement(served_acceptance(2.0, predicted), Path("d"))
    export.require_agreement(served_acceptance(2.0, 1.91), Path("d"))
