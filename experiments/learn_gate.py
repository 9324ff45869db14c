"""Eight prepared candidates for the gate: which pass, and why the others do not.

    python experiments/learn_gate.py --out results/learn/gate.json

Uses a tiny target whose drafter learns in seconds. Takes some minutes, because vLLM starts twice
for every candidate with valid files.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from rich.progress import track

from common import provenance
from leadout.console import Progress
from leadout.evaluate.acceptance import acceptance_by_drafter
from leadout.learn.config import CycleSettings
from leadout.learn.gate import Trial, check_lossless, compare, decide, evaluate
from support.gate_candidates import (
    CANDIDATES,
    Candidate,
    base_of,
    newest_requests,
    overfitted_part,
)
from support.learn_world import ALONE, SETTINGS_OF_FIRST, World, make_world

SETTINGS = CycleSettings()
LENGTH = SETTINGS_OF_FIRST.max_length


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        world = make_world(work / "world")
        rows = [
            row(candidate, world, work / str(number))
            for number, candidate in enumerate(track(CANDIDATES, description="candidates"))
        ]
    result = {
        "provenance": provenance(),
        "margins": SETTINGS.model_dump(include={"gain", "base_loss"}),
        "right_decisions": sum(row["passed"] == row["deserves_to_pass"] for row in rows),
        "candidates": rows,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    for each in rows:
        print(f"{each['name']:32} {'passes' if each['passed'] else '; '.join(each['reasons'])}")


def row(candidate: Candidate, world: World, folder: Path) -> dict[str, Any]:
    drafter = candidate.make(world, folder)
    trial = Trial(
        target=world.target,
        first=world.drafter,
        serving=world.drafter,
        candidate=drafter,
        held_out=newest_requests(),
        base=base_of(world),
        max_length=LENGTH,
        device=ALONE.device,
    )
    evidence = evaluate(trial, check_lossless, Progress.silent())
    decision = decide(evidence, SETTINGS)
    found: dict[str, Any] = {
        "name": candidate.name,
        "deserves_to_pass": not candidate.broken_rules,
        "passed": decision.passed,
        "reasons": [reason.replace(str(world.target), "the target") for reason in decision.reasons],
        "traffic": evidence.traffic and evidence.traffic.model_dump(),
        "base": evidence.base and evidence.base.model_dump(),
        "equal_answers": evidence.lossless and evidence.lossless.equal_texts,
    }
    if candidate.name.startswith("overfitted"):
        drafters = [world.drafter, drafter]
        before, after = acceptance_by_drafter(
            world.target, drafters, overfitted_part(), LENGTH, ALONE.device
        )
        found["on_its_training_part"] = compare(before, after).model_dump()
    return found


if __name__ == "__main__":
    main()
