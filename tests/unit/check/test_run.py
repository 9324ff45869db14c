"""A check writes what it is asked for, and finds unusable files before the work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sample_results import SETS, offline, served, table, whole_result

from leadout.check import run
from leadout.check.result import CheckError, CheckResult, Verdict
from leadout.check.settings import CheckSettings
from leadout.checkpoints import CheckpointError
from leadout.engine.offline import SetRun
from leadout.files import FileError
from leadout.findings import Severity

LEVEL_SETS = {name: table(2.4, 0.2) for name in SETS}


class Assessed:
    """Takes the place of the measurements."""

    def __init__(self) -> None:
        self.result = whole_result(offline=offline(2.4, 0.1, LEVEL_SETS))
        self.calls = 0

    def __call__(self, _settings: CheckSettings, _progress: object) -> CheckResult:
        self.calls += 1
        return self.result


@pytest.fixture
def assessed(monkeypatch: pytest.MonkeyPatch) -> Assessed:
    fake = Assessed()
    monkeypatch.setattr(run, "assess", fake)
    monkeypatch.setattr(run, "_fingerprints", lambda _settings: {})  # the models are not here
    return fake


def settings(**given: Any) -> CheckSettings:
    return CheckSettings(target="owner/tiny-target", drafter="drafters/tiny-drafter", **given)


def test_the_saved_result_is_a_baseline_and_the_report_a_page(
    assessed: Assessed, tmp_path: Path
) -> None:
    saved, report = tmp_path / "new" / "result.json", tmp_path / "report.html"
    result = run.check(settings(save=saved, report=report))
    assert CheckResult.model_validate_json(saved.read_bytes()) == result
    assert report.read_text().startswith("<!DOCTYPE html>")
    assert result.fits is True
    assert run.check(settings(baseline=saved)).verdict is Verdict.FIT
    assessed.result = whole_result(offline=offline(1.7, 0.1, LEVEL_SETS))
    worse = run.check(settings(baseline=saved))
    assert worse.verdict is Verdict.UNFIT
    assert worse.fits is False
    assert worse.findings[0].name == "dropped-since-baseline"


def test_unusable_files_are_found_before_the_work(assessed: Assessed, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    other = tmp_path / "other.json"
    other.write_text(whole_result(target="owner/another").model_dump_json())
    for given, error, text in (
        ({"report": tmp_path / "full" / "file" / "page.html"}, FileError, "--report"),
        ({"save": tmp_path}, FileError, "--save"),
        ({"fix": tmp_path / "full"}, CheckpointError, "a new or empty folder"),
        ({"baseline": tmp_path / "none.json"}, CheckError, "none.json"),
        ({"baseline": other}, CheckError, "owner/another"),
    ):
        with pytest.raises(error, match=text):
            run.check(settings(**given))
    assert assessed.calls == 0


def test_a_result_of_an_earlier_version_is_a_baseline(assessed: Assessed) -> None:
    path = Path(__file__).parent / "earlier" / "check-0.1.json"
    old = CheckResult.model_validate_json(path.read_bytes())
    assert [finding.severity for finding in old.findings] == [Severity.NOTE]
    assessed.result = old
    found = run.check(CheckSettings(target=old.target, drafter=old.drafter, baseline=path))
    assert found.verdict is Verdict.FIT


def test_served_acceptance_far_from_the_reference_is_reported() -> None:
    assert run.served_findings(offline(2.4), served(2.3, 0.0)) == []
    (lower,) = run.served_findings(offline(2.4), served(2.0, 0.0))
    assert (lower.name, lower.severity) == ("served-differs", Severity.ERROR)
    (higher,) = run.served_findings(offline(2.4), served(2.8, 0.0))
    assert higher.severity is Severity.WARNING
    (of_few_texts,) = run.served_findings(offline(2.4, 0.5), served(2.0, 0.0))
    assert of_few_texts.severity is Severity.WARNING


def of_set(name: str, temperature: float, steps: int, accepted: list[int]) -> SetRun:
    return SetRun(
        prompt_set=name,
        temperature=temperature,
        answers=[],
        steps=steps,
        accepted_by_position=accepted,
    )


def test_served_acceptance_in_total_and_by_set() -> None:
    greedy, sampled = run.served_acceptance(
        [
            of_set("math", 0.0, 10, [8, 4]),
            of_set("chat", 0.0, 30, [10, 2]),
            of_set("math", 1.0, 5, [5, 0]),
            of_set("chat", 1.0, 0, [0, 0]),
        ]
    )
    assert (greedy.temperature, greedy.steps) == (0.0, 40)
    assert greedy.length == 1 + 24 / 40
    assert greedy.by_position == [18 / 40, 6 / 40]
    assert greedy.by_set == {"math": 1 + 12 / 10, "chat": 1 + 12 / 30}
    assert (sampled.temperature, sampled.length) == (1.0, 2.0)
    assert sampled.by_set == {"math": 2.0, "chat": 1.0}
