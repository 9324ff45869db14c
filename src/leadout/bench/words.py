"""A bench in words and rows, for the terminal, the page and the CSV file alike."""

from __future__ import annotations

from leadout.bench.result import BenchResult, CellResult, Latency
from leadout.bench.settings import BARE
from leadout.bench.statistics import Spread

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
