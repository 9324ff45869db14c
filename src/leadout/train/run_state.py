"""Checkpoints of a training run: atomically replaced files from which a run continues exactly.

Anchors, sample order and learning rate follow from the step number, so weights, optimizer state
and a few numbers are all there is to save. The files hold tensors only: nothing is pickled.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.optim import Optimizer

from leadout.files import replacing
from leadout.train.optimizer import MasterWeights

STATE = "state.safetensors"
BEST = "best.safetensors"
_STATUS_KEY = "run"  # in the metadata of the state file


class RunStatus(BaseModel):
    """How far a run has come."""

    model_config = ConfigDict(extra="forbid")

    step: int = 0  # completed steps
    seconds: float = 0.0  # spent on training, including validation
    best_acceptance: float = 0.0
    best_step: int = 0
    validations_without_gain: int = 0
    finished: bool = False


def save_state(
    folder: Path, weights: MasterWeights, optimizers: Sequence[Optimizer], status: RunStatus
) -> None:
    tensors = {f"weights.{name}": tensor for name, tensor in weights.named().items()}
    for number, optimizer in enumerate(optimizers):
        for index, entries in optimizer.state_dict()["state"].items():
            for key, value in entries.items():
                tensors[f"optimizer.{number}.{index}.{key}"] = torch.as_tensor(value)
    _save(folder / STATE, tensors, {_STATUS_KEY: status.model_dump_json()})


def read_status(folder: Path) -> RunStatus | None:
    """The status at the last checkpoint; None where there is no checkpoint."""
    path = folder / STATE
    if not path.exists():
        return None
    with safe_open(path, framework="pt") as opened:
        return RunStatus.model_validate_json(opened.metadata()[_STATUS_KEY])


def load_state(
    folder: Path, weights: MasterWeights, optimizers: Sequence[Optimizer]
) -> RunStatus | None:
    """Load the last checkpoint into weights and optimizers; None where there is no checkpoint."""
    status = read_status(folder)
    if status is None:
        return None
    tensors = load_file(folder / STATE)
    weights.load(_with_prefix(tensors, "weights."))
    for number, optimizer in enumerate(optimizers):
        state: dict[int, dict[str, Tensor]] = {}
        for name, tensor in _with_prefix(tensors, f"optimizer.{number}.").items():
            index, _, key = name.partition(".")
            state.setdefault(int(index), {})[key] = tensor
        groups = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict({"state": state, "param_groups": groups})
    return status


def save_best(folder: Path, weights: MasterWeights) -> None:
    _save(folder / BEST, weights.named(), {})


def load_best(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / BEST)


def remove_partial_files(folder: Path) -> None:
    """Delete what a killed run left of the files it was writing; only the leading rank may."""
    for path in folder.glob(".*.safetensors.*.partial"):
        path.unlink()


def _save(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with replacing(path) as temporary:
        save_file(contiguous, temporary, metadata=metadata)


def _with_prefix(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
