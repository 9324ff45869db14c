"""The pictures of a bench."""

from __future__ import annotations

from leadout.bench.predict import CLOSE
from leadout.bench.result import BenchResult, CellResult
from leadout.bench.settings import BARE
from leadout.bench.statistics import Spread, percentile
from leadout.pages import svg
from leadout.pages.standalone import standalone

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
