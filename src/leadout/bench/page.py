"""The HTML page and the charts of a bench, and all the files that it leaves in its folder."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from pathlib import Path

from leadout.bench.predict import CLOSE
from leadout.bench.report import (
    AGAIN,
    LATENCY_HEADS,
    MEANS,
    latency_rows,
    mean_heads,
    mean_rows,
    method,
    prediction_sentence,
    throughput_heads,
    throughput_rows,
)
from leadout.bench.results import BenchResult, CellResult
from leadout.bench.setup import BARE
from leadout.files import write_text
from leadout.report import charts, html
from leadout.stats import percentile

RESULTS, TABLE, REPORT, PICTURE = "results.json", "results.csv", "report.html", "speedup.svg"
_REQUESTS = "concurrent requests"
_PERCENTILES = (1, 5, 10, 25, 50, 75, 90, 95, 99)


def write_files(result: BenchResult, folder: Path) -> list[Path]:
    """JSON, CSV, the page and, if there is a speed-up, its chart."""
    texts = {
        RESULTS: result.model_dump_json(indent=1) + "\n",
        TABLE: _csv(result),
        REPORT: page(result),
    }
    if result.geometric_means:
        texts[PICTURE] = picture(result)
    for name, text in texts.items():
        write_text(folder / name, text)
    return [folder / name for name in texts]


def _csv(result: BenchResult) -> str:
    rows = [_row(cell) for cell in result.cells]
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _row(cell: CellResult) -> dict[str, object]:
    return {
        "prompt_set": cell.prompt_set,
        "concurrency": cell.concurrency,
        "arm": cell.arm,
        "rounds": len(cell.rounds),
        "tokens_per_second": cell.tokens_per_second.median,
        "tokens_per_second_low": cell.tokens_per_second.low,
        "tokens_per_second_high": cell.tokens_per_second.high,
        "speedup": cell.speedup,
        "speedup_95_low": cell.low,
        "speedup_95_high": cell.high,
        "processor_ratio": None if cell.processor_ratio is None else cell.processor_ratio.value,
        "processor_seconds_per_token": cell.processor_seconds_per_token.median,
        "acceptance_length": cell.acceptance_length,
        "predicted_speedup": cell.predicted_speedup,
        "ttft_ms": None if cell.ttft is None else cell.ttft.median,
        "ttft_p99_ms": None if cell.ttft is None else cell.ttft.p99,
        "tpot_ms": cell.tpot.median,
        "tpot_p99_ms": cell.tpot.p99,
        "itl_ms": cell.itl.median,
        "itl_p99_ms": cell.itl.p99,
    }


def page(result: BenchResult) -> str:
    settings, provenance = result.settings, result.provenance
    sections = [
        _means_section(result),
        *(_set_section(result, prompt_set) for prompt_set in settings.prompts),
        html.Section("Acceptance by position", _drawings(_acceptance_by_position(result))),
        _latency_section(result),
        _prediction_section(result),
        _setup_section(result),
    ]
    return html.render(
        html.Page(
            command="bench",
            heading=f"{settings.target}: {', '.join(result.arms)}",
            facts=[
                f"{settings.rounds} rounds",
                f"{settings.output_tokens} output tokens per request",
                provenance.machine,
                provenance.date,
            ],
            sections=[section for section in sections if section.blocks],
        )
    )


def _drawings(chart: charts.Chart | None) -> list[html.Block]:
    return [] if chart is None else [html.Drawing(chart)]


def _means_section(result: BenchResult) -> html.Section:
    chart = _mean_speedups(result)
    explained = html.Text(method(result), soft=True)
    if chart is None:
        return html.Section("", [explained])
    table = html.Table(mean_heads(result), mean_rows(result), text_columns=1)
    return html.Section(MEANS, [explained, html.Drawing(chart), table])


def _set_section(result: BenchResult, prompt_set: str) -> html.Section:
    throughput = throughput_rows(result, prompt_set)
    latency = html.Table(LATENCY_HEADS, latency_rows(result, prompt_set), text_columns=2)
    return html.Section(
        prompt_set,
        [
            *_drawings(_speedups_of_set(result, prompt_set)),
            html.Table(throughput_heads(result), throughput, text_columns=1),
            html.Folded("Latency", [latency]),
        ],
    )


def _latency_section(result: BenchResult) -> html.Section:
    blocks: list[html.Block] = []
    for concurrency in sorted(result.settings.concurrencies):
        heading = html.Heading(f"Concurrency {concurrency}")
        blocks += [heading, *_drawings(_latencies(result, concurrency))]
    return html.Section("Time per output token (TPOT)", blocks)


def _prediction_section(result: BenchResult) -> html.Section:
    drawn = _drawings(_predictions(result))
    explained = [html.Text(prediction_sentence(result), soft=True)] if drawn else []
    return html.Section("Predicted and measured speed-up", [*explained, *drawn])


def _setup_section(result: BenchResult) -> html.Section:
    arms = [
        [
            arm.name,
            arm.kind,
            arm.drafter or "",
            "" if arm.draft_tokens is None else str(arm.draft_tokens),
        ]
        for arm in result.settings.arms
    ]
    versions = [list(pair) for pair in result.provenance.versions.items()]
    blocks: list[html.Block] = [
        html.Table(["arm", "kind", "drafter", "K"], arms, text_columns=3),
        html.Command(" ".join(result.settings.flags), label="All servers:"),
        html.Command(result.provenance.command, label="Command:"),
        html.Table(["", "version"], versions, text_columns=2),
    ]
    return html.Section("", [html.Folded("Arms, settings and versions", blocks)])


# Charts; None where there is nothing to draw.


def picture(result: BenchResult) -> str:
    """The chart for a README: mean speed-ups, and each prompt set at the lowest concurrency."""
    lowest = min(result.settings.concurrencies)
    by_set = _by_arm(
        result,
        lambda arm: [
            _point(name, cell.speedup, cell.low, cell.high)
            for name in result.settings.prompts
            if (cell := result.cell(name, lowest, arm)) is not None
        ],
    )
    drawn = [_mean_speedups(result)]
    if by_set:
        drawn.append(charts.bars(by_set, f"Speed-up by prompt set at concurrency {lowest}"))
    return charts.picture([chart for chart in drawn if chart is not None])


def _by_arm(
    result: BenchResult, points: Callable[[str], Sequence[charts.Point | None]]
) -> list[charts.Series]:
    """A series for each compared arm that has points."""
    series = []
    for arm in result.compared_arms:
        found = [point for point in points(arm) if point is not None]
        if found:
            series.append(charts.Series(arm, found))
    return series


def _point(
    label: str, value: float | None, low: float | None, high: float | None
) -> charts.Point | None:
    """With the 95% interval, if there is one."""
    return None if value is None else charts.Point(label, value, low, high)


def _mean_speedups(result: BenchResult) -> charts.Chart | None:
    """The arms, and bare vLLM against itself as the error of the method."""
    series = _by_arm(
        result,
        lambda arm: [
            _point(str(concurrency), mean.speedup, mean.low, mean.high)
            for concurrency in sorted(result.settings.concurrencies)
            if (mean := result.mean(concurrency, arm)) is not None
        ],
    )
    again = [
        charts.Point(str(each.concurrency), each.ratio, each.low, each.high)
        for each in result.bare_against_bare
    ]
    if not series:
        return None
    drawn = [*series, charts.Series(AGAIN, again)] if again else series
    return charts.dots(drawn, MEANS, _REQUESTS, "speed-up")


def _speedups_of_set(result: BenchResult, prompt_set: str) -> charts.Chart | None:
    series = _by_arm(
        result,
        lambda arm: [
            _point(str(concurrency), cell.speedup, cell.low, cell.high)
            for concurrency in sorted(result.settings.concurrencies)
            if (cell := result.cell(prompt_set, concurrency, arm)) is not None
        ],
    )
    title = f"speed-up on {prompt_set}"
    return charts.dots(series, title, _REQUESTS, "speed-up") if series else None


def _acceptance_by_position(result: BenchResult) -> charts.Chart | None:
    """Over all drafted blocks of an arm."""

    def points(arm: str) -> list[charts.Point]:
        cells = [cell for cell in result.cells if cell.arm == arm]
        drafts = [sum(each.drafts for each in cell.rounds) for cell in cells]
        positions = max((len(cell.acceptance_by_position) for cell in cells), default=0)
        return [
            charts.Point(
                str(position + 1),
                sum(
                    cell.acceptance_by_position[position] * count
                    for cell, count in zip(cells, drafts, strict=True)
                    if position < len(cell.acceptance_by_position)
                )
                / sum(drafts),
            )
            for position in range(positions)
        ]

    series = _by_arm(result, points)
    labels = ("position in the block", "share of blocks that accept it")
    return charts.lines(series, "acceptance by position", *labels) if series else None


def _latencies(result: BenchResult, concurrency: int) -> charts.Chart | None:
    """Percentiles of the time per output token."""
    series = []
    for arm in [*result.compared_arms, BARE]:  # bare last: the other arms keep their colours
        times = [
            time
            for cell in result.cells
            if (cell.concurrency, cell.arm) == (concurrency, arm)
            for each in cell.rounds
            for time in each.tpot_ms
        ]
        if times:
            points = [charts.Point(f"{p}%", percentile(times, p)) for p in _PERCENTILES]
            series.append(charts.Series(arm, points))
    labels = ("percentile of requests", "TPOT, ms")
    return (
        charts.lines(series, f"latency at concurrency {concurrency}", *labels) if series else None
    )


def _predictions(result: BenchResult) -> charts.Chart | None:
    series = []
    for arm in result.compared_arms:
        points = [
            (f"{c.prompt_set}, concurrency {c.concurrency}", c.speedup, c.predicted_speedup)
            for c in result.cells
            if c.arm == arm and c.predicted_speedup is not None and c.speedup is not None
        ]
        if points:
            series.append((arm, points))
    names = ("measured speed-up", "predicted speed-up")
    return (
        charts.scatter(series, "predicted and measured speed-up", names, CLOSE) if series else None
    )
