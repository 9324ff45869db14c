"""What a person sees while a drafter trains: a bar with the acceptance length so far."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from leadout.bars import ShownBar
from leadout.train.log import Record, StepRecord

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
