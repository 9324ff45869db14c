"""A bench in words and rows, for the terminal, the page and the CSV file alike."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from html import escape
from pathlib import Path

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

from leadout.bench.predict import CLOSE
from leadout.bench.results import BenchResult, CellResult, Latency
from leadout.bench.settings import BARE, BenchPlan
from leadout.checkpoints.errors import printable
from leadout.console import ShownBar
from leadout.files import replacing
from leadout.report import charts as svg
from leadout.report.html import document, folded, standalone, table
from leadout.stats import Spread, percentile

CONCURRENCY = "conc."
HOW = (
    "Speed-up: output tokens per second over bare vLLM on the same prompts in the same round; "
    "median of the rounds, smallest and largest in brackets. Every request writes the same number "
    "of tokens (the end of text is ignored), greedily, and no server keeps prefixes. AL: tokens "
    "for each step that drafted, the target's own included."
)


def concurrencies_down(result: BenchResult) -> list[int]:
    return sorted(result.settings.concurrencies, reverse=True)


def speedup_words(spread: Spread | None) -> str:
    if spread is None:
        return ""
    return f"{spread.median:.2f}x ({spread.low:.2f}-{spread.high:.2f})"


def throughput_heads(result: BenchResult) -> list[str]:
    heads = [CONCURRENCY, f"{BARE} tok/s"]
    for arm in result.compared_arms:
        heads += [f"{arm} tok/s", "speed-up", "AL"]
    return heads


def throughput_rows(result: BenchResult, prompt_set: str) -> list[list[str]]:
    """As DFlash results are published: the largest concurrency first."""
    rows = []
    for concurrency in concurrencies_down(result):
        row = [str(concurrency), _rate(result.cell(prompt_set, concurrency, BARE))]
        for arm in result.compared_arms:
            cell = result.cell(prompt_set, concurrency, arm)
            row.append(_rate(cell))
            row.append(speedup_words(None if cell is None else cell.speedup_spread))
            row.append(_length(cell))
        rows.append(row)
    return rows


LATENCY_HEADS = [CONCURRENCY, "arm", "TTFT ms", "p99", "TPOT ms", "p99", "ITL ms", "p99"]


def latency_rows(result: BenchResult, prompt_set: str) -> list[list[str]]:
    rows = []
    for concurrency in concurrencies_down(result):
        for arm in result.arms:
            cell = result.cell(prompt_set, concurrency, arm)
            if cell is not None:
                times = [*_times(cell.ttft), *_times(cell.tpot), *_times(cell.itl)]
                rows.append([str(concurrency), arm, *times])
    return rows


def mean_rows(result: BenchResult) -> list[list[str]]:
    """Geometric means over the prompt sets: a row for each concurrency, a column for each arm."""
    rows = []
    for concurrency in concurrencies_down(result):
        means = [result.mean(concurrency, arm) for arm in result.compared_arms]
        shown = [speedup_words(None if m is None else m.speedup_spread) for m in means]
        rows.append([str(concurrency), *shown])
    return rows


def prediction_words(result: BenchResult) -> str:
    if result.prediction is None:
        return ""
    return (
        f"The cost model of the tuned file is within 15% of the measured speed-up in "
        f"{result.prediction.within_15_percent:.0%} of {result.prediction.cells} cells."
    )


def _rate(cell: CellResult | None) -> str:
    return "" if cell is None else f"{cell.tokens_per_second.median:.1f}"


def _length(cell: CellResult | None) -> str:
    return "" if cell is None or cell.acceptance_length is None else f"{cell.acceptance_length:.2f}"


def _times(latency: Latency) -> list[str]:
    return [f"{latency.median:.1f}", f"{latency.p99:.1f}"]


# The pictures of a bench.

_PERCENTS = (1, 5, 10, 25, 50, 75, 90, 95, 99)
_AT_ONCE = "requests at a time"


def speedup_of_set(result: BenchResult, prompt_set: str) -> str:
    """Speed-up of every arm by concurrency, the rounds' smallest and largest as whiskers."""
    series = []
    for arm in result.compared_arms:
        cells = [result.cell(prompt_set, c, arm) for c in result.settings.concurrencies]
        points = [
            _point(str(cell.concurrency), cell.speedup_spread)
            for cell in cells
            if cell is not None and cell.speedup_spread is not None
        ]
        if points:
            series.append(svg.Series(arm, points))
    return svg.against(series, f"speed-up on {prompt_set}", _AT_ONCE) if series else ""


