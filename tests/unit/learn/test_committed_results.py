"""The committed results of learning: gains, little forgetting, no errors, little overhead."""

import json
from typing import Any

from leadout.learn.config import CycleSettings
from support.models import ROOT


def result(name: str, script: str, folder: str = "scripts/") -> Any:
    found = json.loads((ROOT / "results" / "learn" / name).read_text())
    assert found["provenance"]["command"].startswith(f"python {folder}{script}")
    return found


def test_ten_swaps_under_load_changed_no_answer_and_failed_no_request() -> None:
    found = result("swaps.json", "learn_swaps.py", "experiments/")
    assert found["swaps"] >= 10
    assert found["clients"] == 8
    assert found["failed_requests"] == found["changed_answers"] == 0
    assert found["answers"] > found["clients"]


def test_the_gate_decided_correctly_on_every_prepared_candidate() -> None:
    found = result("gate.json", "gate_candidates.py")
    candidates = found["candidates"]
    assert found["right_decisions"] == len(candidates) == 8
    assert [each["passed"] for each in candidates].count(True) == 1
    (overfitted,) = [each for each in candidates if each["name"].startswith("overfitted")]
    assert overfitted["on_its_training_part"]["change"]["low"] > found["margins"]["gain"]


def test_the_gate_bounds_the_total_loss_over_ten_cycles() -> None:
    found = result("gate_cycles.json", "gate_cycles.py", "experiments/")
    result("gate_noise.json", "gate_noise.py", "experiments/")
    defaults = CycleSettings().model_dump(include=set(found["settings"]))
    assert found["settings"] == defaults  # it was simulated with today's defaults
    assert found["cycles"] == 10
    assert found["repetitions"]["losing"] >= 200
    assert found["loss_each_cycle"] == 0.02
    assert found["sequences_measured"]["base"] >= 80
    today, before, estimates = (
        found["losing"][gate] for gate in ("today", "before", "point estimates")
    )
    limit = -found["settings"]["base_loss"]
    assert today["total_base_change"]["0.025"] >= limit
    assert today["worst"] >= 2 * limit
    assert before["total_base_change"]["0.5"] < 3 * limit  # there, losses add up
    assert estimates["total_base_change"]["0.5"] < 3 * limit


def test_the_gate_has_the_power_to_pass_candidates_without_loss() -> None:
    found = result("gate_cycles.json", "gate_cycles.py", "experiments/")
    assert min(found["equal_on_base"]["pass_rate_by_cycle"]) >= 0.9
    rates = {
        each["held_out"]: each["rate"] for each in found["pass_rates"] if each["gate"] == "today"
    }
    assert rates[max(rates)] >= 0.9


def test_the_overhead_of_capture_is_within_the_noise() -> None:
    found = result("capture.json", "learn_capture.py", "experiments/")
    for arm in ("capture", "refusing disk"):
        assert found["ratio"][arm]["pairs"] >= 20
        assert found["ratio"][arm]["high"] >= 1  # no significant loss
        assert sum(found["share_of_the_time"][arm].values()) < 0.02
    assert found["samples_on_disk"] > 0


def test_handing_out_states_costs_little() -> None:
    found = result("states_cost.json", "learn_states_cost.py", "")
    limits = {"0.1": 0.02, "1.0": 0.05}
    for share, limit in limits.items():
        ratio = found["throughput_ratio"][share]
        assert ratio["pairs"] >= 10
        assert ratio["high"] >= 1  # no significant loss
        assert found["share_of_time_in_tap"][share] < limit / 2
    for each in found["readers"].values():  # killed, paused and slow
        assert each["throughput"]["low"] <= 1 <= each["throughput"]["high"]


def test_a_learner_on_the_ring_is_as_good_as_one_on_files_and_faster() -> None:
    found = result("states.json", "learn_states.py", "experiments/")
    assert (
        found["throughput_ratio"]
        == result("states_cost.json", "learn_states_cost.py", "")["throughput_ratio"]
    )
    assert found["failed_requests"] == 0
    assert len(found["compared"]) >= 2
    for kind, compared in found["compared"].items():
        change = compared["acceptance_change"]
        assert change["low"] <= 0 <= change["high"] or change["value"] > 0
        assert compared["share_of_time_to_swap"]["median"] <= 0.6
        numbers = []
        for arm in ("files", "ring"):
            rows = found[arm][kind]
            assert all(row["change"]["low"] > 0 for row in rows)
            numbers.append([row["cycle_number"] for row in rows])
        assert numbers[0] == numbers[1]  # the same seeds
        assert len(set(numbers[0])) == 3
        for files, ring in zip(found["files"][kind], found["ring"][kind], strict=True):
            # No target, and no engine that compares answers.
            assert (
                ring["memory_bytes"]["with its processes"]
                < files["memory_bytes"]["with its processes"]
            )


def test_a_continuous_learner_follows_drifting_traffic_and_forgets_little() -> None:
    found = result("drift.json", "learn_drift.py", "experiments/")
    assert found["failed_requests"] == 0
    assert found["swaps"] >= 1
    assert found["change"]["low"] > 0
    assert found["base_change"]["high"] >= -found["base_loss_bound"]
