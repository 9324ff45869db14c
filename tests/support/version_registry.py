"""A registry with versions for the tiny targets, good ones and bad ones."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from leadout.checkpoints import write_checkpoint
from leadout.models import fingerprint
from leadout.registry import Manifest, Promise, Registry
from support.drafters import TINY_DRAFTER, random_drafter

CONFIG = replace(TINY_DRAFTER, target_num_layers=4)  # for `tiny_llama`
WEIGHTS = "model.safetensors"


def publish(
    registry: Registry,
    target: Path,
    work: Path,
    *,
    seed: int,
    parent: int | None = None,
    promised: float | None = None,
    config: object = CONFIG,
    other_target: bool = False,
    spoil: Callable[[Path], None] = lambda folder: None,
) -> Manifest:
    """A random drafter as the next version; `spoil` changes its folder before."""
    folder = work / f"drafter-{len(registry.versions())}"
    shutil.rmtree(folder, ignore_errors=True)
    write_checkpoint(folder, random_drafter(config, seed).state_dict(), config, "zlab")  # type: ignore[arg-type]
    spoil(folder)
    promises = {}
    if promised is not None:
        promises["traffic"] = Promise(
            acceptance_length=promised, low=promised, high=promised, requests=100
        )
    about = "0" * 64 if other_target else fingerprint(target)
    return registry.publish(folder, target_fingerprint=about, parent=parent, promises=promises)


def with_nan(folder: Path) -> None:
    weights = load_file(folder / WEIGHTS)
    weights["fc.weight"][0, 0] = torch.nan
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
