"""What a rule is, and what it says when it is broken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from pydantic import BaseModel, ConfigDict

from leadout.pairing.facts import Pair


class Severity(StrEnum):
    """How much a broken rule matters.

    `refuse`: the pair would crash, compute something it was not trained for, or be of no use.
    `warn`: it may well be meant so, and nothing in the files can tell.
    """

    REFUSE = "refuse"
    WARN = "warn"


@dataclass(frozen=True, slots=True)
class Rule:
    """One thing that must hold between a target, a drafter and a server's settings."""

    name: str
    severity: Severity
    compares: str
    remedy: str
    broken: Callable[[Pair], str | None]  # what was found and what was wanted; None: it holds


class Finding(BaseModel):
    """A broken rule."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rule: str
    severity: Severity
    message: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.message}. {self.remedy}"
