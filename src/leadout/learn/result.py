"""What a cycle came to: one object for people, machines and the ledger."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from leadout.checkpoints.registry import Promise
from leadout.learn.config import LearnConfig
from leadout.learn.gate import Comparison, Decision, Evidence
from leadout.train.config import TrainConfig

TRAFFIC = "traffic"


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class CurvePoint(_Record):
    """A validation during training, on requests that are neither trained on nor the gate's."""

    step: int
    minutes: float
    by_source: dict[str, float]  # acceptance length


class Adaptation(_Record):
    """How the candidate was made; goes with it as learned.json."""

    parent: int
    steps: int
    best_step: int
    minutes: float
    traffic_requests: int  # trained on
    replay_sequences: int
    config: LearnConfig
    training: TrainConfig
    curve: list[CurvePoint]


class LearnResult(_Record):
    promoted: bool
    version: int | None  # of the candidate, if it was published
    parent: int
    decision: Decision
    evidence: Evidence
    adaptation: Adaptation
    seconds: float


class Started(_Record):
    """A new registry."""

    version: int
    drafter: str
    fingerprint: str

    def text(self) -> str:
        return f"version {self.version} is to be served: {self.drafter}"


def promises_of(evidence: Evidence) -> dict[str, Promise]:
    """By kind of text; what servers hold the version to."""
    promised = {name: _promise(found) for name, found in evidence.base_by_source.items()}
    if evidence.traffic is not None:
        promised[TRAFFIC] = _promise(evidence.traffic)
    return promised


def numbers_of(evidence: Evidence, adaptation: Adaptation) -> dict[str, float | int | str | bool]:
    """The evidence as a line of the ledger has it."""
    numbers: dict[str, float | int | str | bool] = {
        "parent": adaptation.parent,
        "steps": adaptation.steps,
        "minutes": round(adaptation.minutes, 2),
    }
    for name, found in ((TRAFFIC, evidence.traffic), ("base", evidence.base)):
        if found is not None:
            numbers[f"{name}_requests"] = found.requests
            numbers[f"{name}_before"] = round(found.before.value, 4)
            numbers[f"{name}_after"] = round(found.after.value, 4)
            numbers[f"{name}_change"] = round(found.change.value, 4)
            numbers[f"{name}_change_low"] = round(found.change.low, 4)
    if evidence.lossless is not None:
        numbers["lossless"] = not evidence.lossless.divergences
    return numbers


def _promise(found: Comparison) -> Promise:
    after = found.after
    return Promise(
        acceptance_length=after.value, low=after.low, high=after.high, requests=found.requests
    )
