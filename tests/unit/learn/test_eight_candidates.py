"""Of eight prepared candidates the gate passes the one that deserves it, and says why of each."""

from __future__ import annotations

from pathlib import Path

import pytest

from leadout.console import Progress
from leadout.evaluate.compare import acceptance_by_drafter
from leadout.learn.gate import Margins, Trial, compare, decide, gather
from support.gate_candidates import (
    CANDIDATES,
    Candidate,
    base_of,
    newest_requests,
    overfitted_part,
)
from support.learn_world import ALONE, World, prove_by_reference

MARGINS = Margins(gain=0.03, base_loss=0.03)


@pytest.mark.parametrize("candidate", CANDIDATES, ids=lambda candidate: candidate.name)
def test_the_gate_judges_each_as_it_deserves(
    candidate: Candidate, world: World, tmp_path: Path
) -> None:
    trial = Trial(
        target=world.target,
        serving=world.drafter,
        candidate=candidate.make(world, tmp_path),
        held_out=newest_requests(),
        base=base_of(world),
        max_length=64,
        device=ALONE.device,
    )
    decision = decide(gather(trial, prove_by_reference, Progress.silent()), MARGINS)
    assert decision.passed is (not candidate.blamed), decision.reasons
    if candidate.blamed:
        for reason in decision.reasons:
            assert reason.startswith(candidate.blamed), decision.reasons
        for start in candidate.blamed:  # all of them, not only the first
            assert any(reason.startswith(start) for reason in decision.reasons), decision.reasons


def test_the_overfitted_one_looks_better_on_its_own_text(world: World, tmp_path: Path) -> None:
    (overfitted,) = (each for each in CANDIDATES if each.name.startswith("overfitted"))
    drafters = [world.drafter, overfitted.make(world, tmp_path)]
    before, after = acceptance_by_drafter(
        world.target, drafters, overfitted_part(), 64, ALONE.device
    )
    assert compare(before, after).change.low > 0.3
