"""A version of the registry read into memory, with all that must hold before it may be served."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path

from torch import Tensor

from leadout.checkpoints import CheckpointError, load_weights, read_checkpoint
from leadout.checkpoints.errors import Words
from leadout.checkpoints.fingerprint import fingerprint
from leadout.checkpoints.registry import MANIFEST, Registry
from leadout.dflash.config import DrafterConfig


@dataclass(frozen=True)
class Staged:
    version: int
    weights: dict[str, Tensor]
    digest: str  # of the manifest, which has those of all files


def read_version(registry: Registry, version: int, serving: DrafterConfig, target: Path) -> Staged:
    """The published bytes, for this target, of the serving drafter's shape, all values finite."""
    manifest = registry.verified(version)
    folder = registry.path(version)
    found = _fingerprint_of(target)
    if manifest.target_fingerprint != found:
        raise CheckpointError(
            folder / MANIFEST,
            "target_fingerprint",
            Words(manifest.target_fingerprint[:12]),
            f"{found[:12]}, that of the served target",
            "Use a registry of its own for every target.",
        )
    checkpoint = read_checkpoint(folder)
    _require_same_shape(checkpoint.config, serving, folder)
    digest = hashlib.sha256(manifest.model_dump_json().encode()).hexdigest()
    return Staged(version, load_weights(checkpoint), digest)


def _require_same_shape(found: DrafterConfig, serving: DrafterConfig, folder: Path) -> None:
    """Everything but the weights is built into a running engine."""
    for field in fields(DrafterConfig):
        new, old = getattr(found, field.name), getattr(serving, field.name)
        if new != old:
            raise CheckpointError(
                folder,
                field.name,
                new,
                f"{old!r}, that of the drafter in service",
                "Only weights can be replaced in a running server; start one on this version.",
            )


@lru_cache
def _fingerprint_of(target: Path) -> str:
    """Once for a process: a served target's files do not change under it."""
    return fingerprint(target)
