"""What a run reports: its log, progress on the terminal, TensorBoard events, the final report."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, TypeAdapter

from leadout.console import Progress
from leadout.evaluate.acceptance import Validation
from leadout.evaluate.hidden_states import StatesOnDisk
from leadout.files import write_text
from leadout.train.config import TrainConfig, TrainError
from leadout.train.served import ServedAcceptance
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
    with (folder / LOG).open(encoding="utf-8") as lines:
        for line in lines:
            if line.endswith("\n"):
                yield _RECORD.validate_json(line)


class Curves(NamedTuple):
    steps: list[StepRecord]
    validations: list[ValidationRecord]

    @property
    def best(self) -> Validation:
        found = max(self.validations, key=lambda r: r.validation.overall.acceptance_length)
        return found.validation


def curves_of(records: Iterable[Record]) -> Curves:
    everything = list(records)
    return Curves(
        [record for record in everything if isinstance(record, StepRecord)],
        [record for record in everything if isinstance(record, ValidationRecord)],
    )


class TrainReport(BaseModel):
    """The result of a run: the numbers a person needs before deploying the drafter."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    target: str
    drafter: str
    steps: int
    best_step: int
    minutes: float
    data_hash: str
    response_tokens: int
    config: TrainConfig
    validation: Validation  # of the best step
    served: ServedAcceptance
    # Identity of the target and its template; None in records of earlier versions.
    target_fingerprint: str | None = None
    template_hash: str | None = None
    thinking: bool | None = None

    def text(self) -> str:
        by_source = ", ".join(
            f"{name} {found.acceptance_length:.2f}"
            for name, found in self.validation.by_source.items()
        )
        return (
            f"{self.drafter}: drafter for {self.target}, trained for {self.minutes:.0f} minutes, "
            f"best at step {self.best_step} of {self.steps}\n"
            f"held-out acceptance length {self.validation.overall.acceptance_length:.3f} tokens "
            f"per step ({by_source})\n"
            f"served by vLLM {self.served.served:.3f}, predicted for the same texts "
            f"{self.served.predicted:.3f} ({self.served.difference:.1%} difference)"
        )


def progress_listener(progress: Progress, run: Run) -> Listener:
    """Shows a run's steps as a stage of `progress`, with its loss and latest acceptance length."""
    status = read_status(run.folder)
    done = status.step if status else 0
    past = [r for r in read_log(run.folder) if r.step <= done] if done else []
    validations = curves_of(past).validations
    acceptance = f", acceptance {_acceptance(validations[-1]):.2f}" if validations else ""
    advance = progress.stage("training", run.steps, done)
    computes_states = isinstance(run.source, StatesOnDisk) and not run.source.has_all(
        run.corpus.split.train
    )
    if validations:
        progress.say(
            f"continuing after step {done}; held-out acceptance length "
            f"{_acceptance(validations[-1]):.3f} at step {validations[-1].step}"
        )
    if computes_states:
        epoch = math.ceil(len(run.corpus.split.train) / run.config.batch_sequences)
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


def require_tensorboard() -> None:
    if find_spec("tensorboard") is None:
        raise TrainError(
            "--tensorboard requires the package tensorboard: pip install tensorboard, or omit the "
            "flag; log.jsonl has the same numbers."
        )


class TensorBoard:
    """A listener that writes scalars beside the run's log."""

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
        """Flush; without it the last records would be lost."""
        self._writer.close()
