"""Looking up a published drafter by its target."""

from __future__ import annotations

from pathlib import Path

import pytest

from leadout.pairing.target import PUBLISHED, find_published

QWEN3_8B = "z-lab/Qwen3-8B-DFlash-b16"


@pytest.mark.parametrize(
    "target",
    [
        "Qwen/Qwen3-8B",
        "qwen/QWEN3-8b",
        "/models/Qwen3-8B",
        "/models/qwen3-8b/",
        "./Qwen3-8B",
        "Qwen3-8B",
        "/hub/models--Qwen--Qwen3-8B/snapshots/0ac7575",
    ],
)
def test_a_target_by_its_names(target: str) -> None:
    found = find_published(target)
    assert found is not None
    assert (found.target, found.drafter) == ("Qwen/Qwen3-8B", QWEN3_8B)


@pytest.mark.parametrize(
    "target",
    [
        "Qwen/Qwen3-8B-Base",
        "Qwen/Qwen3-8B-FP8",
        "Qwen/Qwen3",
        "someone/Qwen3-8B",  # may be anything
        "/models/Qwen3-8B-Base",
        "/models/Qwen3-8B/weights",
        "/hub/models--someone--Qwen3-8B/snapshots/0ac7575",
        "z-lab/Qwen3-8B-DFlash-b16",
        "",
        "/",
    ],
)
def test_similar_names_are_other_models(target: str) -> None:
    assert find_published(target) is None


def test_a_folder_that_looks_like_a_hub_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_published("models/Qwen3-8B") is None
    (tmp_path / "models" / "Qwen3-8B").mkdir(parents=True)
    found = find_published("models/Qwen3-8B")
    assert found is not None
    assert found.drafter == QWEN3_8B


def test_every_row_is_found_or_stands_behind_another_of_its_target() -> None:
    assert len(set(PUBLISHED)) == len(PUBLISHED)
    for row in PUBLISHED:
        found = find_published(row.target)
        assert found is not None
        assert found.target == row.target
        assert row.drafter.count("/") == 1
