"""What capture is told at the start. Without a folder nothing is kept."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, TypeAlias

from pydantic import Field

from leadout.engine.sections import CAPTURE, Section, SectionError, read_section

# Installed packages offer functions under this group; settings name one, and can load nothing else.
REDACTORS = "leadout.redactors"

# From the token ids of a prompt and its answer to those that may be kept; None: nothing of it.
Redactor: TypeAlias = Callable[[list[int], list[int]], tuple[list[int], list[int]] | None]


class CaptureSettings(Section):
    folder: Path | None = None
    rate: float = Field(default=1.0, gt=0, le=1)  # share of the requests
    most_bytes: int = Field(default=1 << 30, ge=1 << 16)
    most_days: float = Field(default=30.0, gt=0)
    redactor: str | None = None  # a name under `leadout.redactors`


def capture_settings(vllm_config: Any) -> CaptureSettings:
    return read_section(vllm_config, CAPTURE, CaptureSettings)


def load_redactor(name: str | None) -> Redactor:
    """The redactor of that name, or one that keeps all if none is asked for."""
    if name is None:
        return lambda prompt, response: (prompt, response)
    offered = {point.name: point for point in entry_points(group=REDACTORS)}
    if name not in offered:
        raise SectionError(
            f"additional_config: leadout.capture.redactor: found {name!r}, wanted one of "
            f"{sorted(offered)} (entry points of the group {REDACTORS}); install the package that "
            "offers it"
        )
    redactor: Redactor = offered[name].load()
    return redactor
