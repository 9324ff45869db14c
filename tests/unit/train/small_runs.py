"""Runs that take a second or two."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from leadout.evaluate.ranks import Ranks
from leadout.train.config import TrainConfig
from leadout.train.run import Run

MakeRun = Callable[..., Run]
ALONE = Ranks(0, 1, torch.device("cpu"))
SMALL: dict[str, Any] = {
    "layers": 2,
    "block_size": 5,
    "anchors": 4,
    "batch_sequences": 5,
    "max_length": 64,
    "epochs": 0.7,
    "validation_sequences": 4,
    "validate_every": 3,
    "save_every": 2,
    "precision": "float32",
    "states": "compute",
    "micro_tokens": 128,
}


def small_config(**changes: Any) -> TrainConfig:
    return TrainConfig(**SMALL | changes)


class KilledError(Exception):
    """Stands for the death of the process."""
