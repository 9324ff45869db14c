"""What a bench is asked to do, and whom it tells how far it is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, slots=True)
class BenchRequest:
    target: str
    drafts: tuple[str, ...]
    draft_tokens: tuple[int, ...]  # K of fixed arms; none: all that a drafter's block allows
    tuned: Path | None
    live: bool
    prompts: tuple[str, ...]
    concurrencies: tuple[int, ...]
    rounds: int
    waves: int
    output_tokens: int
    flags: tuple[str, ...]  # of all servers
    out: Path
    resume: bool


class Progress(Protocol):
    def say(self, text: str) -> None:
        """What happens now."""

    def cells(self, total: int, done: int) -> None:
        """The cells begin, of which so many are done already."""

    def advance(self) -> None:
        """One more cell is done."""
