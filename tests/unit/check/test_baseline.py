"""A drop since an earlier check is told apart from chance; different checks are not compared."""

from __future__ import annotations

from pathlib import Path

import pytest
from sample_results import SETS, interval, offline, table, whole_result

from leadout.check.baseline import baseline_findings, has_dropped, read_baseline
from leadout.check.result import CheckError, CheckResult
from leadout.files import FileError
from leadout.findings import Severity

LEVEL_SETS = {name: table(2.4, 0.2) for name in SETS}


def result(length: float, half: float = 0.1, **fields: object) -> CheckResult:
    return whole_result(offline=offline(length, half, LEVEL_SETS), **fields)


def test_no_drop_gives_no_finding() -> None:
    assert baseline_findings(result(2.4), result(2.4)) == []
    assert baseline_findings(result(2.8), result(2.4)) == []  # a rise is no finding


@pytest.mark.parametrize(
    ("now", "severity"), [(2.1, Severity.WARNING), (1.9, Severity.ERROR), (2.3, None)]
)
def test_a_drop_of_all_texts(now: float, severity: Severity | None) -> None:
    found = baseline_findings(result(now), result(2.4))
    if severity is None:
        assert found == []
        return
    (drop,) = found
    assert (drop.name, drop.severity) == ("dropped-since-baseline", severity)
    assert "all texts" in drop.message
    assert f"{now:.3f}" in drop.message
    assert "no version has changed since" in drop.message
    assert drop.evidence["before"] == 2.4


def test_the_interval_of_the_difference_decides() -> None:
    # Overlapping, and yet significant: 0.15 is more than sqrt(0.1² + 0.1²).
    assert has_dropped(interval(2.25), interval(2.4))
    assert not has_dropped(interval(2.27), interval(2.4))
    assert not has_dropped(interval(2.6), interval(2.4))


def test_a_tiny_drop_is_not_reported_even_if_significant() -> None:
    assert baseline_findings(result(2.39, 0.001), result(2.4, 0.001)) == []


def test_a_drop_in_one_set_requires_separate_intervals() -> None:
    old = whole_result(offline=offline(2.4, 0.1, LEVEL_SETS))
    near = whole_result(offline=offline(2.4, 0.1, LEVEL_SETS | {"code": table(2.05, 0.2)}))
    assert baseline_findings(near, old) == []
    apart = whole_result(offline=offline(2.4, 0.1, LEVEL_SETS | {"code": table(1.9, 0.2)}))
    (drop,) = baseline_findings(apart, old)
    assert drop.evidence["texts"] == "code"


def test_versions_that_changed_are_named() -> None:
    new = result(2.0, versions={"leadout": "0.1", "torch": "2.14.0", "vllm": "0.32.1"})
    drop, note = baseline_findings(new, result(2.4))
    for found in (drop, note):
        assert "torch 2.13.0 -> 2.14.0, vllm absent -> 0.32.1" in found.message
    assert (note.name, note.severity) == ("versions-since-baseline", Severity.NOTE)


def test_other_prompt_sets_are_not_compared() -> None:
    other = whole_result(offline=offline(1.5, 0.1, {"poems": table(1.5), "code": table(1.2)}))
    drop, note = baseline_findings(other, result(2.4))
    assert drop.evidence["texts"] == "code"  # the one set that both have
    assert note.name == "other-prompts"
    assert "poems" in note.message


@pytest.mark.parametrize("role", ["target", "drafter"])
def test_another_pair_is_an_error(role: str) -> None:
    with pytest.raises(CheckError, match=f"the {role} owner/another"):
        baseline_findings(result(2.4), result(2.4, **{role: "owner/another"}))


def test_the_same_pair_from_another_folder_is_no_error() -> None:
    assert baseline_findings(result(2.4), result(2.4, drafter="/elsewhere/tiny-drafter")) == []


def test_another_number_of_drafts_is_an_error() -> None:
    with pytest.raises(CheckError, match="--draft-tokens 7"):
        baseline_findings(result(2.4), result(2.4, draft_tokens=7))


def test_a_check_that_measured_nothing_is_not_compared() -> None:
    unmeasured = whole_result(offline=None, served=[], draft_tokens=None)
    (note,) = baseline_findings(unmeasured, result(2.4))
    assert (note.name, note.severity) == ("not-compared", Severity.NOTE)


def test_a_saved_result_is_read_back(tmp_path: Path) -> None:
    saved = result(2.4)
    (tmp_path / "old.json").write_text(saved.model_dump_json(indent=2))
    assert read_baseline(tmp_path / "old.json") == saved


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist"),
        ("{", "Invalid JSON"),
        ('{"target": 1}', "target: Input should be a valid string"),
        (whole_result(offline=None).model_dump_json(), "no measured acceptance"),
    ],
)
def test_a_file_that_is_not_a_baseline_is_refused(
    tmp_path: Path, content: str | None, message: str
) -> None:
    path = tmp_path / "old.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises((CheckError, FileError), match=message):
        read_baseline(path)
