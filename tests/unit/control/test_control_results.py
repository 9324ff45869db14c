"""The committed results of live control; docs/live.md is compared with them in tests/unit/docs."""

import json
from typing import Any

from support.models import ROOT


def result(name: str) -> Any:
    return json.loads((ROOT / "results" / name).read_text())


def test_results_name_their_scripts() -> None:
    for name, script in (
        ("control/simulator.json", "simulate_control.py"),
        ("control/copying.json", "measure_copying.py"),
        ("live/smollm2.json", "measure_live.py"),
    ):
        assert result(name)["provenance"]["command"].startswith(f"python scripts/{script}")


def test_every_batch_size_was_simulated() -> None:
    cells = result("control/simulator.json")["cells"]
    for held_out in (False, True):
        fair = [c for c in cells if not c["adversary"] and c["held_out"] == held_out]
        assert {cell["batch"] for cell in fair} == {1, 2, 4, 8, 16, 32}


def test_wrong_prior_lasts_less_than_200_steps() -> None:
    found = result("control/simulator.json")["wrong_prior_steps"].values()
    assert max(steps for cells in found for steps in cells.values()) < 200


def test_decision_for_64_requests_takes_less_than_200_microseconds() -> None:
    decisions = result("control/simulator.json")["decision_microseconds"]
    assert decisions["64"]["decide_median"] < 200
