"""Leadout: DFlash speculative decoding on vLLM, from training a drafter to keeping it fast."""

from leadout.version import __version__

__all__ = ["__version__"]
