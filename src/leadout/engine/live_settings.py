"""What live control is told at the start, through vLLM's `additional_config`.

vLLM hands that field to all of its processes as it is: `{"leadout": {"live": {...}}}`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from leadout.control.copying import LEAST_MATCH

SCHEDULER = "leadout.engine.scheduler.make_scheduler"


class LiveSettings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    tuned: Path | None = None  # what `leadout tune` measured, as a start
    # Tokens at the end of a text that must have occurred in it before, for what followed to be
    # drafted; 0: never.
    copy_match: int = Field(default=LEAST_MATCH, ge=0)


class LiveSettingsError(ValueError):
    """Settings that live control does not know."""


def settings_of(vllm_config: Any) -> LiveSettings:
    additional = vllm_config.additional_config
    ours = additional.get("leadout", {}) if isinstance(additional, dict) else {}
    try:
        return LiveSettings.model_validate(ours.get("live", {}))
    except ValidationError as problem:
        first = problem.errors(include_url=False)[0]
        field = ".".join(str(part) for part in ("leadout", "live", *first["loc"]))
        raise LiveSettingsError(
            f"additional_config: {field}: {first['msg']}; found {first['input']!r}; leave it out "
            "for the default"
        ) from None


def engine_settings(settings: LiveSettings, additional: dict[str, Any]) -> dict[str, Any]:
    """The settings of vLLM's that switch live control on, beside others in the same field."""
    ours = additional.get("leadout", {})
    live = ours.get("live", {}) | settings.model_dump(mode="json", exclude_defaults=True)
    return {
        "scheduler_cls": SCHEDULER,
        "additional_config": {**additional, "leadout": {**ours, "live": live}},
    }
