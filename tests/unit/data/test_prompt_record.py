"""A record recognizes the prompts of a training, and stays small."""

from __future__ import annotations

from pathlib import Path

import pytest

from leadout.data import prompt_record
from leadout.data.prompt_record import NAME, PromptRecord, PromptRecordError, prompt_hash

PROMPTS = [[1, 2, 3], [1, 2], [70_000, 5], [1, 2, 3]]


def test_a_record_that_was_written_recognizes_its_prompts(tmp_path: Path) -> None:
    PromptRecord.of(PROMPTS).write(tmp_path)
    record = PromptRecord.read(tmp_path)
    assert record == PromptRecord.of(PROMPTS)
    assert (record.prompts, record.share) == (3, 1.0)
    assert all(prompt in record for prompt in PROMPTS)
    assert not any(prompt in record for prompt in ([1, 2, 4], [2, 1], [], [1, 2, 3, 0]))


def test_the_hash_is_that_of_earlier_records() -> None:
    assert prompt_hash([1, 2, 3]) == 0x9E3D6A5F74569CD6


def test_a_large_record_holds_a_selection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_record, "MAX_HASHES", 50)
    prompts = [[number, 1] for number in range(200)]
    record = PromptRecord.of(prompts)
    assert (record.prompts, record.share) == (200, 0.25)
    assert sum(prompt in record for prompt in prompts) == 50
    record.write(tmp_path)
    assert (tmp_path / NAME).stat().st_size < 50 * 8 * 4 / 3 + 100


def test_without_a_file_there_is_no_record(tmp_path: Path) -> None:
    assert PromptRecord.read(tmp_path) is None


@pytest.mark.parametrize("text", ["[]", '{"prompts": 1, "hashes": "AAAA"}', '{"prompts": 1}', "{"])
def test_another_file_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / NAME).write_text(text)
    with pytest.raises(PromptRecordError, match=r"[Ee]xpected"):
        PromptRecord.read(tmp_path)
