"""The committed proofs: ten kills change nothing, and ten times the data takes no more memory."""

import json
from typing import Any

import pytest

from support.models import ROOT


def result(name: str, script: str) -> Any:
    found = json.loads((ROOT / "results" / "train" / name).read_text())
    assert found["provenance"]["command"].startswith(f"python scripts/{script}")
    return found


def test_ten_kills_left_the_weights_of_an_undisturbed_run() -> None:
    found = result("kill.json", "kill_train.py")
    assert found["equal"] is True
    assert found["every_step_once"] is True
    assert found["steps"] == found["steps_after_kills"] > 300
    assert found["largest_difference_in_state.safetensors"] < 1e-4
    assert found["largest_difference_in_best.safetensors"] < 1e-4
    kills = found["kills"]
    assert len(kills) == 10
    assert sum("training" in kill["after"] for kill in kills) == 8
    reached = [kill["logged_step"] for kill in kills]
    assert len(set(reached)) >= 6  # they came at different places of the run
    assert max(reached) < found["steps"]  # and all before its end


@pytest.mark.parametrize("states", ["compute", "disk"])
def test_ten_times_the_data_takes_no_more_memory(states: str) -> None:
    found = result("memory.json", "measure_train_memory.py")
    small, large = found["states"][states]["small"], found["states"][states]["large"]
    assert large["samples"] == 10 * small["samples"]
    assert large["steps"] > 9 * small["steps"]
    assert large["peak_mib"] < 1.1 * small["peak_mib"]
    if states == "disk":  # mapped or kept in memory, they would show
        assert large["states_mib"] > 0.2 * small["peak_mib"]