def mean_speedup(result: BenchResult) -> str:
    series = []
    for arm in result.compared_arms:
        means = [result.mean(c, arm) for c in result.settings.concurrencies]
        points = [_point(str(m.concurrency), m.speedup_spread) for m in means if m is not None]
        if points:
            series.append(svg.Series(arm, points))
    return svg.against(series, "geometric mean of the speed-ups", _AT_ONCE) if series else ""


def speedup_by_set(result: BenchResult, concurrency: int) -> str:
    series = []
    for arm in result.compared_arms:
        cells = [result.cell(name, concurrency, arm) for name in result.settings.prompts]
        points = [
            _point(cell.prompt_set, cell.speedup_spread)
            for cell in cells
            if cell is not None and cell.speedup_spread is not None
        ]
        if points:
            series.append(svg.Series(arm, points))
    return svg.bars(series, f"speed-up at concurrency {concurrency}") if series else ""


def acceptance(result: BenchResult) -> str:
    """By position in the block, of all drafted blocks of an arm."""
    series = []
    for arm in result.compared_arms:
        shares = _pooled([cell for cell in result.cells if cell.arm == arm])
        points = [svg.Point(str(n), share) for n, share in enumerate(shares, start=1)]
        if points:
            series.append(svg.Series(arm, points))
    below = "position in the block; height: share of drafted blocks in which the draft stood"
    return svg.lines(series, "acceptance by position", below) if series else ""


def _pooled(cells: list[CellResult]) -> list[float]:
    drafts = {id(cell): sum(each.drafts for each in cell.rounds) for cell in cells}
    positions = max((len(cell.acceptance_by_position) for cell in cells), default=0)
    return [
        sum(
            cell.acceptance_by_position[p] * drafts[id(cell)]
            for cell in cells
            if p < len(cell.acceptance_by_position)
        )
        / sum(drafts.values())
        for p in range(positions)
    ]


def latency(result: BenchResult, concurrency: int) -> str:
    """How long a token takes, by the share of requests that are as fast or faster."""
    series = []
    for arm in [*result.compared_arms, BARE]:  # bare last: arms keep their colours
        times = [
            time
            for cell in result.cells
            if (cell.concurrency, cell.arm) == (concurrency, arm)
            for each in cell.rounds
            for time in each.tpot_ms
        ]
        points = [svg.Point(f"{p}%", percentile(times, p)) for p in _PERCENTS] if times else []
        if points:
            series.append(svg.Series(arm, points))
    below = "share of requests; height: milliseconds per output token after the first (TPOT)"
    return svg.lines(series, f"latency at concurrency {concurrency}", below) if series else ""


def predictions(result: BenchResult) -> str:
    series = []
    for arm in result.compared_arms:
        points = [
            (f"{c.prompt_set}, {c.concurrency} at a time, {arm}", c.speedup, c.predicted_speedup)
            for c in result.cells
            if c.arm == arm and c.predicted_speedup is not None and c.speedup is not None
        ]
        if points:
            series.append((arm, points))
    names = ("measured speed-up", "predicted speed-up")
    return svg.scatter(series, "predicted against measured", names, CLOSE) if series else ""


def picture(result: BenchResult) -> str:
    """The one to show: mean speed-up by concurrency, and each set where requests are fewest."""
    fewest = min(result.settings.concurrencies)
    charts = [
        ("Speed-up over bare vLLM, geometric mean of the prompt sets", mean_speedup(result)),
        (f"Speed-up by prompt set at concurrency {fewest}", speedup_by_set(result, fewest)),
    ]
    return standalone([(heading, chart) for heading, chart in charts if chart])


def _point(label: str, spread: Spread) -> svg.Point:
    return svg.Point(label, spread.median, spread.low, spread.high)


# A bench as one HTML file: no scripts, nothing loaded, every text escaped.


def page(result: BenchResult) -> str:
    name = f"{result.settings.target}: {', '.join(result.arms)}"
    parts = [
        f"<h1>{escape(name)}</h1>",
        f'<p class="soft">{escape(_circumstances(result))}</p>',
        f'<p class="soft">{escape(HOW)}</p>',
        _means(result),
        *(_of_set(result, prompt_set) for prompt_set in result.settings.prompts),
        _titled("Acceptance by position", acceptance(result)),
        _latency(result),
        _predictions(result),
        _how_made(result),
    ]
    return document(f"leadout bench: {name}", parts)


