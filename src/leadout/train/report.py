"""What a training run came to: the numbers a person needs before deploying the drafter."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict

from leadout.train.config import TrainConfig
from leadout.train.log import Record, StepRecord, ValidationRecord
from leadout.train.served import ServedAcceptance
from leadout.train.validate import Validation


class TrainReport(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    target: str
    drafter: str
    steps: int
    best_step: int
    minutes: float
    data_hash: str
    response_tokens: int
    config: TrainConfig
    validation: Validation  # of the best step
    served: ServedAcceptance
    # What the target and its text were; None in records of earlier versions.
    target_fingerprint: str | None = None
    template_hash: str | None = None
    thinking: bool | None = None

    def text(self) -> str:
        by_source = ", ".join(
            f"{name} {found.acceptance_length:.2f}"
            for name, found in self.validation.by_source.items()
        )
        return (
            f"{self.drafter}: a drafter for {self.target}, {self.minutes:.0f} minutes, best at "
            f"step {self.best_step} of {self.steps}\n"
            f"held-out acceptance length {self.validation.overall.acceptance_length:.3f} "
            f"({by_source})\n"
            f"served by vLLM {self.served.served:.3f}, predicted for the same texts "
            f"{self.served.predicted:.3f} ({self.served.difference:.1%} apart)"
        )


class Curves(NamedTuple):
    steps: list[StepRecord]
    validations: list[ValidationRecord]

    @property
    def best(self) -> Validation:
        found = max(self.validations, key=lambda r: r.validation.overall.acceptance_length)
        return found.validation


def curves_of(records: Iterable[Record]) -> Curves:
    everything = list(records)
    return Curves(
        [record for record in everything if isinstance(record, StepRecord)],
        [record for record in everything if isinstance(record, ValidationRecord)],
    )
