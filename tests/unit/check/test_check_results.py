"""The committed proofs of the check: the shipped pair fits, and seeded faults are found."""

import json
from typing import Any

from support.models import ROOT

WORTH_FINDING = -0.02  # of the acceptance length
LONGEST = 360  # seconds


def result(name: str) -> Any:
    return json.loads((ROOT / "results" / "check" / name).read_text())


def test_the_shipped_pair_fits_and_is_served_as_the_reference_predicts() -> None:
    found = result("smollm2.json")
    assert found["verdict"] == "fit"
    assert found["seconds"] < LONGEST
    offline = found["offline"]["overall"]["length"]["value"]
    (served,) = [each["length"] for each in found["served"] if each["temperature"] == 0]
    assert abs(offline - served) <= 0.03 * served


def test_every_fault_that_costs_acceptance_is_found() -> None:
    faults = result("faults.json")["faults"]
    assert len(faults) >= 14
    for fault in faults:
        if fault["effect"] <= WORTH_FINDING:
            assert fault["named"], fault["name"]


def test_the_right_cause_is_named_first_and_its_edit_restores_acceptance() -> None:
    found = result("faults.json")
    faults, healthy = found["faults"], found["healthy_acceptance"]
    assert found["summary"]["right_cause_first"] >= len(faults) - 2
    repairable = [f for f in faults if f["repaired"] is not None and f["cause"] != "weights-dead"]
    assert len(repairable) >= 8
    for fault in repairable:
        assert fault["repaired"] >= 0.95 * healthy, fault["name"]


def test_no_healthy_variant_raises_an_alarm() -> None:
    found = result("faults.json")
    assert len(found["healthy"]) >= 10
    assert found["summary"]["false_alarms"] == 0
