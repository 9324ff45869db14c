"""Every seeded fault is noticed, by the rule that is meant to notice it."""

from __future__ import annotations

from pathlib import Path

import pytest

from leadout.checkpoints import CheckpointError, load_drafter
from leadout.pairing import RULES, examine
from support.faults import FAULTS, LOAD, UNDETECTABLE, Fault
from support.pairs import TARGET, served_pair

OF_PAIRS = tuple(fault for fault in FAULTS if fault.rule != LOAD)
RULE = {rule.name: rule for rule in RULES}


def names(faults: tuple[Fault, ...]) -> list[str]:
    return [fault.name for fault in faults]


@pytest.mark.parametrize("fault", FAULTS, ids=names(FAULTS))
def test_a_fault_is_named_with_its_remedy(
    fault: Fault, drafter_folder: Path, tmp_path: Path
) -> None:
    folder = fault.make(drafter_folder, tmp_path / "faulty", TARGET)
    if fault.rule == LOAD:
        with pytest.raises(CheckpointError) as caught:
            load_drafter(folder)
        assert caught.value.remedy in str(caught.value)
        assert caught.value.path.is_relative_to(folder)
        return
    load_drafter(folder)  # the file alone is in order: only the pair is not
    findings = examine(served_pair(folder, TARGET, fault.engine_arguments, fault.engine_facts))
    finding = next(finding for finding in findings if finding.name == fault.rule)
    assert finding.severity is RULE[finding.name].severity
    assert finding.message
    assert finding.remedy == RULE[finding.name].remedy
    assert str(finding) == f"{finding.name}: {finding.message}. {finding.remedy}"


@pytest.mark.parametrize("fault", OF_PAIRS, ids=names(OF_PAIRS))
def test_a_fault_is_one_thing(fault: Fault, drafter_folder: Path, tmp_path: Path) -> None:
    """No other rule answers too, so that a fault is evidence for its own rule."""
    folder = fault.make(drafter_folder, tmp_path / "faulty", TARGET)
    findings = examine(served_pair(folder, TARGET, fault.engine_arguments, fault.engine_facts))
    # A mask token beyond the target needs a vocabulary beyond the target.
    also = {"vocabulary"} if fault.rule == "mask-token" else set()
    assert {finding.name for finding in findings} - also == {fault.rule}


def test_every_rule_is_fired_by_some_fault() -> None:
    assert {fault.rule for fault in FAULTS} == {LOAD, *RULE}


def test_names_are_unique() -> None:
    assert len(set(names(FAULTS + UNDETECTABLE))) == len(FAULTS + UNDETECTABLE)
    assert len(RULE) == len(RULES)


@pytest.mark.parametrize("fault", UNDETECTABLE, ids=names(UNDETECTABLE))
def test_what_no_file_gives_away(fault: Fault, drafter_folder: Path, tmp_path: Path) -> None:
    folder = fault.make(drafter_folder, tmp_path / "faulty", TARGET)
    load_drafter(folder)
    assert examine(served_pair(folder, TARGET)) == []
