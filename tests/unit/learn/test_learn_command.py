"""`leadout learn`: exit codes, --status, --start, and wrong flags."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import pytest
from typer.testing import CliRunner

from leadout.cli.app import app
from leadout.learn.config import CycleSettings
from leadout.learn.gate import Comparison, Decision, Evidence
from leadout.learn.report import Adaptation, LearnResult
from leadout.registry import ExpectedAcceptance
from leadout.stats import Interval
from support.learn_world import (
    NEW,
    SETTINGS_OF_FIRST,
    World,
    requests,
    start,
    write_capture,
)


@pytest.fixture
def registry(world: World, tmp_path: Path) -> Path:
    """A registry whose version 2 was promoted and rolled back."""
    made = start(world, tmp_path / "registry")
    expected = ExpectedAcceptance(acceptance_length=2.125, low=2.0, high=2.25, requests=50)
    made.publish(world.drafter, target_fingerprint="-", parent=1, expected={"traffic": expected})
    made.record("promoted", 2, "traffic +20%")
    made.mark_bad(2, "live acceptance 1.5")
    made.record("rolled_back", 2, "live acceptance 1.5")
    made.record("rejected", None, "traffic +1%")
    return made.folder


def test_status_shows_versions_and_decisions(registry: Path) -> None:
    shown = CliRunner().invoke(app, ["learn", "--registry", str(registry), "--status"])
    assert shown.exit_code == 0, shown.output
    for words in ("serving", "2.125 (2.000 to 2.250)", "marked: live", "rolled back", "rejected"):
        assert words in " ".join(shown.output.split())


def test_status_as_json(registry: Path) -> None:
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
    ("words", "message"),
    [
        (["--status"], "is not a registry with a version to serve"),
        ([], "TARGET is required"),
        (["tiny"], "--traffic is required"),
        (["tiny", "--traffic", "t"], "--replay is required"),
        (["tiny", "--minutes", "0"], "--minutes: got 0.0"),
        (["tiny", "--minutes", "1", "--tokens", "5"], "are two budgets"),
        (["tiny", "--traffic", "t", "--states", "/dev/shm/r"], "are two sources"),
        (["tiny", "--traffic", "t", "--cycles", "2"], "--cycles requires --states"),
    ],
)
def test_missing_and_wrong_flags_are_named(words: list[str], message: str, tmp_path: Path) -> None:
    shown = CliRunner().invoke(app, ["learn", "--registry", str(tmp_path / "none"), *words])
    assert shown.exit_code == 2
    assert message in shown.output


def test_start_creates_a_registry(world: World, tmp_path: Path) -> None:
    words = ["learn", str(world.target), "--start", str(world.drafter), "--registry"]
    shown = CliRunner().invoke(app, [*words, str(tmp_path / "new"), "--json"])
    assert shown.exit_code == 0, shown.output
    assert json.loads(shown.output)["version"] == 1
    shown = CliRunner().invoke(app, [*words, str(tmp_path / "other")])
    assert f"Next: leadout serve {world.target} --registry {tmp_path / 'other'}" in shown.output


def result_of(verdict: Literal["passed", "rejected", "undecided"]) -> LearnResult:
    length = Interval(value=2.0, low=1.9, high=2.1)
    change = Interval(value=0.2, low=0.1, high=0.3)
    compared = Comparison(requests=50, before=length, after=length, change=change)
    since_first = compared.model_copy(update={"change": change.plus(-0.11)})
    return LearnResult(
        promoted=verdict == "passed",
        version=3 if verdict == "passed" else None,
        parent=2,
        decision=Decision(verdict=verdict, reasons=["traffic: as measured"]),
        evidence=Evidence(
            findings=[], traffic=compared, base_by_source={"code": compared}, first=since_first
        ),
        adaptation=Adaptation(
            parent=2,
            steps=60,
            best_step=60,
            minutes=1.5,
            traffic_requests=40,
            replay_sequences=40,
            config=CycleSettings(),
            training=SETTINGS_OF_FIRST,
            curve=[],
        ),
        seconds=120.0,
    )


@pytest.mark.parametrize(
    ("verdict", "code", "first_line", "following"),
    [
        ("passed", 0, "Promoted: version 3 replaces version 2.", "swap to it automatically"),
        ("rejected", 1, "Rejected: version 2 stays in service.", "candidate is kept in"),
        ("undecided", 3, "Undecided: version 2 stays in service.", "candidate is kept in"),
    ],
)
def test_the_exit_code_says_whether_the_candidate_was_promoted(
    verdict: Literal["passed", "rejected", "undecided"],
    code: int,
    first_line: str,
    following: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    result = result_of(verdict)
    monkeypatch.setattr("leadout.learn.cycle.learn", lambda *_, **__: result)
    words = ["learn", "target", "--registry", "r", "--traffic", "t", "--replay", "d"]
    shown = CliRunner().invoke(app, words)
    assert shown.exit_code == code
    numbers = ("+10.0% to +30.0%", "-1.0% to +19.0%")  # the second compared with version 1
    for text in (first_line, *numbers, following, "leadout learn --registry r --status"):
        assert text in shown.output
    shown = CliRunner().invoke(app, [*words, "--json"])
    assert shown.exit_code == code
    assert LearnResult.model_validate_json(shown.stdout) == result


def test_too_little_traffic_exits_with_3(world: World, registry: Path, tmp_path: Path) -> None:
    capture = write_capture(tmp_path / "capture", world.target, requests(NEW, 10))
    words = ["learn", str(world.target), "--registry", str(registry), "--traffic", str(capture)]
    shown = CliRunner().invoke(app, [*words, "--replay", str(world.data.folder)])
    assert shown.exit_code == 3, shown.output
    assert "10 distinct requests" in shown.output
