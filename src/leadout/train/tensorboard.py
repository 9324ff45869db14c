"""A run's curves as TensorBoard events, for those who ask for them."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from leadout.train.config import InvalidTrainConfigError
from leadout.train.log import Record, StepRecord


def require_tensorboard() -> None:
    if find_spec("tensorboard") is None:
        raise InvalidTrainConfigError(
            "--tensorboard: found no package tensorboard, wanted it; pip install tensorboard, or "
            "leave the flag out: log.jsonl has the same numbers"
        )


class TensorBoard:
    """Listens to a run and writes scalars beside its log."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tensorboard"))

    def __call__(self, record: Record) -> None:
        if isinstance(record, StepRecord):
            scalars = {
                "train/loss": record.loss,
                "train/drafts_hit": record.drafts_hit,
                "train/learning_rate": record.learning_rate,
            }
        else:
            found = record.validation
            scalars = {"validation/acceptance_length": found.overall.acceptance_length}
            for source, each in found.by_source.items():
                scalars[f"validation/{source}"] = each.acceptance_length
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, record.step)

    def close(self) -> None:
        """Write what still waits; without it the last records would be lost."""
        self._writer.close()
