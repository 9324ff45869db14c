"""All that decides a cycle of learning: each field is a flag and a default at once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator

from leadout.errors import LeadoutError
from leadout.settings import Settings

DEFAULT_MINUTES = 30.0


class LearnError(LeadoutError):
    """A cycle that cannot be carried out as asked."""


class LearnConfig(Settings):
    """One cycle."""

    command = "learn"

    minutes: Annotated[
        float | None, Field(gt=0, description=f"Time to train for, {DEFAULT_MINUTES:g} unless set.")
    ] = None
    tokens: Annotated[
        int | None, Field(ge=1, description="Or: answer tokens to train on, repetitions counted.")
    ] = None
    held_out: Annotated[
        float,
        Field(gt=0, lt=1, description="Share of the requests, the newest, kept for the gate."),
    ] = 0.2
    least_requests: Annotated[
        int, Field(ge=1, description="Fewest requests to train on, and to judge by.")
    ] = 50
    replay_share: Annotated[
        float, Field(ge=0, lt=1, description="Share of replayed data in training.")
    ] = 0.5
    learning_rate: Annotated[
        float | None, Field(gt=0, description="Unset: half of what the drafter was trained with.")
    ] = None
    gain: Annotated[
        float,
        Field(ge=0, description="Acceptance length must rise on traffic by this share, surely."),
    ] = 0.03
    base_loss: Annotated[
        float,
        Field(ge=0, description="It must not fall on replayed data by more than this, surely."),
    ] = 0.03

    @model_validator(mode="after")
    def _one_budget(self) -> Self:
        if self.minutes is not None and self.tokens is not None:
            raise ValueError("--minutes and --tokens are two budgets; give one of them.")
        return self


# What `leadout learn` is asked to do.


@dataclass(frozen=True, slots=True)
class LearnRequest:
    """One cycle: adapt, gate, publish."""

    target: str
    registry: Path
    traffic: Path
    replay: Path
    work: Path
    config: LearnConfig
