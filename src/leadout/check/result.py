"""Findings are data: what was found, how bad it is, the evidence, and what to do about it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from pydantic import BaseModel, ConfigDict

from leadout.engine.offline import SetRun
from leadout.errors import LeadoutError
from leadout.evaluate.acceptance import AcceptanceTable
from leadout.stats import Interval

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


# What a check is asked to do, whom it tells how far it is, and how it says that it cannot.


class CheckError(LeadoutError):
    """The check cannot be made as asked: this says nothing about the pair."""


@dataclass(frozen=True, slots=True)
class CheckRequest:
    target: str
    drafter: str
    prompts: tuple[str, ...]
    static_only: bool
    draft_tokens: int | None  # K; None: as many as the drafter's block allows
    dtype: str
    thinking: bool | None  # None: the chat template's own default
    baseline: Path | None
    fix: Path | None


class Progress(Protocol):
    def stage(self, name: str, total: int) -> Callable[[], None]:
        """Begin a stage of so many steps; what comes back is called after each of them."""


class Silence:
    """Progress that nobody wants to see."""

    def stage(self, name: str, total: int) -> Callable[[], None]:
        return lambda: None


# The result of a check: one object for people, machines, the HTML page and later comparisons.


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class OfflineAcceptance(_Record):
    """By the reference, along the target's own greedy texts."""

    overall: AcceptanceTable
    by_set: dict[str, AcceptanceTable]
    by_context: dict[str, AcceptanceTable]  # by the length of the prompt, such as "256 to 511"


class ServedAcceptance(_Record):
    """By vLLM's counters."""

    temperature: float
    steps: int
    length: float
    by_position: list[float]
    by_set: dict[str, float]


class Parity(_Record):
    """Whether the engine computes the reference's drafts, and where they part if not."""

    blocks: int
    drafts: int
    equal_drafts: int
    first_difference: str | None  # the first tensor that differs, such as "layer 1 context keys"
    differences: dict[str, float]  # of each tensor, relative to its size
    allowed: dict[str, float] = {}  # of each tensor, the difference that rounding explains


class Divergence(_Record):
    """Where an answer with speculation first leaves the one without."""

    prompt_set: str
    position: int  # in the answer
    logit_gap: float  # between the two tokens, in the target's own logits there


class Lossless(_Record):
    texts: int
    equal_texts: int
    divergences: list[Divergence]
    largest_allowed_gap: float  # 0 in float32: every text must be equal


class Tried(_Record):
    """One change that was tried on the drafter."""

    cause: str
    edit: str
    before: float
    after: float
    difference: Interval
    texts: int  # that it was tried on


class CheckResult(_Record):
    target: str
    drafter: str
    static_only: bool
    verdict: Verdict
    findings: list[Finding]
    draft_tokens: int | None = None
    offline: OfflineAcceptance | None = None
    served: list[ServedAcceptance] = []  # greedy, then sampled
    parity: Parity | None = None
    lossless: Lossless | None = None
    tried: list[Tried] = []
    seconds: float = 0.0
    versions: dict[str, str] = {}
    date: str = ""


# Acceptance as the engine counts it.


def acceptance_of(runs: Sequence[SetRun]) -> list[ServedAcceptance]:
    """One entry for each temperature, in the order of the runs."""
    temperatures = dict.fromkeys(run.temperature for run in runs)
    return [
        _at_one([run for run in runs if run.temperature == temperature])
        for temperature in temperatures
    ]


def _at_one(runs: Sequence[SetRun]) -> ServedAcceptance:
    steps = sum(run.steps for run in runs)
    accepted = [
        sum(counts) for counts in zip(*(run.accepted_by_position for run in runs), strict=True)
    ]
    return ServedAcceptance(
        temperature=runs[0].temperature,
        steps=steps,
        length=_length(sum(accepted), steps),
        by_position=[count / max(steps, 1) for count in accepted],
        by_set={run.prompt_set: _length(sum(run.accepted_by_position), run.steps) for run in runs},
    )


def _length(accepted: int, steps: int) -> float:
    return 1 + accepted / max(steps, 1)
