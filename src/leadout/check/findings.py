"""Findings are data: what was found, how bad it is, the evidence, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from pydantic import BaseModel, ConfigDict

Evidence = dict[str, float | int | str | list[float] | list[int]]


class Gravity(StrEnum):
    """How much a finding matters to someone who wants to deploy the pair."""

    UNFIT = "unfit"  # it would fail, or hardly any draft would be accepted, or output would change
    DOUBTFUL = "doubtful"  # it runs, but loses acceptance, or may do so
    NOTE = "note"  # worth knowing


class Verdict(StrEnum):
    FIT = "fit"
    DOUBTFUL = "doubtful"
    UNFIT = "unfit"

    @property
    def exit_code(self) -> int:
        return {Verdict.FIT: 0, Verdict.DOUBTFUL: 1, Verdict.UNFIT: 2}[self]


class Finding(BaseModel):
    """One thing that a check found."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    gravity: Gravity
    message: str
    evidence: Evidence = {}
    remedy: str


def verdict_of(findings: Iterable[Finding]) -> Verdict:
    grave = {finding.gravity for finding in findings}
    if Gravity.UNFIT in grave:
        return Verdict.UNFIT
    return Verdict.DOUBTFUL if Gravity.DOUBTFUL in grave else Verdict.FIT


def by_weight(findings: Iterable[Finding]) -> list[Finding]:
    """The gravest first; within the same gravity, as they were found."""
    order = list(Gravity)
    return sorted(findings, key=lambda finding: order.index(finding.gravity))
