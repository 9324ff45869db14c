"""Promotion of a candidate that has passed: once, compared-and-set, and never stuck."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from leadout.learn.cycle import _promote
from leadout.learn.gate import Decision, Evidence
from leadout.learn.report import read_status
from leadout.registry import MANIFEST, Registry
from support.drafters import write_random_drafter
from support.version_registry import CONFIG

PASSED = Decision(verdict="passed", reasons=["better"])


@pytest.fixture(scope="module")
def candidate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_drafter(tmp_path_factory.mktemp("candidate") / "made", CONFIG)


@pytest.fixture
def registry(candidate: Path, tmp_path: Path) -> Registry:
    """Versions 1 and 2, of which 2 is served."""
    registry = Registry(tmp_path / "registry")
    registry.publish(candidate, target_fingerprint="t")
    registry.publish(candidate, target_fingerprint="t", parent=1)
    registry.point_to(2, "a test")
    return registry


def promote(registry: Registry, candidate: Path, parent: int = 2) -> tuple[Decision, int]:
    inputs: Any = SimpleNamespace(registry=registry, version=parent, target_fingerprint="t")
    adaptation: Any = SimpleNamespace(parent=parent, steps=1, minutes=1.0)
    return _promote(inputs, candidate, PASSED, Evidence(findings=[]), adaptation)


def events(registry: Registry) -> list[tuple[str, int | None]]:
    return [(entry.event, entry.version) for entry in registry.ledger()]


def test_a_promoted_version_is_served(registry: Registry, candidate: Path) -> None:
    assert promote(registry, candidate) == (PASSED, 3)
    assert registry.require_pointer().version == 3
    assert events(registry) == [("published", 3), ("promoted", 3)]


def test_a_roll_back_between_reading_and_writing_the_pointer_stays(
    registry: Registry, candidate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    point_to = Registry.point_to

    def after_a_roll_back(self: Registry, *arguments: Any, **settings: Any) -> Any:
        monkeypatch.setattr(Registry, "point_to", point_to)
        self.roll_back(2, "low acceptance")
        return point_to(self, *arguments, **settings)

    monkeypatch.setattr(Registry, "point_to", after_a_roll_back)
    decision, version = promote(registry, candidate)
    assert decision.verdict == "rejected"
    assert "version 1 is served now" in decision.reasons[0]
    assert registry.require_pointer().version == 1
    assert events(registry) == [("published", 3), ("rejected", 3)]
    assert version == 3


def test_a_cycle_killed_after_promoting_ends_although_its_version_was_rolled_back(
    registry: Registry, candidate: Path
) -> None:
    promote(registry, candidate)
    registry.roll_back(3, "low acceptance")
    for _ in range(2):
        decision, version = promote(registry, candidate)
        assert (decision.verdict, version) == ("rejected", 3)
        assert decision.reasons == ["serving: version 3 was rolled back: low acceptance"]
    assert registry.versions() == [1, 2, 3]


def test_a_damaged_version_blocks_neither_promotion_nor_status(
    registry: Registry, candidate: Path
) -> None:
    (registry.path(1) / MANIFEST).unlink()
    assert promote(registry, candidate) == (PASSED, 3)
    assert [each.version for each in read_status(registry.folder).versions] == [2, 3]
