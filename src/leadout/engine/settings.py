"""What Leadout's parts are told at the start, through vLLM's `additional_config`.

vLLM hands that field to all of its processes as it is: `{"leadout": {SECTION: {...}}}`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from leadout.control.prompt_lookup import LEAST_MATCH
from leadout.errors import LeadoutError
from leadout.registry import VERSIONS, Registry

LIVE, CAPTURE, REGISTRY = "live", "capture", "registry"
# Every part that works in the scheduler comes with this one.
SCHEDULER = "leadout.engine.scheduler.make_scheduler"
# What workers do in a swap.
WORKER_EXTENSION = "leadout.engine.hot_swap.SwapExtension"


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class SectionError(LeadoutError):
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


# What live control is told at the start.


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


# What capture is told at the start. Without a folder nothing is kept.

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


# What a server that follows a registry is told at the start.


class RegistrySettings(Section):
    folder: Path


def registry_of(vllm_config: Any) -> Registry | None:
    """The registry that this server follows, if any."""
    if REGISTRY not in sections_of(vllm_config):
        return None
    return Registry(read_section(vllm_config, REGISTRY, RegistrySettings).folder)


def version_at_start(registry: Registry, drafter: str) -> int | None:
    """Which version the drafter's folder is: `leadout serve` gave vLLM the path of one."""
    folder = Path(drafter)
    if folder.parent != registry.folder / VERSIONS or not folder.name.isdigit():
        return None
    return int(folder.name)
