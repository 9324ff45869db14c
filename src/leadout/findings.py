"""Findings: what is wrong with a drafter, a target or their pairing, how bad it is, the remedy."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from functools import partial
from typing import Any

from pydantic import BaseModel, model_validator

EvidenceValue = float | int | str | list[float] | list[int]


class Severity(StrEnum):
    """How much a finding matters to someone who wants to serve the pair; the worst comes first."""

    ERROR = "error"  # it would crash, change the output, or accept hardly any draft
    WARNING = "warning"  # it runs, but acceptance may suffer, or the setting may be intended
    NOTE = "note"  # worth knowing

    @classmethod
    def _missing_(cls, value: object) -> Severity | None:
        # The names in results of earlier versions.
        return {"unfit": cls.ERROR, "doubtful": cls.WARNING}.get(str(value))


class Finding(BaseModel, extra="forbid", frozen=True):
    """One finding: a broken pairing rule, or something that a check measured."""

    name: str  # such as "hidden-size": stable, for scripts and for the documentation
    severity: Severity
    message: str
    evidence: dict[str, EvidenceValue] = {}
    remedy: str

    @model_validator(mode="before")
    @classmethod
    def _read_earlier_name(cls, values: Any) -> Any:
        if isinstance(values, dict) and "gravity" in values and "severity" not in values:
            values = dict(values)
            values["severity"] = values.pop("gravity")
        return values

    def __str__(self) -> str:
        return f"{self.name}: {self.message}. {self.remedy}"


def finding(
    severity: Severity, name: str, message: str, remedy: str, /, **evidence: EvidenceValue
) -> Finding:
    return Finding(name=name, severity=severity, message=message, evidence=evidence, remedy=remedy)


error = partial(finding, Severity.ERROR)
warning = partial(finding, Severity.WARNING)
note = partial(finding, Severity.NOTE)


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    """Sorted by severity; findings of the same severity keep their order."""
    order = list(Severity)
    return sorted(findings, key=lambda finding: order.index(finding.severity))
