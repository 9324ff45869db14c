"""Findings and their severities, also as earlier versions wrote them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from leadout.findings import Finding, Severity, worst_first

ROOT = Path(__file__).parents[2]


def finding(severity: Severity = Severity.NOTE, name: str = "dtype") -> Finding:
    return Finding(name=name, severity=severity, message="dtype is float16", remedy="Use bfloat16.")


def test_a_finding_survives_json() -> None:
    made = finding()
    assert Finding.model_validate_json(made.model_dump_json()) == made
    assert json.loads(made.model_dump_json())["severity"] == "note"
    assert str(made) == "dtype: dtype is float16. Use bfloat16."


def test_unknown_fields_are_refused() -> None:
    with pytest.raises(ValidationError, match="remark"):
        Finding.model_validate({**finding().model_dump(), "remark": "more"})


@pytest.mark.parametrize(
    ("earlier", "severity"),
    [("unfit", Severity.ERROR), ("doubtful", Severity.WARNING), ("note", Severity.NOTE)],
)
def test_results_of_earlier_versions_are_readable(earlier: str, severity: Severity) -> None:
    read = Finding.model_validate({"name": "x", "gravity": earlier, "message": "m", "remedy": "r"})
    assert read.severity is severity


def test_an_unknown_severity_is_refused() -> None:
    with pytest.raises(ValidationError, match="severity"):
        Finding.model_validate({"name": "x", "severity": "bad", "message": "m", "remedy": "r"})


def test_findings_in_the_committed_check_are_readable() -> None:
    committed = json.loads((ROOT / "results/quickstart/check.json").read_text())
    assert committed["findings"]
    for each in committed["findings"]:
        Finding.model_validate(each)


def test_the_worst_finding_comes_first_and_equals_keep_their_order() -> None:
    mixed = [
        finding(Severity.NOTE, "a"),
        finding(Severity.ERROR, "b"),
        finding(Severity.WARNING, "c"),
        finding(Severity.ERROR, "d"),
    ]
    assert [each.name for each in worst_first(mixed)] == ["b", "d", "c", "a"]
