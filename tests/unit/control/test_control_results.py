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
    ):
        assert result(name)["provenance"]["command"].startswith(f"python scripts/{script}")
    for name in ("ablation", "budget", "prompt_lookup"):
        command = result(f"live/{name}.json")["provenance"]["command"]
        assert command.startswith(f"python experiments/live_{name}.py")


def test_every_batch_size_was_simulated() -> None:
    cells = result("control/simulator.json")["cells"]
    for held_out in (False, True):
        fair = [c for c in cells if not c["adversary"] and c["held_out"] == held_out]
        assert {cell["batch"] for cell in fair} == {1, 2, 4, 8, 16, 32}


def test_wrong_prior_lasts_less_than_200_steps() -> None:
    found = result("control/simulator.json")["wrong_prior_steps"].values()
    assert max(steps for cells in found for steps in cells.values()) < 200


def test_time_of_live_control_was_measured_up_to_256_requests() -> None:
    """The goal of 0.3 ms at the 99th percentile is not reached; it must not get worse."""
    found = result("live/budget.json")
    cells = [cell for cell in found["cells"] if cell["requests"] == 256]
    assert {cell["kind"] for cell in cells} == {"graphs", "no graphs"}
    assert found["bound"] == 0.3
    assert found["largest_p99"] == max(cell["p99"] for cell in cells) < 3 * found["bound"]


# Removed from the policy after this result.
REMOVED = {
    "no bound on the probe interval",
    "no prior cost of a draft",
    "no wide prior of mixed steps",
}
# Runs of this length have no need of the first two; the third keeps steps in the captured graphs
# until leaving them was measured, whatever the simulated machines lose by that.
KEPT = {"no process noise", "no reset after outliers", "no prior cost of leaving the graphs"}


def test_what_gains_under_1_percent_in_the_simulator_is_removed_or_has_another_reason() -> None:
    found = result("live/ablation.json")
    assert found["complete"]
    assert found["bound"] == 0.01
    useless = {name for name, row in found["variants"].items() if row["cost"] < found["bound"]}
    assert useless == REMOVED | KEPT
    code = (ROOT / "experiments" / "live_ablation.py").read_text()
    assert not any(f'"{name}"' in code for name in REMOVED)
