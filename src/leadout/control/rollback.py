"""Whether a drafter that was just swapped in accepts as much as expected: a sequential test.

The expectation is the 95% confidence interval of the acceptance length, measured before the drafter
was served. It is compared with whole answers that began after the swap. The unit is the request:
steps within one answer are too much alike to count as independent.

Checks are few, each after twice as many requests as the one before, however often the numbers are
read. Even for a drafter at the very edge of what is tolerated, the probability of a false alarm at
any of them is below 1%: `STANDARD_ERRORS` is larger than a normal distribution would require,
because samples of some dozens of requests can be skewed.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

from pydantic import BaseModel, ConfigDict

STANDARD_ERRORS = 4.0
MAX_CHECKS = 8
FIRST_CHECK = 30  # requests
TOLERANCE = 0.1  # share by which served traffic may stay below the expectation


class Tally(BaseModel):
    """Sums over requests, with the target steps with drafts and their tokens of each."""

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

    def __add__(self, other: Tally) -> Tally:
        both = zip(dict(self).items(), dict(other).values(), strict=True)
        return Tally(**{name: one + two for (name, one), two in both})

    @property
    def acceptance_length(self) -> float | None:
        return self.tokens / self.steps if self.steps else None

    def standard_error(self) -> float:
        """Of the acceptance length, a ratio of two sums over requests (delta method)."""
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
    """Served traffic accepted significantly less than expected.

    The field names are keys of the registry's ledger.
    """

    acceptance_length: float
    high: float  # upper confidence bound
    least: float  # what is tolerated
    requests: int

    def __str__(self) -> str:
        return (
            f"acceptance length {self.acceptance_length:.2f} (at most {self.high:.2f}) over "
            f"{self.requests} requests, expected at least {self.least:.2f}"
        )


class ShortfallTest:
    """Compares the tally of requests since a swap with the expectation; reports at most once."""

    def __init__(self, expected_low: float) -> None:
        """`expected_low` is the lower end of the expected interval of the acceptance length."""
        # Every target step yields one token, whatever the drafter does.
        self.least = max(expected_low * (1 - TOLERANCE), 1.0)
        self._checks = 0

    @property
    def is_finished(self) -> bool:
        return self._checks >= MAX_CHECKS

    def check(self, tally: Tally) -> Shortfall | None:
        """Does nothing until the requests of the next check are complete."""
        due = (tally.requests // FIRST_CHECK).bit_length()  # 30, 60, 120, ... requests
        if self.is_finished or due <= self._checks:
            return None
        self._checks = due
        length = tally.acceptance_length
        if length is None:
            return None
        high = length + STANDARD_ERRORS * tally.standard_error()
        return Shortfall(length, high, self.least, tally.requests) if high < self.least else None
