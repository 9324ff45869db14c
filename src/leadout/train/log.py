"""The log of a run: one JSON object a line, for each step and each validation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, TypeAdapter

from leadout.checkpoints.store import replacing
from leadout.train.validate import Validation

LOG = "log.jsonl"


class StepRecord(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["step"] = "step"
    step: int
    seconds: float
    loss: float
    learning_rate: float
    gradient_norm: float
    blocks_per_second: float
    drafts_hit: float  # leading slots right per training block, and one: near acceptance length


class ValidationRecord(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["validation"] = "validation"
    step: int
    seconds: float
    validation: Validation


Record = StepRecord | ValidationRecord
Listener = Callable[[Record], None]
_ANY: TypeAdapter[Record] = TypeAdapter(Record)


class Log:
    """Appends records; what a continued run will do again is dropped first."""

    def __init__(self, folder: Path, steps_done: int) -> None:
        self._path = folder / LOG
        if self._path.exists():
            kept = [record for record in read_log(folder) if record.step <= steps_done]
            with replacing(self._path) as temporary:
                temporary.write_text("".join(f"{r.model_dump_json()}\n" for r in kept))

    def __call__(self, record: Record) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(record.model_dump_json() + "\n")


def read_log(folder: Path) -> Iterator[Record]:
    """Every whole record."""
    path = folder / LOG
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            if line.endswith("\n"):
                yield _ANY.validate_json(line)
