"""What a server that follows a registry is told at the start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from leadout.checkpoints.registry import VERSIONS, Registry
from leadout.engine.sections import REGISTRY, Section, read_section, sections_of


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
