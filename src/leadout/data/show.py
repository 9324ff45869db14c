"""What a person sees of a data job: a progress bar on stderr, and a table at its end."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from leadout.bars import ShownBar
from leadout.data.manifest import Manifest
from leadout.shards import Sample

LINE_EVERY_SECONDS = 30.0


class DataProgress(ShownBar):
    """Samples done, response tokens per second, and the time left at this run's pace.

    A terminal shows a bar; a log file gets a line now and then.
    """

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._bar = Progress(
            TextColumn("samples"),
            BarColumn(),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[pace]}"),
            TimeElapsedColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("samples", total=1, pace="starting the engine")
        self._started = self._spoke = time.monotonic()
        self._at_start = 0
        self._tokens = 0

    def report(self, done: int, total: int, sample: Sample | None) -> None:
        now = time.monotonic()
        if sample is None:
            self._started, self._at_start = now, done
            self._bar.update(self._task, completed=done, total=total)
            return
        self._tokens += len(sample.response)
        elapsed = max(now - self._started, 1e-3)
        left = timedelta(seconds=round((total - done) * elapsed / (done - self._at_start)))
        pace = f"{self._tokens / elapsed:,.0f} tokens/s, {left} left"
        self._bar.update(self._task, completed=done, total=total, pace=pace)
        if not self._console.is_terminal and now - self._spoke > LINE_EVERY_SECONDS:
            self._spoke = now
            self._console.print(f"samples {done}/{total}, {pace}", highlight=False)


def print_manifest(manifest: Manifest, out: Path) -> None:
    table = Table(box=box.SIMPLE)
    for heading in ("source", "samples", "prompt tokens", "response tokens"):
        table.add_column(heading, justify="left" if heading == "source" else "right")
    for source, count in manifest.counts.items():
        numbers = (count.samples, count.prompt_tokens, count.response_tokens)
        table.add_row(source, *(f"{number:,}" for number in numbers))
    console = Console()
    console.print(table)
    if manifest.skipped:
        console.print(
            f"skipped {manifest.skipped:,} conversations: longer than --max-length leaves room "
            "for, or with a user turn that the target left empty"
        )
    console.print(
        f"{out}: answers of {manifest.job.target}, part {manifest.part} of {manifest.job.parts}"
    )
