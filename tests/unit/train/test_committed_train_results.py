"""The committed results of training: resume after kills, memory, acceptance, comparisons."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from leadout.train.config import TrainConfig
from support.models import ROOT
from support.shipped_drafter import SHIPPED, SHIPPED_FOR_QWEN


def result(name: str, script: str) -> Any:
    found = json.loads((ROOT / "results" / "train" / name).read_text())
    folders = ("scripts", "experiments")
    starts = tuple(f"python {folder}/{script}" for folder in folders)
    assert found["provenance"]["command"].startswith(starts)
    return found


def test_a_run_killed_ten_times_equals_an_uninterrupted_one() -> None:
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
    assert len(set(reached)) >= 6  # at different points of the run
    assert max(reached) < found["steps"]  # and all before its end


EVALUATED = ("gsm8k", "humaneval", "mt_bench", "math500", "mbpp", "alpaca", "spec_bench")


def test_the_shipped_drafter_is_served_as_predicted() -> None:
    found = result("smollm2.json", "train_smollm2.py")
    assert tuple(found["acceptance"]) == EVALUATED
    for name, each in found["acceptance"].items():
        assert each["prompts"] >= 40, name
        assert each["difference"] < 0.03, name
        assert (
            each["predicted_interval"]["low"] < each["served"] < each["predicted_interval"]["high"]
        )
    assert found["ahead"]["difference"] < 0.03  # of a prediction for other texts


@pytest.mark.parametrize(("drafter", "most"), [(SHIPPED, 40e6), (SHIPPED_FOR_QWEN, 90e6)])
def test_the_shipped_drafters_are_small(drafter: Path, most: float) -> None:
    if not drafter.exists():
        pytest.skip("the larger drafter is not in the source distribution")
    files = [path for path in drafter.rglob("*") if path.is_file()]
    assert 0 < sum(path.stat().st_size for path in files) < most


def test_a_sharded_run_killed_ten_times_continues_on_another_number_of_ranks() -> None:
    found = result("kill_ranks.json", "train_kill.py")
    assert found["equal"] is True
    assert found["every_step_once"] is True
    assert 0 < found["largest_share_of_movement"] < found["max_share"] <= 0.01
    kills = found["kills"]
    assert [kill["ranks"] for kill in kills] == [1, 2] * 5
    reached = [kill["logged_step"] for kill in kills]
    assert len(set(reached)) >= 6
    assert max(reached) < found["steps"] == found["steps_after_kills"]


@pytest.mark.parametrize("states", ["compute", "disk"])
def test_memory_does_not_grow_with_the_data(states: str) -> None:
    found = result("memory.json", "train_memory.py")
    small, large = found["states"][states]["small"], found["states"][states]["large"]
    assert large["samples"] == 10 * small["samples"]
    assert large["steps"] > 9 * small["steps"]
    assert large["peak_mib"] < 1.1 * small["peak_mib"]
    if states == "disk":  # mapped or kept in memory, they would show
        assert large["states_mib"] > 0.2 * small["peak_mib"]


def test_with_served_states_memory_does_not_grow_with_the_target() -> None:
    """Only with embedding, head and the drafter, whose width is that of the target."""
    found = result("memory.json", "train_memory.py")["targets"]
    for each in found.values():
        elsewhere = each["weights_mib"] - each["embedding_and_head_mib"]
        assert each["compute"]["peak_mib"] - each["served"]["peak_mib"] > elsewhere
    small, large = found["SmolLM2-135M"], found["Qwen2.5-Coder-1.5B"]
    rest = [each["served"]["peak_mib"] - each["embedding_and_head_mib"] for each in (small, large)]
    assert rest[1] - rest[0] < 0.2 * (large["weights_mib"] - small["weights_mib"])


def test_random_initial_weights_learn_faster_than_target_layers() -> None:
    found = result("ablations.json", "ablate_training.py")["variants"]
    lengths = {name: each["acceptance_length"] for name, each in found.items()}
    assert lengths["from random weights"] > lengths["from target layers"] + 0.1
    assert TrainConfig().initial == "random"
    shipped = result("smollm2.json", "train_smollm2.py")["runs"][0]
    assert shipped["settings"]["initial"] == "random"
    earlier = result("from_target_layers.json", "train_smollm2.py")["runs"][0]
    assert earlier["settings"]["initial"] == "target"
    assert best_within(shipped, 600_000) > best_within(earlier, 800_000) + 0.1


def test_text_limits_a_longer_run() -> None:
    curve = result("text_limit.json", "train_text_limit.py")["curve"]
    gaps = [each["trained_on"] - each["held_out"] for each in curve]
    assert gaps == sorted(gaps)
    assert gaps[-1] > 0.5
    gains = [later["held_out"] - each["held_out"] for each, later in pairwise(curve)]
    assert gains == sorted(gains, reverse=True)


def best_within(run: Any, blocks: int) -> float:
    per_step = run["settings"]["batch_sequences"] * run["settings"]["anchors"]
    return max(
        point["acceptance_length"]
        for point in run["held_out_curve"]
        if point["step"] * per_step <= blocks
    )


def test_both_trainers_had_the_same_data_and_similar_results() -> None:
    found = result("against_speculators_one_seed.json", "compare_with_speculators.py")
    assert found["speculators"] == "0.9.0"
    arms = found["arms"]
    assert set(arms) == {
        "leadout",
        "leadout, from target layers",
        "speculators",
        "speculators, bidirectional",
    }
    for arm in arms.values():
        assert arm["steps"] == found["same"]["steps"]
        assert arm["blocks"] == pytest.approx(arms["leadout"]["blocks"], rel=0.02)
    ours, theirs = arms["leadout"], arms["speculators"]
    assert ours["acceptance_length"] == pytest.approx(theirs["acceptance_length"], rel=0.03)
    assert ours["processor_minutes"] < theirs["processor_minutes"]


def test_three_seeds_are_not_below_speculators() -> None:
    found = result("against_speculators.json", "train_against_speculators.py")
    assert found["speculators"] == "0.9.0"
    ours, theirs = found["arms"]["leadout"], found["arms"]["speculators"]
    assert set(ours) == set(theirs) == {"0", "1", "2"}
    for arm in (*ours.values(), *theirs.values()):
        assert arm["steps"] == found["same"]["steps"]
        assert arm["blocks"] == pytest.approx(ours["0"]["blocks"], rel=0.05)
        assert arm["acceptance_length"]["value"] > 1.1
    assert found["difference"]["acceptance_length"]["high"] > 0
