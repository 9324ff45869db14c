"""What drafts gained over the last minute, and whether that is too little. Needs no vLLM.

The time is an argument everywhere: seconds of any clock that does not go back.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

WINDOW_SECONDS = 60

BREAK_EVEN = "LEADOUT_BREAK_EVEN"
BREAK_EVEN_MINUTES = "LEADOUT_BREAK_EVEN_MINUTES"
# A step with drafts is never cheaper than one without: it drafts, and it verifies more tokens. One
# token per step is therefore a loss on any machine, and 1.1 leaves drafting a tenth of a plain
# step, less than it takes in practice. Below it the loss needs no measurement.
DEFAULT_BREAK_EVEN = 1.1
DEFAULT_MINUTES = 3.0
# The acceptance length of fewer steps is mostly chance.
LEAST_DRAFTS = 200


@dataclass
class Counts:
    """Sums over verification steps; every step verifies the draft of one request."""

    drafts: int = 0
    draft_tokens: int = 0
    accepted: int = 0
    accepted_per_position: list[int] = field(default_factory=list)

    def add(self, other: Counts, sign: int = 1) -> None:
        self.drafts += sign * other.drafts
        self.draft_tokens += sign * other.draft_tokens
        self.accepted += sign * other.accepted
        missing = len(other.accepted_per_position) - len(self.accepted_per_position)
        self.accepted_per_position.extend([0] * missing)
        for position, accepted in enumerate(other.accepted_per_position):
            self.accepted_per_position[position] += sign * accepted


class AcceptanceWindow:
    """Counts of the last minute, forgotten second by second."""

    def __init__(self) -> None:
        self._seconds: deque[tuple[int, Counts]] = deque()
        self._total = Counts()

    def add(
        self,
        now: float,
        drafts: int,
        draft_tokens: int,
        accepted: int,
        accepted_per_position: Sequence[int],
    ) -> None:
        self._forget(now)
        if not self._seconds or self._seconds[-1][0] < int(now):
            self._seconds.append((int(now), Counts()))
        step = Counts(drafts, draft_tokens, accepted, list(accepted_per_position))
        self._seconds[-1][1].add(step)
        self._total.add(step)

    def total(self, now: float) -> Counts:
        self._forget(now)
        return self._total

    def acceptance_length(self, now: float) -> float | None:
        """Tokens per target step, bonus included; None without drafts."""
        total = self.total(now)
        return 1 + total.accepted / total.drafts if total.drafts else None

    def acceptance_per_position(self, now: float) -> list[float]:
        """Share of the drafts accepted up to and including each position; none without drafts."""
        total = self.total(now)
        if not total.drafts:
            return []
        return [accepted / total.drafts for accepted in total.accepted_per_position]

    def _forget(self, now: float) -> None:
        while self._seconds and self._seconds[0][0] <= int(now) - WINDOW_SECONDS:
            self._total.add(self._seconds.popleft()[1], sign=-1)


class BelowBreakEven:
    """Says once that acceptance stays below break-even; again only after as long at or above it.

    A minute with too few drafts proves neither, and starts the time anew.
    """

    def __init__(self, break_even: float, minutes: float, remedy: str) -> None:
        self._break_even = break_even
        self._minutes = minutes
        self._remedy = remedy
        self._is_below: bool | None = None
        self._since = self._last_seen = -math.inf
        self._has_warned = False

    @classmethod
    def from_environment(cls, environment: Mapping[str, str], remedy: str) -> Self:
        """Settings from LEADOUT_BREAK_EVEN (1 never warns) and LEADOUT_BREAK_EVEN_MINUTES."""
        return cls(
            _number(environment, BREAK_EVEN, DEFAULT_BREAK_EVEN, least=1.0),
            _number(environment, BREAK_EVEN_MINUTES, DEFAULT_MINUTES, least=0.0),
            remedy,
        )

    def observe(self, now: float, window: AcceptanceWindow) -> str | None:
        """Call after every step; returns the warning when it is due."""
        acceptance_length = window.acceptance_length(now)
        total = window.total(now)
        if acceptance_length is None or total.drafts < LEAST_DRAFTS:
            is_below = None
        else:
            is_below = acceptance_length < self._break_even
        # After a pause the window may be full again at the first step, without a word about before.
        has_paused = now - self._last_seen >= WINDOW_SECONDS
        if is_below is not self._is_below or has_paused:
            self._is_below, self._since = is_below, now
        self._last_seen = now
        if is_below is None or now - self._since < 60 * self._minutes:
            return None
        if not is_below:
            self._has_warned = False
            return None
        if self._has_warned:
            return None
        self._has_warned = True
        return (
            f"Acceptance has been below break-even for {self._minutes:g} minutes: found "
            f"{acceptance_length:.2f} tokens per target step over the last minute "
            f"({total.accepted} of {total.draft_tokens} draft tokens accepted), wanted at least "
            f"{self._break_even:g} ({BREAK_EVEN}). Drafts cost more than they gain; {self._remedy}."
        )


def _number(environment: Mapping[str, str], name: str, default: float, least: float) -> float:
    text = environment.get(name)
    if text is None:
        return default
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number >= least):
        raise ValueError(
            f"{name} is {text!r}, wanted a number of at least {least:g}. Set one, or unset it for "
            f"{default:g}"
        )
    return number
