"""What `leadout learn` is asked to do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from leadout.learn.config import LearnConfig


@dataclass(frozen=True, slots=True)
class LearnRequest:
    """One cycle: adapt, gate, publish."""

    target: str
    registry: Path
    traffic: Path
    replay: Path
    work: Path
    config: LearnConfig
