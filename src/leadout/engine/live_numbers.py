"""What live control did over the last minute, and the small file that carries it to `/metrics`."""

from __future__ import annotations

import time
from collections import deque
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from leadout.engine.small_files import read_small, small_file, write_small

WINDOW_SECONDS = 60


class LiveNumbers(BaseModel):
    """Sums over the steps of the last minute; `gain` is the last estimate."""

    model_config = ConfigDict(extra="forbid")

    written: float  # seconds of the epoch
    steps: int = 0
    drafted: int = 0  # K of each step, summed
    made: int = 0  # drafts that could have been verified
    verified: int = 0
    copied: int = 0  # of the verified ones, those copied from the request's own text
    accepted: int = 0
    probes: int = 0
    gain: float | None = None

    @property
    def draft_length(self) -> float:
        """Drafted per request and step."""
        return self.drafted / self.steps if self.steps else 0.0

    @property
    def skipped_share(self) -> float:
        """Of the drafts that were made, those that were not worth verifying."""
        return 1 - min(1.0, (self.verified - self.copied) / self.made) if self.made else 0.0

    @property
    def copied_share(self) -> float:
        return self.copied / self.verified if self.verified else 0.0


class NumbersWindow:
    """Sums second by second; those older than a minute are forgotten."""

    def __init__(self) -> None:
        self._seconds: deque[LiveNumbers] = deque()

    def add(self, step: LiveNumbers) -> None:
        second = int(step.written)
        if not self._seconds or int(self._seconds[-1].written) < second:
            self._seconds.append(LiveNumbers(written=second))
        last = self._seconds[-1]
        for name in _SUMMED:
            setattr(last, name, getattr(last, name) + getattr(step, name))
        last.gain = step.gain

    def total(self, now: float) -> LiveNumbers:
        while self._seconds and self._seconds[0].written <= now - WINDOW_SECONDS:
            self._seconds.popleft()
        total = LiveNumbers(written=now)
        for second in self._seconds:
            for name in _SUMMED:
                setattr(total, name, getattr(total, name) + getattr(second, name))
            total.gain = second.gain
        return total


_SUMMED = ("steps", "drafted", "made", "verified", "copied", "accepted", "probes")


def numbers_file(instance: str, engine: int) -> Path:
    return small_file("live", instance, engine)


def write_numbers(numbers: LiveNumbers, path: Path) -> None:
    write_small(numbers, path)


def read_numbers(path: Path) -> LiveNumbers | None:
    """None without a file, or with one that tells of nothing within the last minute."""
    numbers = read_small(path, LiveNumbers)
    if numbers is None or time.time() - numbers.written >= WINDOW_SECONDS:
        return None
    return numbers
