"""The report of a bench: tables for the terminal, an HTML page, an SVG chart and a CSV file."""

from __future__ import annotations

import csv
import io
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

from rich import box
from rich.console import Console, JustifyMethod
from rich.table import Table
from rich.text import Text

from leadout.bench.predict import CLOSE
from leadout.bench.results import BenchResult, CellResult, Latency
from leadout.bench.settings import BenchSettings
from leadout.bench.setup import BARE, BenchPlan
from leadout.console import facts_table
from leadout.errors import printable
from leadout.files import write_text
from leadout.report import charts, html
from leadout.stats import Spread, percentile

RESULTS, TABLE, REPORT, PICTURE = "results.json", "results.csv", "report.html", "speedup.svg"

MEANS = "Speed-up over bare vLLM, geometric mean over prompt sets"
METHOD = (
    "Speed-up: output tokens per second divided by those of bare vLLM on the same prompts in the "
    "same round; median over rounds, with minimum and maximum in brackets. Every request generates "
    "the same number of tokens (end of text is ignored) with greedy sampling, and prefix caching "
    "is off. AL (acceptance length): tokens per step that drafted, including the target's own."
)
_CONCURRENCY = "conc."
_REQUESTS = "concurrent requests"
_LATENCY_HEADS = [_CONCURRENCY, "arm", "TTFT ms", "p99", "TPOT ms", "p99", "ITL ms", "p99"]
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


# Rows of the tables, in the terminal and on the page.


def _throughput_heads(result: BenchResult) -> list[str]:
    heads = [_CONCURRENCY, f"{BARE} tok/s"]
    for arm in result.compared_arms:
        heads += [f"{arm} tok/s", "speed-up", "AL"]
    return heads


def _throughput_rows(result: BenchResult, prompt_set: str) -> list[list[str]]:
    rows = []
    for concurrency in sorted(result.settings.concurrencies):
        row = [str(concurrency), _rate(result.cell(prompt_set, concurrency, BARE))]
        for arm in result.compared_arms:
            cell = result.cell(prompt_set, concurrency, arm)
            row += [_rate(cell), _speedup(cell), _length(cell)]
        rows.append(row)
    return rows


def _latency_rows(result: BenchResult, prompt_set: str) -> list[list[str]]:
    rows = []
    for concurrency in sorted(result.settings.concurrencies):
        for arm in result.arms:
            cell = result.cell(prompt_set, concurrency, arm)
            if cell is not None:
                times = [*_times(cell.ttft), *_times(cell.tpot), *_times(cell.itl)]
                rows.append([str(concurrency), arm, *times])
    return rows


def _mean_rows(result: BenchResult) -> list[list[str]]:
    """A row for each concurrency, a column for each arm."""
    rows = []
    for concurrency in sorted(result.settings.concurrencies):
        means = [result.mean(concurrency, arm) for arm in result.compared_arms]
        shown = ["" if mean is None else _ratio(mean.speedup_spread) for mean in means]
        rows.append([str(concurrency), *shown])
    return rows


def _prediction_sentence(result: BenchResult) -> str:
    if result.prediction is None:
        return ""
    return (
        f"The cost model of the tuned file predicts the measured speed-up to within {CLOSE:.0%} "
        f"in {result.prediction.within_15_percent:.0%} of {result.prediction.cells} cells."
    )


def _ratio(spread: Spread) -> str:
    return f"{spread.median:.2f}x ({spread.low:.2f}-{spread.high:.2f})"


def _speedup(cell: CellResult | None) -> str:
    return "" if cell is None or cell.speedup_spread is None else _ratio(cell.speedup_spread)


def _rate(cell: CellResult | None) -> str:
    return "" if cell is None else f"{cell.tokens_per_second.median:.1f}"


def _length(cell: CellResult | None) -> str:
    return "" if cell is None or cell.acceptance_length is None else f"{cell.acceptance_length:.2f}"


def _times(latency: Latency) -> list[str]:
    return [f"{latency.median:.1f}", f"{latency.p99:.1f}"]


# Charts; None where there is nothing to draw.


