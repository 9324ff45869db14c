"""Prompts that the drafter was trained on are noticed, and left out if enough others remain."""

from __future__ import annotations

from pathlib import Path

from leadout.check.seen_prompts import MIN_OTHERS, select, without_seen
from leadout.data.prompt_record import NAME, PromptRecord
from leadout.findings import Severity

PROMPTS = {
    "chat": [[number, 1] for number in range(MIN_OTHERS)],
    "math": [[number, 2] for number in range(3)],
}


def test_training_prompts_are_left_out(tmp_path: Path) -> None:
    PromptRecord.of([*PROMPTS["math"], [99, 99]]).write(tmp_path)
    left, (found,) = without_seen(PROMPTS, tmp_path)
    assert left == {"chat": PROMPTS["chat"]}
    assert (found.name, found.severity) == ("training-prompts", Severity.NOTE)
    assert found.evidence == {"seen": 3, "prompts": MIN_OTHERS + 3}
    assert "left out" in found.message


def test_with_too_few_others_it_is_a_warning(tmp_path: Path) -> None:
    PromptRecord.of([*PROMPTS["math"], PROMPTS["chat"][0]]).write(tmp_path)
    left, (found,) = without_seen(PROMPTS, tmp_path)
    assert left == PROMPTS
    assert (found.name, found.severity) == ("training-prompts", Severity.WARNING)
    assert f"4 of {MIN_OTHERS + 3} prompts" in found.message
    assert f"only {MIN_OTHERS - 1} are not" in found.message


def test_new_prompts_are_no_finding(tmp_path: Path) -> None:
    PromptRecord.of([[7, 7]]).write(tmp_path)
    assert without_seen(PROMPTS, tmp_path) == (PROMPTS, [])


def test_without_a_record_there_is_a_note(tmp_path: Path) -> None:
    left, (found,) = without_seen(PROMPTS, tmp_path)
    assert left == PROMPTS
    assert (found.name, found.severity) == ("training-prompts-unknown", Severity.NOTE)
    (tmp_path / NAME).write_text("[]")
    left, (found,) = without_seen(PROMPTS, tmp_path)
    assert left == PROMPTS
    assert (found.name, found.severity) == ("prompt-record-unreadable", Severity.NOTE)


def test_a_record_of_a_selection_says_so() -> None:
    whole = PromptRecord.of(PROMPTS["math"])
    _, (found,) = select(PROMPTS, whole.model_copy(update={"prompts": 30}))
    assert "holds 10% of the training prompts" in found.message
