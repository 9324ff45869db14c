"""The committed proofs of the check: the shipped pair fits, and seeded faults are found."""

import json
from typing import Any

from leadout.check.diagnosis import MAX_HALF_WIDTH
from support.models import ROOT

NO_REPAIR = {  # no edit of the drafter's files brings these back, or nothing was lost
    "mask token 2",
    "weights rounded to 4 bits",
    "a dead MLP",
    "target fine-tuned a little",
    "a drafter of another target",
    "chat template missing",
}
WORTH_FINDING = -0.02  # of the acceptance length
LONGEST = 600  # seconds


def result(name: str) -> Any:
    return json.loads((ROOT / "results" / name).read_text())


def test_the_shipped_pair_fits_and_is_served_as_the_reference_predicts() -> None:
    found = result("quickstart/check.json")
    assert found["verdict"] == "fit"
    assert found["seconds"] < LONGEST
    offline = found["offline"]["overall"]["length"]["value"]
    (served,) = [each["length"] for each in found["served"] if each["temperature"] == 0]
    assert abs(offline - served) <= 0.03 * served


def test_every_fault_that_costs_acceptance_is_found() -> None:
    faults = result("check/faults.json")["faults"]
    assert len(faults) >= 14
    for fault in faults:
        if fault["effect"] <= WORTH_FINDING:
            assert fault["named"], fault["name"]


def test_the_right_cause_is_named_first_and_its_edit_restores_acceptance() -> None:
    found = result("check/faults.json")
    faults, healthy = found["faults"], found["healthy_acceptance"]
    assert found["summary"]["right_cause_first"] >= len(faults) - 2
    assert {fault["name"] for fault in faults if fault["repaired"] is None} == NO_REPAIR
    for fault in faults:
        if fault["name"] not in NO_REPAIR:
            assert fault["repaired"] >= 0.95 * healthy, fault["name"]


def test_no_healthy_variant_raises_an_alarm() -> None:
    found = result("check/faults.json")
    assert len(found["healthy"]) >= 10
    assert found["summary"]["false_alarms"] == 0


def test_a_healthy_pair_is_never_unfit_and_a_small_drop_is_found() -> None:
    found = result("check/power.json")
    assert found["repetitions"] >= 40
    assert found["prompts"] == len(found["figures"]["texts"])
    assert found["verdict"] == "fit"
    assert found["half_width"] < MAX_HALF_WIDTH
    assert found["healthy_unfit"] == 0
    assert sum(found["healthy_verdicts"].values()) == found["repetitions"]
    assert found["drop"] == 0.05
    assert abs(found["mean_drop"] - found["drop"]) < 0.01
    assert found["drop_found"] >= 0.95 * found["repetitions"]
    assert found["false_drops"] <= 0.1 * found["repetitions"]
    assert found["few_prompts"] == 3
    verdicts = found["few_prompts_verdicts"]
    assert sum(verdicts.values()) == found["repetitions"]
    assert all(verdict.startswith("undecided") for verdict in verdicts)
