"""What commands show on a terminal: progress of stages on stderr, tables, safe text.

With `Progress` a terminal shows one bar for each stage with the time that is left; a log file gets
a line when a stage begins and then one at sensible intervals.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Protocol, Self

from rich import box
from rich import progress as rich_progress
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from leadout.errors import printable

# A log file gets a line after this time, or earlier if at least a tenth of the work was done.
LINE_SECONDS = 30.0
MIN_LINE_SECONDS = 5.0
LINE_SHARE = 0.1

_column = partial(Column, no_wrap=True, overflow="ellipsis")


class Advance(Protocol):
    """Reports that `steps` more steps of a stage are done; `note` is shown beside the bar."""

    def __call__(self, steps: int = 1, note: str = "") -> None: ...


class Progress:
    """Progress of a command's stages; use it as a context manager."""

    def __init__(self, command: str, *, quiet: bool = False, console: Console | None = None):
        self._command = command
        self._console = console or Console(stderr=True, quiet=quiet)
        self._bars = rich_progress.Progress(
            rich_progress.TextColumn(
                "{task.description}", markup=False, table_column=_column(max_width=28)
            ),
            rich_progress.BarColumn(bar_width=10),
            rich_progress.TextColumn("{task.fields[count]}", table_column=_column()),
            _TimeColumn(table_column=_column(min_width=12)),
            rich_progress.TextColumn(
                "{task.fields[note]}", markup=False, table_column=_column(ratio=1)
            ),
            console=self._console,
            expand=True,
            disable=quiet or not self._console.is_terminal,
        )

    @classmethod
    def silent(cls) -> Progress:
        """For callers that show nothing, such as library code and tests."""
        return cls("", quiet=True)

    @property
    def has_bars(self) -> bool:
        """Whether a terminal shows bars; a log has lines instead."""
        return self._console.is_terminal

    def stage(self, name: str, total: int | None = None, done: int = 0) -> Advance:
        """Begin a stage of `total` steps, of which an earlier run may have `done` some.

        Without a total the bar only pulses, for work whose length is not known.
        """
        if not self._console.is_terminal:
            self.say(name)
        task = self._bars.add_task(
            printable(name), total=total, completed=done, count="", note="", stage=None
        )
        stage = _Stage(printable(name), total, done, done, time.monotonic())
        self._bars.update(task, count=stage.count, stage=stage)
        printed, printed_at = done, stage.started

        def advance(steps: int = 1, note: str = "") -> None:
            nonlocal printed, printed_at
            stage.done += steps
            self._bars.update(task, advance=steps, count=stage.count, note=printable(note))
            if self._console.is_terminal:
                return
            now = time.monotonic()
            waited, share = now - printed_at, (stage.done - printed) / (total or float("inf"))
            if waited >= LINE_SECONDS or (waited >= MIN_LINE_SECONDS and share >= LINE_SHARE):
                printed, printed_at = stage.done, now
                self.say(stage.line(now, note))

        return advance

    def say(self, text: str) -> None:
        """A line above the bars, or in the log."""
        line = f"leadout {self._command}: {printable(text)}"
        self._bars.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()


@dataclass(slots=True)
class _Stage:
    name: str
    total: int | None
    done_before: int  # by an earlier run: says nothing about this run's pace
    done: int
    started: float

    @property
    def count(self) -> str:
        return "" if self.total is None else f"{self.done}/{self.total}"

    def times(self, now: float) -> str:
        elapsed = now - self.started
        here = self.done - self.done_before
        if self.total is None or here <= 0 or self.done >= self.total:
            return _clock(elapsed)
        return f"{_clock((self.total - self.done) * elapsed / here)} left"

    def line(self, now: float, note: str) -> str:
        count = f" {self.count}" if self.count else ""
        return f"{self.name}{count}, {self.times(now)}{', ' if note else ''}{note}"


class _TimeColumn(rich_progress.ProgressColumn):
    """The time left, or the time a stage has taken where that is not known.

    rich's own estimate needs several steps within 30 seconds, which slow steps never reach.
    """

    def render(self, task: rich_progress.Task) -> Text:
        if task.finished:
            return Text(_clock(task.finished_time or 0.0))
        stage: _Stage | None = task.fields["stage"]
        return Text("" if stage is None else stage.times(time.monotonic()))


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


def safe(text: str) -> Text:
    """Text that may come from a file: no markup, no control characters."""
    return Text(printable(text))


def table(
    title: str | None, headings: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1
) -> Table:
    """A table of text cells: the first `left` columns left-aligned, the others right-aligned."""
    made = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for place, heading in enumerate(headings):
        made.add_column(safe(heading), justify="left" if place < left else "right", overflow="fold")
    for row in rows:
        made.add_row(*(safe(cell) for cell in row))
    return made


def facts_table(facts: Iterable[tuple[str, str]], title: str | None = None) -> Table:
    """Labels and their values, one pair a line."""
    made = Table(title=title, title_justify="left", box=None, show_header=False)
    made.add_column(style="bold", no_wrap=True)
    made.add_column(overflow="fold")
    for label, text in facts:
        made.add_row(safe(label), safe(text))
    return made
