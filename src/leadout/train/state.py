"""A training run on the disk: one file that a kill cannot tear, from which the run goes on.

Anchors, order and learning rate follow from the step, so weights, optimiser state and a few numbers
are all there is to keep. Tensors only: nothing is pickled.
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

from leadout.checkpoints.store import replacing
from leadout.train.weights import TrainedWeights

STATE = "state.safetensors"
BEST = "best.safetensors"
_NUMBERS = "run"


class RunNumbers(BaseModel):
    """Where a run stands, besides its tensors."""

    model_config = ConfigDict(extra="forbid")

    step: int = 0  # steps done
    seconds: float = 0.0  # spent in training, validation included
    best_acceptance: float = 0.0
    best_step: int = 0
    validations_without_gain: int = 0
    finished: bool = False


def save_state(
    folder: Path, weights: TrainedWeights, optimizers: Sequence[Optimizer], numbers: RunNumbers
) -> None:
    tensors = {f"weights.{name}": tensor for name, tensor in weights.named().items()}
    for number, optimizer in enumerate(optimizers):
        for index, entries in optimizer.state_dict()["state"].items():
            for key, value in entries.items():
                tensors[f"optimizer.{number}.{index}.{key}"] = torch.as_tensor(value)
    _save(folder / STATE, tensors, {_NUMBERS: numbers.model_dump_json()})


def load_state(
    folder: Path, weights: TrainedWeights, optimizers: Sequence[Optimizer]
) -> RunNumbers | None:
    """Put a saved run's tensors in place; None where there is none to continue."""
    path = folder / STATE
    if not path.exists():
        return None
    with safe_open(path, framework="pt") as opened:
        numbers = RunNumbers.model_validate_json(opened.metadata()[_NUMBERS])
    tensors = load_file(path)
    weights.load(_below(tensors, "weights."))
    for number, optimizer in enumerate(optimizers):
        state: dict[int, dict[str, Tensor]] = {}
        for name, tensor in _below(tensors, f"optimizer.{number}.").items():
            index, _, key = name.partition(".")
            state.setdefault(int(index), {})[key] = tensor
        groups = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict({"state": state, "param_groups": groups})
    return numbers


def save_best(folder: Path, weights: TrainedWeights) -> None:
    _save(folder / BEST, weights.named(), {})


def load_best(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / BEST)


def remove_leftovers(folder: Path) -> None:
    """What a kill left of files it was writing; only for the one who writes them."""
    for path in folder.glob(".*.safetensors.*.partial"):
        path.unlink()


def _save(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with replacing(path) as temporary:
        save_file(contiguous, temporary, metadata=metadata)


def _below(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
