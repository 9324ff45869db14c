"""Leadout: DFlash speculative decoding on vLLM, from training a drafter to keeping it fast.

The names below load what they need when they are first used; `leadout.api` documents them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from leadout.version import __version__

if TYPE_CHECKING:
    from leadout.api import Server, bench, check, generate, load_drafter, train, tune

__all__ = [
    "Server",
    "__version__",
    "bench",
    "check",
    "generate",
    "load_drafter",
    "train",
    "tune",
]

_FUNCTIONS = ("Server", "generate", "load_drafter")
# Packages of the same name, which are callable: see `leadout.callable_package`.
_PACKAGES = ("bench", "check", "train", "tune")


def __getattr__(name: str) -> Any:
    if name in _FUNCTIONS:
        return getattr(import_module("leadout.api"), name)
    if name in _PACKAGES:
        return import_module(f"leadout.{name}")
    raise AttributeError(f"module 'leadout' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
