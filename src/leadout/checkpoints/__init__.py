"""Drafter checkpoints: the two published formats, read strictly and written safely."""

from leadout.checkpoints.checkpoint import (
    Checkpoint,
    Format,
    convert,
    load_drafter,
    load_weights,
    read_checkpoint,
    write_checkpoint,
)
from leadout.checkpoints.errors import CheckpointError, UnsupportedCheckpointError

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "Format",
    "UnsupportedCheckpointError",
    "convert",
    "load_drafter",
    "load_weights",
    "read_checkpoint",
    "write_checkpoint",
]
