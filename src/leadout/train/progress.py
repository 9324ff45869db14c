"""What a run reports while it trains: its log, and progress on the terminal."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from leadout.console import Progress
from leadout.evaluate.acceptance import Validation
from leadout.evaluate.hidden_states import StatesOnDisk
from leadout.files import first_problem, read_lines, write_text
from leadout.train.config import TrainError
from leadout.train.state import read_status

if TYPE_CHECKING:
    from leadout.train.run import Run

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
    drafts_hit: float  # 1 + correct leading slots per training block: close to acceptance length


class ValidationRecord(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["validation"] = "validation"
    step: int
    seconds: float
    validation: Validation


Record = StepRecord | ValidationRecord
Listener = Callable[[Record], None]
_RECORD: TypeAdapter[Record] = TypeAdapter(Record)


class Log:
    """Appends records to a run's log, after removing those that a continued run will repeat."""

    def __init__(self, folder: Path, steps_done: int) -> None:
        self._path = folder / LOG
        if self._path.exists():
            kept = [record for record in read_log(folder) if record.step <= steps_done]
            write_text(self._path, "".join(f"{record.model_dump_json()}\n" for record in kept))

    def __call__(self, record: Record) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(record.model_dump_json() + "\n")


def read_log(folder: Path) -> Iterator[Record]:
    """All complete records; a kill may leave half a line at the end."""
    path = folder / LOG
    for number, line in enumerate(read_lines(path), start=1):
        if not line.endswith(b"\n"):
            continue
        try:
            yield _RECORD.validate_json(line)
        except ValidationError as problem:
            raise TrainError(
                f"{path}, line {number}: {first_problem(problem, 'line')}; expected a record that "
                "`leadout train` wrote. Remove the line, or start another run."
            ) from None


class Curves(NamedTuple):
    steps: list[StepRecord]
    validations: list[ValidationRecord]

    @property
    def best(self) -> Validation:
        return max(self.validations, key=_acceptance).validation


def curves_of(records: Iterable[Record]) -> Curves:
    everything = list(records)
    return Curves(
        [record for record in everything if isinstance(record, StepRecord)],
        [record for record in everything if isinstance(record, ValidationRecord)],
    )


def progress_listener(progress: Progress, run: Run) -> Listener:
    """Shows a run's steps as a stage of `progress`, with its loss and latest acceptance length."""
    status = read_status(run.folder)
    done = status.step if status else 0
    past = [r for r in read_log(run.folder) if r.step <= done] if done else []
    validations = curves_of(past).validations
    acceptance = ""
    advance = progress.stage("training", run.steps, done)
    if validations:
        last = validations[-1]
        acceptance = f", acceptance {_acceptance(last):.2f}"
        progress.say(
            f"continuing after step {done}; held-out acceptance length {_acceptance(last):.3f} at "
            f"step {last.step}"
        )
    train = run.corpus.split.train
    if isinstance(run.source, StatesOnDisk) and not run.source.has_all(train):
        epoch = math.ceil(len(train) / run.config.batch_sequences)
        progress.say(
            "computing the target's hidden states during the first epoch "
            f"(until step {min(epoch, run.steps)}); later steps are faster"
        )
        advance(0, "computing target states")

    def listen(record: Record) -> None:
        nonlocal acceptance
        if isinstance(record, ValidationRecord):
            acceptance = f", acceptance {_acceptance(record):.2f}"
            progress.say(
                f"step {record.step} of {run.steps}, {record.seconds / 60:.1f} min: held-out "
                f"acceptance length {_acceptance(record):.3f}"
            )
            return
        validates = record.step == run.steps or record.step % run.config.validate_every == 0
        note = f"loss {record.loss:.2f}{acceptance}"
        advance(1, f"{note}, validating" if validates else note)

    return listen


def _acceptance(record: ValidationRecord) -> float:
    return record.validation.overall.acceptance_length
