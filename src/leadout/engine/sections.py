"""What Leadout's parts are told at the start, through vLLM's `additional_config`.

vLLM hands that field to all of its processes as it is: `{"leadout": {SECTION: {...}}}`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

LIVE, CAPTURE, REGISTRY = "live", "capture", "registry"
# Every part that works in the scheduler comes with this one.
SCHEDULER = "leadout.engine.scheduler.make_scheduler"
# What workers do in a swap.
WORKER_EXTENSION = "leadout.engine.swap_worker.SwapExtension"


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class SectionError(ValueError):
    """Settings that Leadout does not know."""


_Kind = TypeVar("_Kind", bound=Section)


def sections_of(vllm_config: Any) -> Mapping[str, Any]:
    additional = vllm_config.additional_config
    return additional.get("leadout", {}) if isinstance(additional, dict) else {}


def read_section(vllm_config: Any, name: str, kind: type[_Kind]) -> _Kind:
    """A section; its defaults if it is not there."""
    try:
        return kind.model_validate(sections_of(vllm_config).get(name, {}))
    except ValidationError as problem:
        first = problem.errors(include_url=False)[0]
        field = ".".join(str(part) for part in ("leadout", name, *first["loc"]))
        raise SectionError(
            f"additional_config: {field}: {first['msg']}; found {first['input']!r}; leave it out "
            "for the default"
        ) from None


def with_section(additional: Mapping[str, Any], name: str, settings: Section) -> dict[str, Any]:
    """`additional_config` with a section, beside others in the same field."""
    ours = additional.get("leadout", {})
    section = ours.get(name, {}) | settings.model_dump(mode="json", exclude_defaults=True)
    return {**additional, "leadout": {**ours, name: section}}
