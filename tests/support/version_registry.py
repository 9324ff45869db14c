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
from leadout.registry import ExpectedAcceptance, Manifest, Registry, RequestAcceptance
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
    expected_length: float | None = None,
    before: float | None = None,
    config: object = CONFIG,
    other_target: bool = False,
    spoil: Callable[[Path], None] = lambda folder: None,
) -> Manifest:
    """A random drafter as the next version; `spoil` changes its folder before.

    `expected_length` is its acceptance length before publishing, `before` that of its parent.
    """
    folder = work / f"drafter-{len(registry.versions())}"
    shutil.rmtree(folder, ignore_errors=True)
    write_checkpoint(folder, random_drafter(config, seed).state_dict(), config, "zlab")  # type: ignore[arg-type]
    spoil(folder)
    expected = {}
    if expected_length is not None:
        expected["traffic"] = ExpectedAcceptance(
            acceptance_length=expected_length,
            low=expected_length,
            high=expected_length,
            requests=100,
            per_request=None if before is None else _exactly(expected_length),
            before=None if before is None else _exactly(before),
        )
    target_fingerprint = "0" * 64 if other_target else fingerprint(target)
    return registry.publish(
        folder, target_fingerprint=target_fingerprint, parent=parent, expected=expected
    )


def _exactly(length: float) -> RequestAcceptance:
    return RequestAcceptance(length=length, low=length)


def with_nan(folder: Path) -> None:
    weights = load_file(folder / WEIGHTS)
    weights["fc.weight"][0, 0] = torch.nan
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
