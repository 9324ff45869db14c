"""What a check is asked to do, whom it tells how far it is, and how it says that it cannot."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


class CheckError(ValueError):
    """The check cannot be made as asked: this says nothing about the pair."""


@dataclass(frozen=True, slots=True)
class CheckRequest:
    target: str
    drafter: str
    prompts: tuple[str, ...]
    static_only: bool
    draft_tokens: int | None  # K; None: as many as the drafter's block allows
    dtype: str
    thinking: bool | None  # None: the chat template's own default
    baseline: Path | None
    fix: Path | None


class Progress(Protocol):
    def stage(self, name: str, total: int) -> Callable[[], None]:
        """Begin a stage of so many steps; what comes back is called after each of them."""


class Silence:
    """Progress that nobody wants to see."""

    def stage(self, name: str, total: int) -> Callable[[], None]:
        return lambda: None
