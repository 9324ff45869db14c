"""What a person sees of a check in the terminal: a bar while it runs, then verdict and tables."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from leadout.check.findings import Gravity, Verdict, by_weight
from leadout.check.result import CheckResult
from leadout.check.words import (
    acceptance_rows,
    best_tried,
    lossless_words,
    name_of,
    parity_words,
    sentence,
    spread,
)
from leadout.checkpoints.errors import printable

_STYLES = {Verdict.FIT: "bold green", Verdict.DOUBTFUL: "bold yellow", Verdict.UNFIT: "bold red"}
_GRAVITY = {Gravity.UNFIT: "red", Gravity.DOUBTFUL: "yellow", Gravity.NOTE: "dim"}


def print_result(result: CheckResult, console: Console | None = None) -> None:
    console = console or Console()
    verdict = Text(result.verdict.value.upper(), style=_STYLES[result.verdict])
    console.print(Text.assemble(verdict, "  ", _clean(sentence(result))))
    if result.findings:
        console.print(_findings_table(result))
    if result.offline is not None:
        console.print(_acceptance_table(result))
    if result.parity is not None:
        console.print(_clean(f"Parity: {parity_words(result.parity)}."))
    if result.lossless is not None:
        console.print(_clean(f"Losslessness: {lossless_words(result.lossless)}."))
    if result.tried:
        console.print(_tried_table(result))


def _findings_table(result: CheckResult) -> Table:
    table = Table("gravity", "finding", "what", "remedy", box=box.SIMPLE_HEAD, show_lines=True)
    table.columns[1].overflow = "fold"
    for finding in by_weight(result.findings):
        gravity = Text(finding.gravity.value, style=_GRAVITY[finding.gravity])
        texts = (finding.name, finding.message, finding.remedy)
        table.add_row(gravity, *(_clean(text) for text in texts))
    return table


def _acceptance_table(result: CheckResult) -> Table:
    table = Table(
        title="Acceptance length: tokens for each step of the target",
        title_justify="left",
        box=box.SIMPLE_HEAD,
    )
    table.add_column("texts")
    columns = ("count", "offline", "95% interval", *(name_of(each) for each in result.served))
    for heading in columns:
        table.add_column(heading, justify="right")
    kind = "all"
    for row in acceptance_rows(result):
        if row.kind != kind:
            table.add_section()
            kind = row.kind
        length = row.offline.length
        served = ("" if value is None else f"{value:.2f}" for value in row.served)
        table.add_row(
            _clean(row.label),
            str(row.offline.texts),
            f"{length.value:.2f}",
            spread(length),
            *served,
        )
    return table


def _tried_table(result: CheckResult) -> Table:
    best = best_tried(result)
    table = Table(
        title=f"Changes tried on the drafter, the best {len(best)} of {len(result.tried)}",
        title_justify="left",
        box=box.SIMPLE_HEAD,
    )
    table.add_column("cause")
    table.add_column("change", overflow="fold")
    for heading in ("before", "after", "difference", "95% interval"):
        table.add_column(heading, justify="right")
    for tried in best:
        table.add_row(
            _clean(tried.cause),
            _clean(tried.edit),
            f"{tried.before:.2f}",
            f"{tried.after:.2f}",
            f"{tried.difference.value:+.2f}",
            spread(tried.difference),
        )
    return table


def _clean(text: str) -> Text:
    """Text that may come from a file: no markup, no control characters."""
    return Text(printable(text))
