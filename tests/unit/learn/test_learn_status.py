"""`leadout learn --status`: versions and decisions, for people and machines; and wrong flags."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from leadout.cli.app import app
from leadout.registry import ExpectedAcceptance
from support.learn_world import World, start


@pytest.fixture
def registry(world: World, tmp_path: Path) -> Path:
    """Version 2 was promoted and rolled back."""
    made = start(world, tmp_path / "registry")
    expected = ExpectedAcceptance(acceptance_length=2.125, low=2.0, high=2.25, requests=50)
    made.publish(world.drafter, target_fingerprint="-", parent=1, expected={"traffic": expected})
    made.record("promoted", 2, "traffic +20%")
    made.mark_bad(2, "live acceptance 1.5")
    made.record("rolled_back", 2, "live acceptance 1.5")
    made.record("rejected", None, "traffic +1%")
    return made.folder


def test_it_shows_versions_and_what_was_decided(registry: Path) -> None:
    shown = CliRunner().invoke(app, ["learn", "--registry", str(registry), "--status"])
    assert shown.exit_code == 0, shown.output
    for words in ("serving", "2.125 (2.000 to 2.250)", "marked: live", "rolled back", "rejected"):
        assert words in " ".join(shown.output.split())


def test_it_is_read_by_machines(registry: Path) -> None:
    shown = CliRunner().invoke(app, ["learn", "--registry", str(registry), "--status", "--json"])
    status = json.loads(shown.output)
    assert status["serving"] == 1
    assert [each["serving"] for each in status["versions"]] == [True, False]
    assert status["versions"][1]["mark"] == "live acceptance 1.5"
    assert [entry["event"] for entry in status["ledger"]] == [
        "published",
        "promoted",
        "promoted",
        "rolled_back",
        "rejected",
    ]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--status"], "is not a registry with a version to serve"),
        ([], "TARGET is required"),
        (["tiny"], "--traffic is required"),
        (["tiny", "--traffic", "t"], "--replay is required"),
        (["tiny", "--minutes", "0"], "--minutes: got 0.0"),
        (["tiny", "--minutes", "1", "--tokens", "5"], "are two budgets"),
    ],
)
def test_what_is_missing_is_told(words: list[str], told: str, tmp_path: Path) -> None:
    shown = CliRunner().invoke(app, ["learn", "--registry", str(tmp_path / "none"), *words])
    assert shown.exit_code == 2
    assert told in shown.output


def test_a_new_registry_from_the_command_line(world: World, tmp_path: Path) -> None:
    words = ["learn", str(world.target), "--registry", str(tmp_path / "new"), "--json"]
    shown = CliRunner().invoke(app, [*words, "--start", str(world.drafter)])
    assert shown.exit_code == 0, shown.output
    assert json.loads(shown.output)["version"] == 1
