"""What a tuning is asked to do, whom it tells how far it is, and how it says that it cannot."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


class TuneError(ValueError):
    """The pair cannot be tuned as asked."""


@dataclass(frozen=True, slots=True)
class TuneRequest:
    target: str
    drafter: str
    prompts: tuple[str, ...]
    max_batch: int
    dtype: str


class Progress(Protocol):
    def stage(self, name: str, total: int) -> Callable[[], None]:
        """Begin a stage of so many steps; what comes back is called after each of them."""
