"""What live control is told at the start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field

from leadout.control.copying import LEAST_MATCH
from leadout.engine.sections import LIVE, SCHEDULER, Section, read_section, with_section


class LiveSettings(Section):
    tuned: Path | None = None  # what `leadout tune` measured, as a start
    # Tokens at the end of a text that must have occurred in it before, for what followed to be
    # drafted; 0: never.
    copy_match: int = Field(default=LEAST_MATCH, ge=0)


def settings_of(vllm_config: Any) -> LiveSettings:
    return read_section(vllm_config, LIVE, LiveSettings)


def engine_settings(settings: LiveSettings, additional: dict[str, Any]) -> dict[str, Any]:
    """The settings of vLLM's that switch live control on, beside others in the same field."""
    return {
        "scheduler_cls": SCHEDULER,
        "additional_config": with_section(additional, LIVE, settings),
    }
