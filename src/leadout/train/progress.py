"""The log of a run: one JSON object a line, for each step and each validation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, TypeAdapter
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from leadout.console import ShownBar
from leadout.evaluate.acceptance import Validation
from leadout.files import replacing
from leadout.settings import SettingsError
from leadout.train.config import TrainConfig
from leadout.train.served import ServedAcceptance

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


# What a training run came to: the numbers a person needs before deploying the drafter.


class TrainReport(BaseModel):
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
    # What the target and its text were; None in records of earlier versions.
    target_fingerprint: str | None = None
    template_hash: str | None = None
    thinking: bool | None = None

    def text(self) -> str:
        by_source = ", ".join(
            f"{name} {found.acceptance_length:.2f}"
            for name, found in self.validation.by_source.items()
        )
        return (
            f"{self.drafter}: a drafter for {self.target}, {self.minutes:.0f} minutes, best at "
            f"step {self.best_step} of {self.steps}\n"
            f"held-out acceptance length {self.validation.overall.acceptance_length:.3f} "
            f"({by_source})\n"
            f"served by vLLM {self.served.served:.3f}, predicted for the same texts "
            f"{self.served.predicted:.3f} ({self.served.difference:.1%} apart)"
        )


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


# What a person sees while a drafter trains: a bar with the acceptance length so far.

LINE_EVERY_STEPS = 20  # where there is no terminal


def say(text: str) -> None:
    """A line before work that takes a while and has no bar."""
    Console(stderr=True).print(f"leadout train: {text}", markup=False, highlight=False)


class TrainProgress(ShownBar):
    """Listens to a run; silent on all ranks but the leading one."""

    def __init__(self, steps: int, speaks: bool) -> None:
        self._console = Console(stderr=True, quiet=not speaks)
        self._bar = Progress(
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("steps", total=steps, numbers="")
        self._accepted = "no validation yet"

    def __call__(self, record: Record) -> None:
        if isinstance(record, StepRecord):
            numbers = (
                f"loss {record.loss:.3f}, {record.drafts_hit:.2f} on training text, "
                f"{self._accepted}"
            )
            self._bar.update(self._task, completed=record.step, numbers=numbers)
            if not self._console.is_terminal and record.step % LINE_EVERY_STEPS == 0:
                self._console.print(
                    f"step {record.step}, {record.seconds / 60:.1f} min, {numbers}", highlight=False
                )
            return
        reached = record.validation.overall.acceptance_length
        self._accepted = f"held-out acceptance length {reached:.3f}"
        self._console.print(
            f"step {record.step}, {record.seconds / 60:.1f} min: {self._accepted}", highlight=False
        )


# A run's curves as TensorBoard events, for those who ask for them.


def require_tensorboard() -> None:
    if find_spec("tensorboard") is None:
        raise SettingsError(
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
