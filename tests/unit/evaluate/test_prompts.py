"""Training prompts are noticed and left out; tasks are equal in contexts of every length."""

from __future__ import annotations

from pathlib import Path

from leadout.data.chat import Chat
from leadout.data.prompt_record import NAME, PromptRecord
from leadout.evaluate.prompts import (
    MIN_NEW_PROMPTS,
    leave_out_seen,
    tasks_in_context,
    without_seen,
)
from leadout.findings import Severity
from support.tiny_chat import tiny_tokenizer

PROMPTS = {
    "chat": [[number, 1] for number in range(MIN_NEW_PROMPTS)],
    "math": [[number, 2] for number in range(3)],
}


def test_training_prompts_are_left_out(tmp_path: Path) -> None:
    PromptRecord.of([*PROMPTS["math"], [99, 99]]).write(tmp_path)
    left, (found,) = without_seen(PROMPTS, tmp_path)
    assert left == {"chat": PROMPTS["chat"]}
    assert (found.name, found.severity) == ("training-prompts", Severity.WARNING)
    assert found.evidence == {"seen": 3, "prompts": MIN_NEW_PROMPTS + 3}
    assert "left out" in found.message


def test_with_too_few_others_they_are_kept(tmp_path: Path) -> None:
    PromptRecord.of([*PROMPTS["math"], PROMPTS["chat"][0]]).write(tmp_path)
    left, (found,) = without_seen(PROMPTS, tmp_path)
    assert left == PROMPTS
    assert (found.name, found.severity) == ("training-prompts", Severity.WARNING)
    assert f"4 of {MIN_NEW_PROMPTS + 3} prompts" in found.message
    assert f"only {MIN_NEW_PROMPTS - 1} are not" in found.message


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
    _, (found,) = leave_out_seen(PROMPTS, whole.model_copy(update={"prompts": 30}))
    assert "holds 10% of the training prompts" in found.message


def test_tasks_fill_a_context_of_any_length(tmp_path: Path) -> None:
    tiny_tokenizer().save_pretrained(tmp_path)
    chat = Chat(tmp_path)
    short, long = (tasks_in_context(chat, length, 6) for length in (500, 4000))
    assert len(short) == len(long) == 6
    # One token per byte, and a record has at most 60 of them.
    assert all(440 <= len(prompt) <= 500 for prompt in short)
    assert all(3940 <= len(prompt) <= 4000 for prompt in long)
    assert [prompt[-80:] for prompt in short] == [prompt[-80:] for prompt in long]
    assert not any(one[:60] == other[:60] for one, other in zip(short, long, strict=True))
    assert len({tuple(prompt) for prompt in long}) == 6
