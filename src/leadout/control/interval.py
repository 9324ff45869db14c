"""A measured number with its 95% interval."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Interval(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    value: float
    low: float
    high: float

    def times(self, factor: float) -> Interval:
        return Interval(value=self.value * factor, low=self.low * factor, high=self.high * factor)

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.low:.2f} to {self.high:.2f})"
