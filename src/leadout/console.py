"""Progress bars on stderr, for commands that take a while."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class ShownBar:
    """A bar that is there for the length of a `with` block; `_bar` is the subclass's to make."""

    _bar: Progress

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()


class StageBars(ShownBar):
    """A bar for each stage; where there is no terminal, a line when one begins."""

    def __init__(self, command: str) -> None:
        self._command = command
        self._console = Console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )

    def stage(self, name: str, total: int) -> Callable[[], None]:
        if not self._console.is_terminal:
            line = f"leadout {self._command}: {name}"
            self._console.print(line, markup=False, highlight=False)
        task = self._bar.add_task(name, total=total)
        return lambda: self._bar.advance(task)