def picture(result: BenchResult) -> str:
    """The chart for a README: mean speed-ups, and each prompt set at the lowest concurrency."""
    lowest = min(result.settings.concurrencies)
    by_set = _by_arm(
        result,
        lambda arm: [
            _point(name, cell.speedup_spread)
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


def _point(label: str, spread: Spread | None) -> charts.Point | None:
    """The median over rounds, with minimum and maximum."""
    return None if spread is None else charts.Point(label, spread.median, spread.low, spread.high)


def _mean_speedups(result: BenchResult) -> charts.Chart | None:
    series = _by_arm(
        result,
        lambda arm: [
            _point(str(concurrency), mean.speedup_spread)
            for concurrency in sorted(result.settings.concurrencies)
            if (mean := result.mean(concurrency, arm)) is not None
        ],
    )
    return charts.dots(series, MEANS, _REQUESTS, "speed-up") if series else None


def _speedups_of_set(result: BenchResult, prompt_set: str) -> charts.Chart | None:
    series = _by_arm(
        result,
        lambda arm: [
            _point(str(concurrency), cell.speedup_spread)
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


# The HTML page.


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
    explained = html.Text(METHOD, soft=True)
    if chart is None:
        return html.Section("", [explained])
    heads = [_CONCURRENCY, *result.compared_arms]
    table = html.Table(heads, _mean_rows(result), text_columns=1)
    return html.Section(MEANS, [explained, html.Drawing(chart), table])


def _set_section(result: BenchResult, prompt_set: str) -> html.Section:
    throughput = _throughput_rows(result, prompt_set)
    latency = html.Table(_LATENCY_HEADS, _latency_rows(result, prompt_set), text_columns=2)
    return html.Section(
        prompt_set,
        [
            *_drawings(_speedups_of_set(result, prompt_set)),
            html.Table(_throughput_heads(result), throughput, text_columns=1),
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
    explained = [html.Text(_prediction_sentence(result), soft=True)] if drawn else []
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


# The terminal.


def print_result(result: BenchResult, console: Console | None = None) -> None:
    console = console or Console()
    for prompt_set in result.settings.prompts:
        rows = _throughput_rows(result, prompt_set)
        console.print(_table(prompt_set, _throughput_heads(result), rows))
        rows = _latency_rows(result, prompt_set)
        console.print(_table(f"{prompt_set}: latency", _LATENCY_HEADS, rows, text_columns=2))
    if result.compared_arms:
        heads = [_CONCURRENCY, *result.compared_arms]
        console.print(_table(MEANS, heads, _mean_rows(result)))
        console.print(Text(METHOD, style="dim"))
    for sentence in (_prediction_sentence(result), conclusion(result)):
        if sentence:
            console.print(Text(printable(sentence)))


def conclusion(result: BenchResult) -> str:
    """One sentence: where drafting pays."""
    match result.outcome:
        case "faster":
            where = [
                f"{arm} at concurrency {', '.join(str(m.concurrency) for m in means)}"
                for arm in result.compared_arms
                if (means := [m for m in result.faster if m.arm == arm])
            ]
            return f"Faster than bare vLLM, 95% interval above 1: {'; '.join(where)}."
        case "slower":
            return "Slower than bare vLLM at every concurrency: serve without this drafter."
        case "undecided":
            return "No significant difference from bare vLLM: measure more rounds to decide."
    return ""


def next_command(settings: BenchSettings, result: BenchResult) -> str:
    drafter = settings.draft[0] if settings.draft else "DRAFTER"
    if result.outcome is None:
        words = ["bench", settings.target, "--draft", drafter]
    elif settings.tuned is None:
        words = ["tune", settings.target, drafter]
    elif result.outcome == "slower":
        words = ["serve", settings.target]
    else:
        words = ["serve", settings.target, "--draft", drafter, "--tuned", str(settings.tuned)]
    return shlex.join(["leadout", *words])


def print_written(paths: Sequence[Path], next_step: str, console: Console | None = None) -> None:
    console = console or Console()
    for path in paths:
        console.print(Text(printable(f"wrote {path}")), soft_wrap=True)
    console.print(Text(printable(f"next: {next_step}")), soft_wrap=True)


def print_plan(plan: BenchPlan, console: Console | None = None) -> None:
    console = console or Console()
    rates = ", ".join(f"{rate:.0f} at {c}" for c, rate in sorted(plan.rates.items()))
    facts = [
        ("arms", ", ".join(plan.arms)),
        ("prompt sets", ", ".join(plan.prompt_sets)),
        ("concurrencies", ", ".join(map(str, plan.concurrencies))),
        ("rounds", str(plan.rounds)),
        ("cells to measure", f"{plan.cells:,} ({plan.cells_done:,} already measured)"),
        ("output tokens", f"{plan.output_tokens:,}"),
        ("time", f"about {plan.minutes:.0f} minutes, plus starting {len(plan.arms)} servers"),
        ("assuming", f"output tokens per second by concurrency, for every arm: {rates}"),
        ("based on", plan.rates_from),
    ]
    console.print(facts_table(facts))


def _table(
    title: str, heads: Sequence[str], rows: Sequence[Sequence[str]], text_columns: int = 0
) -> Table:
    """Numbers are aligned right, and so is the concurrency in the first column."""
    table = Table(
        title=printable(title),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
    )
    for place, head in enumerate(heads):
        side: JustifyMethod = "left" if 0 < place < text_columns else "right"
        table.add_column(printable(head).replace(" ", "\n"), justify=side, no_wrap=True)
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    return table


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
