"""What a person sees of a bench in the terminal: a bar while it runs, then the tables."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console, JustifyMethod
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from leadout.bars import ShownBar
from leadout.bench.plan import BenchPlan
from leadout.bench.result import BenchResult
from leadout.bench.words import (
    CONCURRENCY,
    HOW,
    LATENCY_HEADS,
    latency_rows,
    mean_rows,
    prediction_words,
    throughput_heads,
    throughput_rows,
)
from leadout.checkpoints.errors import printable


class BenchProgress(ShownBar):
    """A bar on stderr; where there is no terminal, a line for each thing that happens."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("", total=None)

    def say(self, text: str) -> None:
        if not self._console.is_terminal:
            self._console.print(f"leadout bench: {text}", markup=False, highlight=False)
        self._bar.update(self._task, description=printable(text))

    def cells(self, total: int, done: int) -> None:
        self._bar.reset(self._task, total=total, completed=done)

    def advance(self) -> None:
        self._bar.advance(self._task)


def print_result(result: BenchResult, console: Console | None = None) -> None:
    console = console or Console()
    for prompt_set in result.settings.prompts:
        rows = throughput_rows(result, prompt_set)
        console.print(_table(prompt_set, throughput_heads(result), rows, words=0))
        rows = latency_rows(result, prompt_set)
        console.print(_table(f"{prompt_set}: latency", LATENCY_HEADS, rows, words=2))
    if result.compared_arms:
        heads = [CONCURRENCY, *result.compared_arms]
        title = "Speed-up over bare vLLM, geometric mean of the prompt sets"
        console.print(_table(title, heads, mean_rows(result), words=0))
        console.print(Text(HOW, style="dim"))
    if result.prediction is not None:
        console.print(Text(prediction_words(result)))


def print_plan(plan: BenchPlan, console: Console | None = None) -> None:
    console = console or Console()
    rates = ", ".join(f"{rate:.0f} at {c}" for c, rate in sorted(plan.rates.items()))
    facts = [
        ("arms", ", ".join(plan.arms)),
        ("prompt sets", ", ".join(plan.prompt_sets)),
        ("concurrencies", ", ".join(map(str, plan.concurrencies))),
        ("rounds", str(plan.rounds)),
        ("cells to measure", f"{plan.cells:,}, {plan.cells_done:,} are done"),
        ("output tokens", f"{plan.output_tokens:,}"),
        ("time", f"about {plan.minutes:.0f} minutes, and the starts of {len(plan.arms)} servers"),
        ("assumed", f"output tokens per second by concurrency, for every arm: {rates}"),
        ("taken from", plan.rates_from),
    ]
    table = Table(box=None, show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for label, text in facts:
        table.add_row(label, Text(printable(text)))
    console.print(table)


def _table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]], words: int) -> Table:
    """The first columns after the concurrency may be words; numbers stand right."""
    table = Table(
        title=printable(title),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
    )
    for place, head in enumerate(heads):
        side: JustifyMethod = "left" if 0 < place < words else "right"
        table.add_column(printable(head).replace(" ", "\n"), justify=side, no_wrap=True)
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    return table