def _circumstances(result: BenchResult) -> str:
    settings, provenance = result.settings, result.provenance
    facts = [
        f"{settings.rounds} rounds",
        f"{settings.output_tokens} output tokens a request",
        provenance.machine,
        provenance.date,
    ]
    return " · ".join(facts)


def _means(result: BenchResult) -> str:
    chart = mean_speedup(result)
    if not chart:
        return ""
    heads = [CONCURRENCY, *result.compared_arms]
    return (
        "<h2>Speed-up over bare vLLM, geometric mean of the prompt sets</h2>"
        f"{chart}{table(heads, mean_rows(result), words=1)}"
    )


def _of_set(result: BenchResult, prompt_set: str) -> str:
    return (
        f"<h2>{escape(prompt_set)}</h2>{speedup_of_set(result, prompt_set)}"
        f"{table(throughput_heads(result), throughput_rows(result, prompt_set), words=1)}"
        f"{folded('Latency', table(LATENCY_HEADS, latency_rows(result, prompt_set), words=2))}"
    )


def _latency(result: BenchResult) -> str:
    shown = "".join(
        f"<h3>{concurrency} at a time</h3>{latency(result, concurrency)}"
        for concurrency in result.settings.concurrencies
    )
    return f"<h2>Latency of a token</h2>{shown}"


def _predictions(result: BenchResult) -> str:
    explained = f'<p class="soft">{escape(prediction_words(result))}</p>'
    return _titled("Predicted against measured", predictions(result), explained)


def _titled(heading: str, chart: str, explained: str = "") -> str:
    return f"<h2>{escape(heading)}</h2>{explained}{chart}" if chart else ""


def _how_made(result: BenchResult) -> str:
    arms = [
        [
            arm.name,
            arm.kind,
            arm.drafter or "",
            "" if arm.draft_tokens is None else str(arm.draft_tokens),
        ]
        for arm in result.settings.arms
    ]
    flags = f"<p>All servers: <code>{escape(' '.join(result.settings.flags))}</code></p>"
    command = f"<p>Made by: <code>{escape(result.provenance.command)}</code></p>"
    versions = [list(pair) for pair in result.provenance.versions.items()]
    content = (
        table(["arm", "kind", "drafter", "K"], arms, words=3)
        + flags
        + command
        + table(["", "version"], versions, words=2)
    )
    return folded("Arms, settings and versions", content)


# What a person sees of a bench in the terminal: a bar while it runs, then the tables.


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


# What a bench leaves in its folder: the result as JSON and CSV, a page, and a picture.

RESULTS, TABLE, REPORT, PICTURE = "results.json", "results.csv", "report.html", "speedup.svg"


def write_files(result: BenchResult, folder: Path) -> list[Path]:
    texts = {
        RESULTS: result.model_dump_json(indent=1) + "\n",
        TABLE: _csv(result),
        REPORT: page(result),
    }
    if result.geometric_means:
        texts[PICTURE] = picture(result)
    for name, text in texts.items():
        with replacing(folder / name) as temporary:
            temporary.write_text(text, encoding="utf-8")
    return [folder / name for name in texts]


def _csv(result: BenchResult) -> str:
    rows = [_row(cell) for cell in result.cells]
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _row(cell: CellResult) -> dict[str, object]:
    spread = cell.speedup_spread
    interval = (None, None) if spread is None or spread.interval is None else spread.interval
    return {
        "prompt_set": cell.prompt_set,
        "concurrency": cell.concurrency,
        "arm": cell.arm,
        "rounds": len(cell.rounds),
        "tokens_per_second": cell.tokens_per_second.median,
        "tokens_per_second_low": cell.tokens_per_second.low,
        "tokens_per_second_high": cell.tokens_per_second.high,
        "speedup": cell.speedup,
        "speedup_low": None if spread is None else spread.low,
        "speedup_high": None if spread is None else spread.high,
        "speedup_95_low": interval[0],
        "speedup_95_high": interval[1],
        "acceptance_length": cell.acceptance_length,
        "predicted_speedup": cell.predicted_speedup,
        "ttft_ms": cell.ttft.median,
        "ttft_p99_ms": cell.ttft.p99,
        "tpot_ms": cell.tpot.median,
        "tpot_p99_ms": cell.tpot.p99,
        "itl_ms": cell.itl.median,
        "itl_p99_ms": cell.itl.p99,
    }
