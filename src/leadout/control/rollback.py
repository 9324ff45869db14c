"""Does a drafter that was just swapped in keep what was promised of it?

The promise is an interval of its acceptance length, measured before it was served. What is held
against it are whole answers that began after the swap, and the unit is the request: tokens within
one answer are too much alike to count as independent.

Looks at the running traffic are few, each after twice as many requests as the one before, however
often the numbers are read. Even for a drafter at the very edge of what its promise allows, the
chance to be called short at any of them is below 1%: `DEVIATIONS` is wider than the normal law
asks, because of how skewed some dozens of requests can be.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

from pydantic import BaseModel, ConfigDict

DEVIATIONS = 4.0  # standard errors below what the promise allows
LOOKS = 8
FIRST_LOOK = 30  # requests
MARGIN = 0.1  # what served traffic may stay below the promise without being called short


class Tally(BaseModel):
    """Sums over requests, of each the target steps with drafts and the tokens that they gave."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    requests: int = 0
    steps: int = 0
    tokens: int = 0
    steps_squared: int = 0
    tokens_squared: int = 0
    steps_by_tokens: int = 0

    def with_request(self, steps: int, tokens: int) -> Tally:
        return Tally(
            requests=self.requests + 1,
            steps=self.steps + steps,
            tokens=self.tokens + tokens,
            steps_squared=self.steps_squared + steps * steps,
            tokens_squared=self.tokens_squared + tokens * tokens,
            steps_by_tokens=self.steps_by_tokens + steps * tokens,
        )

    @property
    def acceptance_length(self) -> float | None:
        return self.tokens / self.steps if self.steps else None

    def standard_error(self) -> float:
        """Of the acceptance length, a ratio of two sums over requests."""
        if self.requests < 2 or not self.steps:
            return float("inf")
        ratio = self.tokens / self.steps
        squared = (
            self.tokens_squared
            - 2 * ratio * self.steps_by_tokens
            + ratio * ratio * self.steps_squared
        )
        correction = self.requests / (self.requests - 1)
        return sqrt(max(squared, 0.0) * correction) / self.steps


@dataclass(frozen=True)
class Shortfall:
    """Served traffic accepted significantly less than was promised."""

    acceptance_length: float
    high: float  # the most that it can be, by the requests seen
    least: float  # what the promise allows
    requests: int

    def __str__(self) -> str:
        return (
            f"found acceptance length {self.acceptance_length:.2f} (at most {self.high:.2f}) over "
            f"{self.requests} requests, wanted {self.least:.2f} by its promise"
        )


class PromiseWatch:
    """Looks at the tally of requests since a swap; says once if it falls short."""

    def __init__(self, promised_low: float) -> None:
        """`promised_low` is the lower end of the promised interval."""
        # A target step gives one token in any case.
        self.least = max(promised_low * (1 - MARGIN), 1.0)
        self._looks = 0

    @property
    def is_over(self) -> bool:
        return self._looks >= LOOKS

    def look(self, tally: Tally) -> Shortfall | None:
        """Only as many looks count as the requests allow; others see nothing."""
        due = (tally.requests // FIRST_LOOK).bit_length()  # 30, 60, 120, ... requests
        if self.is_over or due <= self._looks:
            return None
        self._looks = due
        found = tally.acceptance_length
        if found is None:
            return None
        high = found + DEVIATIONS * tally.standard_error()
        return Shortfall(found, high, self.least, tally.requests) if high < self.least else None
