"""The terminal report of a bench: tables, the conclusion and the next command."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
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

MEANS = "Speed-up over bare vLLM, geometric mean over prompt sets"
METHOD = (
    "Speed-up: output tokens per second divided by those of bare vLLM in the same round, with the "
    "same prompts; geometric mean over rounds, with a 95% interval by bootstrap over rounds, each "
    "of which draws its prompts anew. Bare vLLM runs on two servers: the ratio of the two (A/A) "
    "would be 1 without measurement error. Sampling is greedy, and prefix caching is off. AL "
    "(acceptance length): tokens per step that drafted, including the target's own. CPU: the same "
    "ratio by processor seconds per token of all processes of a server."
)
TURNS = {
    "slices": "Servers take turns in slices of a quarter of a second.",
    "waves": "Servers take turns in windows of {seconds:g} s.",
    "single": "One server is up at a time, so that arms are measured minutes apart.",
}
AGAIN = "A/A: bare again"
CONCURRENCY = "conc."
LATENCY_HEADS = [CONCURRENCY, "arm", "TTFT ms", "p99", "TPOT ms", "p99", "ITL ms", "p99"]


def print_result(result: BenchResult, console: Console | None = None) -> None:
    console = console or Console()
    for prompt_set in result.settings.prompts:
        rows = throughput_rows(result, prompt_set)
        console.print(_table(prompt_set, throughput_heads(result), rows))
        rows = latency_rows(result, prompt_set)
        console.print(_table(f"{prompt_set}: latency", LATENCY_HEADS, rows, text_columns=2))
    if result.compared_arms:
        console.print(_table(MEANS, mean_heads(result), mean_rows(result)))
        console.print(Text(method(result), style="dim"))
    for sentence in (prediction_sentence(result), conclusion(result)):
        if sentence:
            console.print(Text(printable(sentence)))


def method(result: BenchResult) -> str:
    setup = result.settings
    length = (
        f"Requests end at the end of text, or after {setup.output_tokens} tokens."
        if setup.stop_at_end_of_text
        else f"Every request generates {setup.output_tokens} tokens; end of text is ignored."
    )
    return f"{METHOD} {length} {TURNS[setup.turns].format(seconds=setup.seconds)}"


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
    facts = [
        ("arms", ", ".join(plan.arms)),
        ("prompt sets", ", ".join(plan.prompt_sets)),
        ("concurrencies", ", ".join(map(str, plan.concurrencies))),
        ("rounds", str(plan.rounds)),
        ("turns", TURNS[plan.turns].format(seconds=plan.seconds)),
        ("cells to measure", f"{plan.cells:,} ({plan.cells_done:,} already measured)"),
        ("time", f"about {plan.minutes:.0f} minutes, plus {plan.server_starts} starts of a server"),
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


# Rows of the tables, in the terminal and on the page.


def throughput_heads(result: BenchResult) -> list[str]:
    heads = [CONCURRENCY, f"{BARE} tok/s"]
    for arm in result.compared_arms:
        heads += [f"{arm} tok/s", "speed-up", "AL"]
    return heads


def throughput_rows(result: BenchResult, prompt_set: str) -> list[list[str]]:
    rows = []
    for concurrency in sorted(result.settings.concurrencies):
        row = [str(concurrency), _rate(result.cell(prompt_set, concurrency, BARE))]
        for arm in result.compared_arms:
            cell = result.cell(prompt_set, concurrency, arm)
            row += [_rate(cell), _speedup(cell), _length(cell)]
        rows.append(row)
    return rows


def latency_rows(result: BenchResult, prompt_set: str) -> list[list[str]]:
    rows = []
    for concurrency in sorted(result.settings.concurrencies):
        for arm in result.arms:
            cell = result.cell(prompt_set, concurrency, arm)
            if cell is not None:
                times = [text for part in (cell.ttft, cell.tpot, cell.itl) for text in _times(part)]
                rows.append([str(concurrency), arm, *times])
    return rows


def mean_heads(result: BenchResult) -> list[str]:
    heads = [CONCURRENCY, AGAIN, "CPU"]
    for arm in result.compared_arms:
        heads += [arm, "CPU"]
    return heads


def mean_rows(result: BenchResult) -> list[list[str]]:
    """A row for each concurrency: the error of the method, then each arm, both by clock and CPU."""
    again = {each.concurrency: each for each in result.bare_against_bare}
    rows = []
    for concurrency in sorted(result.settings.concurrencies):
        row = [str(concurrency)]
        error = again.get(concurrency)
        if error is None:
            row += ["", ""]
        else:
            row += [
                _ratio(error.ratio, error.low, error.high),
                f"{error.processor_ratio.value:.2f}",
            ]
        for arm in result.compared_arms:
            mean = result.mean(concurrency, arm)
            if mean is None:
                row += ["", ""]
            else:
                shown = _ratio(mean.speedup, mean.low, mean.high)
                row += [shown, f"{mean.processor_ratio.value:.2f}"]
        rows.append(row)
    return rows


def prediction_sentence(result: BenchResult) -> str:
    if result.prediction is None:
        return ""
    return (
        f"The cost model of the tuned file predicts the measured speed-up to within {CLOSE:.0%} "
        f"in {result.prediction.within_15_percent:.0%} of {result.prediction.cells} cells."
    )


def _ratio(value: float, low: float | None, high: float | None) -> str:
    if low is None or high is None:
        return f"{value:.2f}x"
    return f"{value:.2f}x ({low:.2f}-{high:.2f})"


def _speedup(cell: CellResult | None) -> str:
    if cell is None or cell.speedup is None:
        return ""
    return _ratio(cell.speedup, cell.low, cell.high)


def _rate(cell: CellResult | None) -> str:
    return "" if cell is None else f"{cell.tokens_per_second.median:.1f}"


def _length(cell: CellResult | None) -> str:
    return "" if cell is None or cell.acceptance_length is None else f"{cell.acceptance_length:.2f}"


def _times(latency: Latency | None) -> list[str]:
    if latency is None:
        return ["", ""]
    return [f"{latency.median:.1f}", f"{latency.p99:.1f}"]
